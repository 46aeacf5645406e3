#include <cstring>

#include "fakes.h"

namespace fakes {
Cublas& cublas() {
  static auto* const made = new Cublas();
  return *made;
}
}  // namespace fakes

namespace {

struct Desc {
  std::map<int, std::vector<char>> attributes;
};

Desc* as_desc(cublasLtMatmulDesc_t desc) { return reinterpret_cast<Desc*>(desc); }

fakes::Matmul::Layout* as_layout(cublasLtMatrixLayout_t layout) {
  return reinterpret_cast<fakes::Matmul::Layout*>(layout);
}

template <typename Made>
void count(Made* made, int by) {
  const std::lock_guard lock(fakes::cublas().mutex);
  fakes::cublas().live += by;
  if (by < 0) delete made;
}

}  // namespace

extern "C" {

// For tests in Python.
FAKE void fake_cublas_status(int status) {
  fakes::cublas().status = static_cast<cublasStatus_t>(status);
}

FAKE cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t,
                                             cudaDataType_t) {
  auto* made = new Desc();
  count(made, 1);
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(made);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  count(as_desc(desc), -1);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                   cublasLtMatmulDescAttributes_t attribute,
                                                   const void* value, std::size_t size) {
  const auto* bytes = static_cast<const char*>(value);
  as_desc(desc)->attributes[attribute].assign(bytes, bytes + size);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                               std::uint64_t rows, std::uint64_t columns,
                                               std::int64_t ld) {
  auto* made = new fakes::Matmul::Layout{type, rows, columns, ld, 0, 1};
  count(made, 1);
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(made);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  count(as_layout(layout), -1);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                     cublasLtMatrixLayoutAttribute_t attribute,
                                                     const void* value, std::size_t size) {
  auto* made = as_layout(layout);
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && size == sizeof(made->batch)) {
    std::memcpy(&made->batch, value, size);
  } else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET &&
             size == sizeof(made->stride)) {
    std::memcpy(&made->stride, value, size);
  } else {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  auto* made = new std::uint64_t(0);
  count(made, 1);
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(made);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  count(reinterpret_cast<std::uint64_t*>(preference), -1);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
    const void* value, std::size_t size) {
  if (attribute != CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES || size != sizeof(std::uint64_t)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  std::memcpy(preference, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t preference,
    int requested, cublasLtMatmulHeuristicResult_t results[], int* returned) {
  auto& cublas = fakes::cublas();
  const std::lock_guard lock(cublas.mutex);
  ++cublas.heuristics;
  cublas.limit = *reinterpret_cast<std::uint64_t*>(preference);
  *returned = std::min(requested, cublas.algorithms);
  for (int i = 0; i < *returned; ++i) {
    results[i] = {};
    std::memset(&results[i].algo, 'A' + i, sizeof(results[i].algo));
  }
  return CUBLAS_STATUS_SUCCESS;
}

FAKE cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                   const void* alpha, const void* a, cublasLtMatrixLayout_t a_desc,
                                   const void* b, cublasLtMatrixLayout_t b_desc, const void* beta,
                                   const void* c, cublasLtMatrixLayout_t, void* d,
                                   cublasLtMatrixLayout_t d_desc,
                                   const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                                   std::size_t workspace_bytes, cudaStream_t stream) {
  auto& cublas = fakes::cublas();
  const std::lock_guard lock(cublas.mutex);
  if (cublas.status != CUBLAS_STATUS_SUCCESS) return cublas.status;
  cublas.matmuls.push_back(
      {handle, as_desc(desc)->attributes, *as_layout(a_desc), *as_layout(b_desc),
       *as_layout(d_desc), a, b, c, d, *static_cast<const float*>(alpha),
       *static_cast<const float*>(beta),
       std::string(reinterpret_cast<const char*>(algorithm), sizeof(*algorithm)), workspace,
       workspace_bytes, stream});
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
