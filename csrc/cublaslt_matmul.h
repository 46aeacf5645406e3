// A matmul of cuBLASLt whose descriptors and algorithm are settled.
#pragma once

#include <cublasLt.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>

#include "launcher.h"

namespace gemm_workspace {

// The functions of cuBLASLt that are used.
class CublasLt {
 public:
  // Throws Refused if no cuBLASLt of that major version is loaded, or two are.
  explicit CublasLt(int major);

  decltype(cublasLtMatmulDescCreate)* desc_create;
  decltype(cublasLtMatmulDescDestroy)* desc_destroy;
  decltype(cublasLtMatmulDescSetAttribute)* desc_set;
  decltype(cublasLtMatrixLayoutCreate)* layout_create;
  decltype(cublasLtMatrixLayoutDestroy)* layout_destroy;
  decltype(cublasLtMatrixLayoutSetAttribute)* layout_set;
  decltype(cublasLtMatmulPreferenceCreate)* preference_create;
  decltype(cublasLtMatmulPreferenceDestroy)* preference_destroy;
  decltype(cublasLtMatmulPreferenceSetAttribute)* preference_set;
  decltype(cublasLtMatmulAlgoGetHeuristic)* heuristic;
  decltype(cublasLtMatmul)* matmul;
};

// D = A^T B in cuBLASLt's column-major terms, in 32-bit float: A is k x m, B is k x n and D is
// m x n, each dense, `batch` of each one behind the other. A row-major product X Y^T of the ops
// is this with A = Y and B = X.
struct MatmulProblem {
  cudaDataType_t a_type, b_type, d_type;
  std::int64_t batch, m, n, k;
  // FP8: scales of A and B, a float each on the device, and sums in the fast way. Of a problem
  // without scales both are null.
  const void* a_scale;
  const void* b_scale;

  bool scaled() const { return a_scale != nullptr; }
};

// Operands: A, B, D, and of a scaled problem the scales of A and B. Threads may launch at once;
// those of one scaled problem take turns, since its descriptor names the scales.
class CublasLtMatmul final : public Launcher {
 public:
  using Algorithm = std::array<char, sizeof(cublasLtMatmulAlgo_t)>;

  // Without an algorithm, the one that the heuristic names first for this much workspace. The
  // handle must last as long as this. Throws Refused.
  CublasLtMatmul(const CublasLt& library, cublasLtHandle_t handle, const MatmulProblem& problem,
                 std::size_t workspace_bytes, const std::optional<Algorithm>& algorithm);

  std::size_t operands() const override { return scaled_ ? 5 : 3; }
  std::size_t workspace_bytes() const override { return workspace_bytes_; }
  void launch(void* const* addresses, Workspace workspace, cudaStream_t stream) override;

  // The algorithm, as cuBLASLt keeps it.
  Algorithm algorithm() const;

 private:
  template <typename Opaque>
  using Owned = std::unique_ptr<Opaque, cublasStatus_t (*)(Opaque*)>;

  Owned<cublasLtMatrixLayoutOpaque_t> layout(cudaDataType_t type, std::int64_t rows,
                                             std::int64_t columns, std::int64_t batch) const;
  void choose();

  const CublasLt& library_;
  const cublasLtHandle_t handle_;
  const bool scaled_;
  const std::size_t workspace_bytes_;
  Owned<cublasLtMatmulDescOpaque_t> desc_;
  Owned<cublasLtMatrixLayoutOpaque_t> a_, b_, d_;
  cublasLtMatmulAlgo_t algorithm_{};
  std::mutex mutex_;  // of the scales that desc_ names
  const void* scales_[2] = {nullptr, nullptr};
};

}  // namespace gemm_workspace
