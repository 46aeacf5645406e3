#include "cublaslt_matmul.h"

#include <cstring>
#include <limits>
#include <string>

#include "errors.h"
#include "loaded_library.h"

namespace gemm_workspace {
namespace {

void settle(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Refused(std::string("cuBLASLt: ") + what + " ended with status " +
                std::to_string(static_cast<int>(status)));
}

// The ops count elements of one matrix in 32 bits; beyond that their launch is not this one.
void check(const MatmulProblem& problem) {
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const auto size = [&](const char* name, std::int64_t value) {
    if (value < 1 || value > most) {
      throw Refused(std::string("cuBLASLt: ") + name + " is " + std::to_string(value) +
                    ", wanted 1 to " + std::to_string(most));
    }
  };
  size("batch", problem.batch);
  size("m", problem.m);
  size("n", problem.n);
  size("k", problem.k);
  if ((problem.a_scale == nullptr) != (problem.b_scale == nullptr)) {
    throw Refused("cuBLASLt: one scale is given, wanted two or none");
  }
  if (problem.batch > 1) {
    size("m * k", problem.m * problem.k);
    size("k * n", problem.k * problem.n);
    size("m * n", problem.m * problem.n);
  }
}

}  // namespace

CublasLt::CublasLt(int major) {
  const auto library = LoadedLibrary::find("libcublasLt", major);
  const auto bind = [&](auto*& function, const char* name) {
    function = library.function<std::remove_reference_t<decltype(*function)>>(name);
  };
  bind(desc_create, "cublasLtMatmulDescCreate");
  bind(desc_destroy, "cublasLtMatmulDescDestroy");
  bind(desc_set, "cublasLtMatmulDescSetAttribute");
  bind(layout_create, "cublasLtMatrixLayoutCreate");
  bind(layout_destroy, "cublasLtMatrixLayoutDestroy");
  bind(layout_set, "cublasLtMatrixLayoutSetAttribute");
  bind(preference_create, "cublasLtMatmulPreferenceCreate");
  bind(preference_destroy, "cublasLtMatmulPreferenceDestroy");
  bind(preference_set, "cublasLtMatmulPreferenceSetAttribute");
  bind(heuristic, "cublasLtMatmulAlgoGetHeuristic");
  bind(matmul, "cublasLtMatmul");
}

CublasLtMatmul::CublasLtMatmul(const CublasLt& library, cublasLtHandle_t handle,
                               const MatmulProblem& problem, std::size_t workspace_bytes,
                               const std::optional<Algorithm>& algorithm)
    : library_(library),
      handle_(handle),
      scaled_(problem.scaled()),
      workspace_bytes_(workspace_bytes),
      desc_(nullptr, library.desc_destroy),
      a_(nullptr, library.layout_destroy),
      b_(nullptr, library.layout_destroy),
      d_(nullptr, library.layout_destroy) {
  check(problem);
  cublasLtMatmulDesc_t desc = nullptr;
  settle(library.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "making a descriptor");
  desc_.reset(desc);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    settle(library.desc_set(desc, attribute, &value, sizeof(value)), "describing the product");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  if (scaled_) {
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{1});
    scales_[0] = problem.a_scale;
    scales_[1] = problem.b_scale;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales_[0]);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales_[1]);
  }
  a_ = layout(problem.a_type, problem.k, problem.m, problem.batch);
  b_ = layout(problem.b_type, problem.k, problem.n, problem.batch);
  d_ = layout(problem.d_type, problem.m, problem.n, problem.batch);
  if (algorithm) {
    std::memcpy(&algorithm_, algorithm->data(), sizeof(algorithm_));
  } else {
    choose();
  }
}

CublasLtMatmul::Owned<cublasLtMatrixLayoutOpaque_t> CublasLtMatmul::layout(
    cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t batch) const {
  cublasLtMatrixLayout_t made = nullptr;
  settle(library_.layout_create(&made, type, static_cast<std::uint64_t>(rows),
                                static_cast<std::uint64_t>(columns), rows),
         "making a layout");
  Owned<cublasLtMatrixLayoutOpaque_t> layout(made, library_.layout_destroy);
  if (batch > 1) {
    const auto count = static_cast<std::int32_t>(batch);
    const std::int64_t stride = rows * columns;
    settle(library_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
           "describing a batch");
    settle(library_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                               sizeof(stride)),
           "describing a batch");
  }
  return layout;
}

void CublasLtMatmul::choose() {
  cublasLtMatmulPreference_t made = nullptr;
  settle(library_.preference_create(&made), "making a preference");
  Owned<cublasLtMatmulPreferenceOpaque_t> preference(made, library_.preference_destroy);
  settle(library_.preference_set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes_,
                                 sizeof(workspace_bytes_)),
         "limiting the workspace");
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  settle(library_.heuristic(handle_, desc_.get(), a_.get(), b_.get(), d_.get(), d_.get(), made, 1,
                            &result, &count),
         "asking the heuristic");
  if (count < 1) throw Refused("cuBLASLt: the heuristic names no algorithm");
  algorithm_ = result.algo;
}

void CublasLtMatmul::launch(void* const* addresses, Workspace workspace, cudaStream_t stream) {
  static constexpr float kOne = 1.0F, kZero = 0.0F;
  const auto run = [&] {
    return library_.matmul(handle_, desc_.get(), &kOne, addresses[0], a_.get(), addresses[1],
                           b_.get(), &kZero, nullptr, d_.get(), addresses[2], d_.get(), &algorithm_,
                           workspace.address, workspace_bytes_, stream);
  };
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  if (scaled_) {
    const std::lock_guard lock(mutex_);
    static constexpr cublasLtMatmulDescAttributes_t kScales[] = {
        CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER};
    for (int i = 0; i < 2 && status == CUBLAS_STATUS_SUCCESS; ++i) {
      const void* scale = addresses[3 + i];
      if (scale == scales_[i]) continue;
      status = library_.desc_set(desc_.get(), kScales[i], &scale, sizeof(scale));
      if (status == CUBLAS_STATUS_SUCCESS) scales_[i] = scale;
    }
    if (status == CUBLAS_STATUS_SUCCESS) status = run();
  } else {
    status = run();
  }
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw LaunchFailed("cuBLASLt: the matmul ended with status " +
                       std::to_string(static_cast<int>(status)));
  }
}

CublasLtMatmul::Algorithm CublasLtMatmul::algorithm() const {
  Algorithm bytes;
  std::memcpy(bytes.data(), &algorithm_, sizeof(algorithm_));
  return bytes;
}

}  // namespace gemm_workspace
