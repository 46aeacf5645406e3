#include "cudnn_plan.h"

#include <cudnn.h>

// The frontend then asks cudnn_dlhandle for each function of cuDNN, and nothing is linked.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend_ExecutionPlan.h>

#include <algorithm>
#include <optional>
#include <set>

#include "errors.h"
#include "loaded_library.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace gemm_workspace {
namespace {

using nlohmann::json;

// Of the form that this reads; the frontend writes it into what it serializes.
constexpr const char* kFormat = "2.0";

[[noreturn]] void refuse(const std::string& why) { throw Refused("cuDNN plan: " + why); }

void settle(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw LaunchFailed(std::string("cuDNN plan: ") + what + " ended with status " +
                     std::to_string(static_cast<int>(status)));
}

const json& part(const json& graph, const char* name) {
  const auto found = graph.find(name);
  if (found == graph.end()) refuse(std::string("what was serialized has no ") + name);
  return *found;
}

void check_empty(const json& graph, const char* name) {
  const auto found = graph.find(name);
  if (found != graph.end() && !found->empty()) {
    refuse(std::string("the graph has ") + name + ", wanted one that needs addresses only");
  }
}

// The parts of a plan's name, "eng12_k2=1_k3=0": the engine, and each knob with its choice.
std::set<std::string> parts_of(std::string_view name) {
  std::set<std::string> parts;
  while (!name.empty()) {
    const std::size_t end = std::min(name.find('_'), name.size());
    parts.emplace(name.substr(0, end));
    name.remove_prefix(std::min(end + 1, name.size()));
  }
  return parts;
}

json parse(std::string_view serialized) {
  json graph = json::from_ubjson(serialized.begin(), serialized.end(), true, false);
  if (!graph.is_object()) refuse("what was serialized is not a graph of cudnn-frontend");
  const json& version = part(graph, "json_version");
  if (version != kFormat) refuse("format " + version.dump() + ", wanted \"" + kFormat + "\"");
  for (const char* name : {"pass_by_values", "workspace_modifications", "variant_pack_replacements",
                           "tensors_to_dump"}) {
    check_empty(graph, name);
  }
  if (part(graph, "fe_workspace_size") != 0) refuse("the frontend itself uses workspace");
  return graph;
}

}  // namespace

Cudnn::Cudnn() {
  const auto library = LoadedLibrary::find("libcudnn", CUDNN_MAJOR);
  version_ = library.function<decltype(cudnnGetVersion)>("cudnnGetVersion")();
  // Of cuDNN 9 on: major * 10000 + minor * 100 + patch.
  if (version_ / 100 != CUDNN_VERSION / 100) {
    throw Refused("cuDNN " + std::to_string(version_) + " is loaded, wanted a " +
                  std::to_string(CUDNN_MAJOR) + "." + std::to_string(CUDNN_MINOR) +
                  ", with whose headers this was compiled");
  }
  cudnn_frontend::cudnn_dlhandle = library.handle();
}

std::size_t Cudnn::compiled_version() { return CUDNN_VERSION; }

struct CudnnPlan::Body {
  cudnnHandle_t handle;
  std::vector<std::int64_t> uids;
  // By operand: what its address has to be a multiple of.
  std::vector<std::uintptr_t> alignments;
  std::optional<cudnn_frontend::ExecutionPlan_v8> plan;
  std::size_t workspace_bytes;
};

CudnnPlan::CudnnPlan(const Cudnn&, std::intptr_t handle, std::string_view serialized,
                     std::string_view name)
    : body_(std::make_unique<Body>()) {
  if (handle == 0) refuse("no handle");
  body_->handle = reinterpret_cast<cudnnHandle_t>(handle);
  try {
    const json graph = parse(serialized);
    body_->uids = part(graph, "variant_pack_uids").get<std::vector<std::int64_t>>();
    std::sort(body_->uids.begin(), body_->uids.end());
    if (body_->uids.empty()) refuse("a graph without operands");
    body_->alignments.assign(body_->uids.size(), 1);
    if (const auto aligned = graph.find("aligned_operands"); aligned != graph.end()) {
      for (const auto& [uid, how] : aligned->items()) {
        const auto at = std::find(body_->uids.begin(), body_->uids.end(), std::stoll(uid));
        if (at == body_->uids.end()) continue;
        const auto alignment = how.at(0).get<std::uintptr_t>();
        if (alignment > 0) body_->alignments[at - body_->uids.begin()] = alignment;
      }
    }
    cudnn_frontend::ExecutionPlanBuilder_v8 builder;
    builder.setHandle(body_->handle);
    body_->plan.emplace(builder.loadFromJson(part(graph, "cudnn_backend_data").get<std::string>()));
  } catch (const json::exception& error) {
    refuse(std::string("what was serialized is not understood: ") + error.what());
  } catch (const cudnn_frontend::cudnnException& error) {
    refuse(error.what());
  }
  if (!name.empty() && parts_of(name) != parts_of(this->name())) {
    refuse("it was rebuilt as " + this->name() + ", wanted " + std::string(name));
  }
  const std::int64_t bytes = body_->plan->getWorkspaceSize();
  if (bytes < 0) refuse("a workspace of " + std::to_string(bytes) + " bytes");
  body_->workspace_bytes = static_cast<std::size_t>(bytes);
}

CudnnPlan::~CudnnPlan() = default;

std::size_t CudnnPlan::operands() const { return body_->uids.size(); }

std::size_t CudnnPlan::workspace_bytes() const { return body_->workspace_bytes; }

const std::vector<std::int64_t>& CudnnPlan::uids() const { return body_->uids; }

const std::string& CudnnPlan::name() const { return body_->plan->getTag(); }

void CudnnPlan::launch(void* const* addresses, Workspace workspace, cudaStream_t) {
  namespace backend = cudnn_frontend::detail;
  const Body& body = *body_;
  const std::size_t count = body.uids.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (reinterpret_cast<std::uintptr_t>(addresses[i]) % body.alignments[i] != 0) {
      throw LaunchFailed("cuDNN plan: operand " + std::to_string(body.uids[i]) +
                         " is not aligned to " + std::to_string(body.alignments[i]) + " bytes");
    }
  }
  // A finished pack cannot be changed, so each launch makes one.
  cudnnBackendDescriptor_t made = nullptr;
  settle(backend::create_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &made), "a pack");
  const auto destroy = [](cudnnBackendDescriptor_t pack) { backend::destroy_descriptor(pack); };
  const std::unique_ptr<void, decltype(destroy)> pack(made, destroy);
  const auto set = [&](cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                       std::size_t size, const void* values) {
    settle(backend::set_attribute(made, name, type, static_cast<std::int64_t>(size), values),
           "filling the pack");
  };
  set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace.address);
  set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, addresses);
  set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, body.uids.data());
  settle(backend::finalize(made), "finishing the pack");
  settle(backend::execute(body.handle, body.plan->get_raw_desc(), made), "the launch");
}

}  // namespace gemm_workspace
