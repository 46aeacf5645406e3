// The C ABI of tvm-ffi, through which Python calls. Exceptions end here as tvm-ffi's errors.
//
// What is made here lasts as long as the process and is never destroyed: at exit the driver may be
// gone before it.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cublaslt_matmul.h"
#include "cudart.h"
#include "cudnn_plan.h"
#include "errors.h"
#include "table.h"

namespace gemm_workspace {
namespace {

namespace ffi = tvm::ffi;

// Raised with every change of what is exported; Python asks for the one that it knows.
constexpr std::int64_t kAbi = 1;

// What is attached; set once and for good. attach() and its like are called one at a time.
const Cudart* g_cudart = nullptr;
const CublasLt* g_cublaslt = nullptr;
const Cudnn* g_cudnn = nullptr;
Table* g_table = nullptr;

template <typename Attached>
Attached& attached(Attached* what, const char* name) {
  if (what == nullptr) throw Refused(std::string(name) + " is not attached");
  return *what;
}

Table& table() { return attached(g_table, "the CUDA runtime"); }

cudaStream_t as_stream(std::int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

void* as_address(std::int64_t address) { return reinterpret_cast<void*>(address); }

// The element types of the ops.
cudaDataType_t as_cuda(DLDataType type) {
  const auto is = [&](int code, int bits) {
    return type.code == code && type.bits == bits && type.lanes == 1;
  };
  if (is(kDLFloat8_e4m3fn, 8)) return CUDA_R_8F_E4M3;
  if (is(kDLFloat8_e5m2, 8)) return CUDA_R_8F_E5M2;
  if (is(kDLBfloat, 16)) return CUDA_R_16BF;
  if (is(kDLFloat, 16)) return CUDA_R_16F;
  if (is(kDLFloat, 32)) return CUDA_R_32F;
  throw Refused("a tensor of " + std::string(ffi::DLDataTypeToString(type)) +
                ", wanted one of float8_e4m3fn, float8_e5m2, bfloat16, float16, float32");
}

std::shared_ptr<Launcher> launcher(std::int64_t number) {
  auto found = table().get(number);
  if (found == nullptr) throw Refused("launcher " + std::to_string(number) + " is forgotten");
  return found;
}

std::int64_t abi() { return kAbi; }

// Use the CUDA runtime of that major version, torch's. Throws Refused if it is not loaded once.
void attach(std::int64_t major) {
  if (g_cudart == nullptr) g_cudart = new Cudart(static_cast<int>(major));
  if (g_table == nullptr) g_table = new Table(g_cudart);
}

// The same of cuBLASLt.
void attach_cublaslt(std::int64_t major) {
  if (g_cublaslt == nullptr) g_cublaslt = new CublasLt(static_cast<int>(major));
}

// Use the cuDNN that is loaded; its version. Throws Refused if there is not one, or if its major
// or minor is not that of the headers.
std::int64_t attach_cudnn() {
  if (g_cudnn == nullptr) g_cudnn = new Cudnn();
  return static_cast<std::int64_t>(g_cudnn->version());
}

// Version of cuDNN's headers.
std::int64_t compiled_cudnn() { return static_cast<std::int64_t>(Cudnn::compiled_version()); }

std::int64_t prepare_cublaslt(std::int64_t handle, DLDataType a_type, DLDataType b_type,
                              DLDataType d_type, std::int64_t batch, std::int64_t m, std::int64_t n,
                              std::int64_t k, std::int64_t a_scale, std::int64_t b_scale,
                              std::int64_t workspace_bytes, ffi::Bytes algorithm) {
  const MatmulProblem problem{
      as_cuda(a_type),     as_cuda(b_type),    as_cuda(d_type), batch, m, n, k,
      as_address(a_scale), as_address(b_scale)};
  if (workspace_bytes < 0) throw Refused("a workspace of less than no bytes");
  std::optional<CublasLtMatmul::Algorithm> given;
  if (algorithm.size() > 0) {
    given.emplace();
    if (algorithm.size() != given->size()) {
      throw Refused("an algorithm of " + std::to_string(algorithm.size()) + " bytes, wanted " +
                    std::to_string(given->size()));
    }
    std::copy_n(algorithm.data(), given->size(), given->begin());
  }
  return table().add(std::make_shared<CublasLtMatmul>(
      attached(g_cublaslt, "cuBLASLt"), reinterpret_cast<cublasLtHandle_t>(handle), problem,
      static_cast<std::size_t>(workspace_bytes), given));
}

// The algorithm of a launcher of cuBLASLt.
ffi::Bytes algorithm(std::int64_t number) {
  const auto found = launcher(number);
  const auto* matmul = dynamic_cast<const CublasLtMatmul*>(found.get());
  if (matmul == nullptr) throw Refused("launcher " + std::to_string(number) + " is not cuBLASLt's");
  const auto bytes = matmul->algorithm();
  return ffi::Bytes(bytes.data(), bytes.size());
}

std::int64_t prepare_cudnn(std::int64_t handle, ffi::Bytes serialized, ffi::String name) {
  return table().add(std::make_shared<CudnnPlan>(
      attached(g_cudnn, "cuDNN"), handle, std::string_view(serialized.data(), serialized.size()),
      std::string_view(name.data(), name.size())));
}

// The uids of the operands of a launcher of cuDNN, in their order.
ffi::Array<std::int64_t> uids(std::int64_t number) {
  const auto found = launcher(number);
  const auto* plan = dynamic_cast<const CudnnPlan*>(found.get());
  if (plan == nullptr) throw Refused("launcher " + std::to_string(number) + " is not cuDNN's");
  return ffi::Array<std::int64_t>(plan->uids().begin(), plan->uids().end());
}

std::int64_t workspace_bytes(std::int64_t number) {
  return static_cast<std::int64_t>(launcher(number)->workspace_bytes());
}

void use_workspace(std::int64_t number, std::int64_t stream, std::int64_t address,
                   std::int64_t bytes) {
  if (bytes < 0) throw Refused("a workspace of less than no bytes");
  table().use(number, as_stream(stream), {as_address(address), static_cast<std::size_t>(bytes)});
}

bool forget(std::int64_t number) { return table().forget(number); }

bool unlearn(std::int64_t number) { return table().unlearn(number); }

// Launchers and signatures now, launches that call() made so far.
ffi::Array<std::int64_t> counts() {
  const auto now = table().counts();
  return {now.launchers, now.signatures, now.launches};
}

// remember(launcher, variant, operands, output shape or None, output dtype or None, arguments...):
// a call() of this variant with arguments like these makes a launch of that launcher. `operands`
// are places of arguments, -1 for the output that is made.
void remember(const TVMFFIAny* given, int count) {
  constexpr int kFirst = 5;
  if (count < kFirst) throw Refused("remember() wants 5 arguments and those of the call");
  const auto* views = reinterpret_cast<const ffi::AnyView*>(given);
  const TVMFFIAny* arguments = given + kFirst;
  Recipe recipe;
  for (const std::int64_t place : views[2].cast<ffi::Array<std::int64_t>>()) {
    const bool is_tensor = place >= 0 && place < count - kFirst && tensor_of(arguments[place]);
    if (place != Recipe::kMade && !is_tensor) {
      throw Refused("operand at place " + std::to_string(place) + ", wanted that of a tensor");
    }
    recipe.operands.push_back(static_cast<int>(place));
  }
  if (given[3].type_index != kTVMFFINone) {
    const auto shape = views[3].cast<ffi::Array<std::int64_t>>();
    recipe.output = Output{{shape.begin(), shape.end()}, views[4].cast<DLDataType>()};
  }
  bool placed = false;
  for (int i = 0; i < count - kFirst; ++i) {
    const DLTensor* tensor = tensor_of(arguments[i]);
    if (tensor == nullptr) continue;
    if (placed && (tensor->device.device_type != recipe.device.device_type ||
                   tensor->device.device_id != recipe.device.device_id)) {
      throw Refused("tensors of several devices");
    }
    recipe.device = tensor->device;
    placed = true;
  }
  Signature signature;
  if (!placed || !signature.read(views[1].cast<std::int64_t>(), arguments, count - kFirst)) {
    throw Refused("arguments that cannot be told by a signature");
  }
  table().remember(signature, views[0].cast<std::int64_t>(), std::move(recipe));
}

// What launch() and its like are given, checked.
struct ByAddress {
  ByAddress(const TVMFFIAny* given, int count) {
    constexpr int kFirst = 4;
    if (count < kFirst || count > kFirst + kMostTensors) {
      throw Refused("launch() of so many operands");
    }
    for (int i = 0; i < count; ++i) {
      if (given[i].type_index != kTVMFFIInt) throw Refused("launch() takes integers only");
      if (i >= kFirst) addresses[i - kFirst] = as_address(given[i].v_int64);
    }
    launcher = gemm_workspace::launcher(given[0].v_int64);
    stream = as_stream(given[1].v_int64);
    workspace = {as_address(given[2].v_int64), static_cast<std::size_t>(given[3].v_int64)};
    if (static_cast<std::size_t>(count - kFirst) != launcher->operands()) {
      throw Refused(std::to_string(count - kFirst) + " operands are given, wanted " +
                    std::to_string(launcher->operands()));
    }
    if (given[3].v_int64 < 0 || workspace.bytes < launcher->workspace_bytes()) {
      throw Refused("a workspace of " + std::to_string(given[3].v_int64) + " bytes, wanted " +
                    std::to_string(launcher->workspace_bytes()));
    }
  }
  void launch() { launcher->launch(addresses.data(), workspace, stream); }

  std::shared_ptr<Launcher> launcher;
  cudaStream_t stream;
  Workspace workspace;
  std::array<void*, kMostTensors> addresses;
};

// launch(launcher, stream, workspace, workspace bytes, addresses...), all of them integers.
void launch(const TVMFFIAny* given, int count) { ByAddress(given, count).launch(); }

// timed(times, as for launch...): for benchmarks, nanoseconds of each of so many launches; what
// the vendor library and the driver take, with nothing of Python's.
ffi::Array<std::int64_t> timed(const TVMFFIAny* given, int count) {
  if (count < 1 || given[0].type_index != kTVMFFIInt) throw Refused("timed() wants a number");
  ByAddress one(given + 1, count - 1);
  using Clock = std::chrono::steady_clock;
  ffi::Array<std::int64_t> took;
  for (std::int64_t i = 0; i < given[0].v_int64; ++i) {
    const auto start = Clock::now();
    one.launch();
    took.push_back(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  }
  return took;
}

// call(variant, arguments...): None after a launch into an argument, the output after one into an
// output that was made, else an Outcome as a number.
void call(const TVMFFIAny* given, int count, TVMFFIAny* result) {
  if (count < 1 || given[0].type_index != kTVMFFIInt) throw Refused("call() wants a variant");
  struct Made {
    ~Made() {
      if (handle != nullptr) TVMFFIObjectDecRef(handle);
    }
    TVMFFIObjectHandle handle = nullptr;
  } made;
  const Outcome outcome = table().call(given[0].v_int64, given + 1, count - 1, &made.handle);
  if (outcome != Outcome::kLaunched) {
    result->type_index = kTVMFFIInt;
    result->v_int64 = static_cast<std::int64_t>(outcome);
  } else if (made.handle != nullptr) {
    result->type_index = kTVMFFITensor;
    result->v_obj = static_cast<TVMFFIObject*>(std::exchange(made.handle, nullptr));
  }
}

}  // namespace
}  // namespace gemm_workspace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi, gemm_workspace::abi);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attach, gemm_workspace::attach);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attach_cublaslt, gemm_workspace::attach_cublaslt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attach_cudnn, gemm_workspace::attach_cudnn);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compiled_cudnn, gemm_workspace::compiled_cudnn);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_cublaslt, gemm_workspace::prepare_cublaslt);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_cudnn, gemm_workspace::prepare_cudnn);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(algorithm, gemm_workspace::algorithm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(uids, gemm_workspace::uids);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, gemm_workspace::workspace_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_workspace, gemm_workspace::use_workspace);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget, gemm_workspace::forget);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unlearn, gemm_workspace::unlearn);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(counts, gemm_workspace::counts);

// These read their arguments as they come: a typed function would unpack them once more.
extern "C" {

TVM_FFI_DLL_EXPORT int __tvm_ffi_remember(void*, const TVMFFIAny* arguments, std::int32_t count,
                                          TVMFFIAny*) {
  TVM_FFI_SAFE_CALL_BEGIN();
  gemm_workspace::remember(arguments, count);
  TVM_FFI_SAFE_CALL_END();
}

TVM_FFI_DLL_EXPORT int __tvm_ffi_launch(void*, const TVMFFIAny* arguments, std::int32_t count,
                                        TVMFFIAny*) {
  TVM_FFI_SAFE_CALL_BEGIN();
  gemm_workspace::launch(arguments, count);
  TVM_FFI_SAFE_CALL_END();
}

TVM_FFI_DLL_EXPORT int __tvm_ffi_timed(void*, const TVMFFIAny* arguments, std::int32_t count,
                                       TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  *reinterpret_cast<tvm::ffi::Any*>(result) = gemm_workspace::timed(arguments, count);
  TVM_FFI_SAFE_CALL_END();
}

TVM_FFI_DLL_EXPORT int __tvm_ffi_call(void*, const TVMFFIAny* arguments, std::int32_t count,
                                      TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  gemm_workspace::call(arguments, count, result);
  TVM_FFI_SAFE_CALL_END();
}

}  // extern "C"
