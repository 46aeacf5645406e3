// Plans are loaded from "engine;workspace bytes", in the place of cuDNN's own text.
#include <cudnn.h>

#include <cstdlib>
#include <cstring>

#include "fakes.h"

namespace fakes {
Dnn& dnn() {
  static auto* const made = [] {
    auto* dnn = new Dnn();
    const char* version = std::getenv("FAKE_CUDNN_VERSION");
    dnn->version = version == nullptr ? CUDNN_VERSION : std::strtoul(version, nullptr, 10);
    return dnn;
  }();
  return *made;
}
}  // namespace fakes

namespace {

struct Descriptor {
  cudnnBackendDescriptorType_t type;
  bool finished = false;
  std::int64_t engine = 0, workspace_bytes = 0;
  std::string text;
  fakes::Execution execution;
};

template <typename Value>
std::vector<Value> as_values(const void* values, std::int64_t count) {
  const auto* first = static_cast<const Value*>(values);
  return std::vector<Value>(first, first + count);
}

}  // namespace

extern "C" {

FAKE std::size_t cudnnGetVersion() { return fakes::dnn().version; }

FAKE void cudnnGetLastErrorString(char* message, std::size_t size) {
  if (size > 0) message[0] = 0;
}

FAKE const char* cudnnGetErrorString(cudnnStatus_t) { return "no"; }

FAKE cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                cudnnBackendDescriptor_t* descriptor) {
  const std::lock_guard lock(fakes::dnn().mutex);
  ++fakes::dnn().live;
  auto* made = new Descriptor();
  made->type = type;
  *descriptor = made;
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  const std::lock_guard lock(fakes::dnn().mutex);
  --fakes::dnn().live;
  delete static_cast<Descriptor*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

FAKE cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                            cudnnBackendAttributeName_t name,
                                            cudnnBackendAttributeType_t, std::int64_t count,
                                            const void* values) {
  auto* made = static_cast<Descriptor*>(descriptor);
  if (made->finished) return CUDNN_STATUS_NOT_INITIALIZED;
  switch (name) {
    case CUDNN_ATTR_EXECUTION_PLAN_HANDLE:
      made->execution.handle = *static_cast<void* const*>(values);
      break;
    case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION: {
      made->text.assign(static_cast<const char*>(values), static_cast<std::size_t>(count));
      const std::size_t split = made->text.find(';');
      if (split == std::string::npos) return CUDNN_STATUS_BAD_PARAM;
      made->engine = std::atoll(made->text.c_str());
      made->workspace_bytes = std::atoll(made->text.c_str() + split + 1);
      break;
    }
    case CUDNN_ATTR_VARIANT_PACK_WORKSPACE:
      made->execution.workspace = *static_cast<void* const*>(values);
      break;
    case CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS:
      made->execution.addresses = as_values<void*>(values, count);
      break;
    case CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS:
      made->execution.uids = as_values<std::int64_t>(values, count);
      break;
    default:
      return CUDNN_STATUS_BAD_PARAM;
  }
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                            cudnnBackendAttributeName_t name,
                                            cudnnBackendAttributeType_t, std::int64_t,
                                            std::int64_t* count, void* values) {
  const auto* made = static_cast<const Descriptor*>(descriptor);
  if (count != nullptr) *count = 0;
  switch (name) {
    case CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      (*static_cast<Descriptor**>(values))->engine = made->engine;
      if (count != nullptr) *count = 1;
      break;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      *static_cast<std::int64_t*>(values) = made->engine;
      if (count != nullptr) *count = 1;
      break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *static_cast<std::int64_t*>(values) = made->workspace_bytes;
      if (count != nullptr) *count = 1;
      break;
    default:  // knobs, notes: none
      break;
  }
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  static_cast<Descriptor*>(descriptor)->finished = true;
  return CUDNN_STATUS_SUCCESS;
}

FAKE cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                       cudnnBackendDescriptor_t pack) {
  auto& dnn = fakes::dnn();
  const std::lock_guard lock(dnn.mutex);
  const auto* given = static_cast<const Descriptor*>(pack);
  if (!given->finished) return CUDNN_STATUS_BAD_PARAM;
  if (dnn.status != 0) return static_cast<cudnnStatus_t>(dnn.status);
  dnn.executions.push_back(given->execution);
  dnn.executions.back().handle = handle;
  dnn.executions.back().plan = static_cast<const Descriptor*>(plan)->text;
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
