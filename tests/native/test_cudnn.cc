// What reaches cuDNN, and what is refused. With the argument "refused": another cuDNN is loaded.
#include <cstring>
#include <cudnn_frontend/thirdparty/nlohmann/json.hpp>

#include "check.h"
#include "cudnn_plan.h"
#include "errors.h"
#include "fakes.h"

using namespace gemm_workspace;
using nlohmann::json;

namespace {

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

constexpr std::intptr_t kHandle = 0x1111;

// As cudnn-frontend 1.32 serializes a plan.
json graph() {
  return {{"json_version", "2.0"},
          {"cudnn_backend_data", "12;4096"},
          {"variant_pack_uids", {4, 0, 1}},
          {"behavior_notes", json::array({json::array()})},
          {"pass_by_values", json::object()},
          {"workspace_modifications", json::object()},
          {"variant_pack_replacements", json::object()},
          {"aligned_operands", {{"1", {16, 1}}}},
          {"fe_workspace_size", 0},
          {"tensors_to_dump", json::array()}};
}

std::string serialized(const json& graph) {
  const auto bytes = json::to_ubjson(graph);
  return std::string(bytes.begin(), bytes.end());
}

void launches(const Cudnn& library) {
  CudnnPlan plan(library, kHandle, serialized(graph()), "eng12");
  CHECK_EQUAL(plan.name(), "eng12");
  CHECK_EQUAL(plan.operands(), 3U);
  CHECK_EQUAL(plan.workspace_bytes(), 4096U);
  CHECK((plan.uids() == std::vector<std::int64_t>{0, 1, 4}));
  void* const addresses[] = {at(0x101), at(0x110), at(0x120)};
  plan.launch(addresses, {at(0xF0), 4096}, nullptr);
  const auto& seen = fakes::dnn().executions.back();
  CHECK(seen.handle == at(kHandle));
  CHECK_EQUAL(seen.plan, "12;4096");
  CHECK(seen.workspace == at(0xF0));
  CHECK((seen.addresses == std::vector<void*>{at(0x101), at(0x110), at(0x120)}));
  CHECK((seen.uids == std::vector<std::int64_t>{0, 1, 4}));

  void* const unaligned[] = {at(0x101), at(0x111), at(0x120)};
  check_throws<LaunchFailed>([&] { plan.launch(unaligned, {at(0xF0), 4096}, nullptr); },
                             "operand 1 is not aligned to 16 bytes");
  fakes::dnn().status = 5000;
  check_throws<LaunchFailed>([&] { plan.launch(addresses, {at(0xF0), 4096}, nullptr); },
                             "status 5000");
  fakes::dnn().status = 0;
  CHECK_EQUAL(fakes::dnn().executions.size(), 1U);
}

void refusals(const Cudnn& library) {
  const auto refuses = [&](const json& graph, const char* why) {
    check_throws<Refused>([&] { CudnnPlan(library, kHandle, serialized(graph), ""); }, why);
  };
  const auto with = [](const char* name, json value) {
    json changed = graph();
    changed[name] = std::move(value);
    return changed;
  };
  refuses(with("json_version", "3.0"), "format \"3.0\"");
  refuses(with("pass_by_values", {{"3", 1.0}}), "pass_by_values");
  refuses(with("workspace_modifications", {{"3", {0, 1, {0.0}}}}), "workspace_modifications");
  refuses(with("variant_pack_replacements", {{"3", {0, 1}}}), "variant_pack_replacements");
  refuses(with("tensors_to_dump", {{3, 'b'}}), "tensors_to_dump");
  refuses(with("fe_workspace_size", 16), "uses workspace");
  refuses(with("variant_pack_uids", json::array()), "without operands");
  refuses(with("variant_pack_uids", "none"), "not understood");
  refuses(with("cudnn_backend_data", "nonsense"), "JSON_REPRESENTATION Failed");
  json missing = graph();
  missing.erase("cudnn_backend_data");
  refuses(missing, "has no cudnn_backend_data");
  refuses(json::array(), "not a graph");
  check_throws<Refused>([&] { CudnnPlan(library, kHandle, "\x01\x02", ""); }, "not a graph");
  check_throws<Refused>([&] { CudnnPlan(library, kHandle, "", ""); }, "not a graph");
  check_throws<Refused>([&] { CudnnPlan(library, 0, serialized(graph()), ""); }, "no handle");
  check_throws<Refused>([&] { CudnnPlan(library, kHandle, serialized(graph()), "eng13_k2=1"); },
                        "rebuilt as eng12, wanted eng13_k2=1");
}

}  // namespace

int main(int count, char** arguments) {
  fakes::dnn();  // refers to the stand-in, so that it is loaded
  if (count > 1 && std::strcmp(arguments[1], "refused") == 0) {
    check_throws<Refused>([] { Cudnn(); }, "cuDNN 92001 is loaded, wanted a 9.19");
    return 0;
  }
  const Cudnn library;
  CHECK_EQUAL(library.version(), Cudnn::compiled_version());
  launches(library);
  refusals(library);
  CHECK_EQUAL(fakes::dnn().live, 0);
  return 0;
}
