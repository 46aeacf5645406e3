// What reaches cuBLASLt: descriptors, algorithm, scales, workspace, stream.
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "cublaslt_matmul.h"
#include "errors.h"
#include "fakes.h"

using namespace gemm_workspace;

namespace {

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

const auto kHandle = reinterpret_cast<cublasLtHandle_t>(0x1111);
const auto kStream = reinterpret_cast<cudaStream_t>(0x2222);

MatmulProblem fp8(std::int64_t batch) {
  return {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF, batch, 48, 16, 32, at(0xA0), at(0xB0)};
}

template <typename Value>
Value attribute(const fakes::Matmul& matmul, cublasLtMatmulDescAttributes_t name) {
  const auto found = matmul.desc.find(name);
  CHECK(found != matmul.desc.end());
  CHECK_EQUAL(found->second.size(), sizeof(Value));
  Value value;
  std::memcpy(&value, found->second.data(), sizeof(value));
  return value;
}

void given_algorithm() {
  CublasLtMatmul::Algorithm algorithm;
  for (std::size_t i = 0; i < algorithm.size(); ++i) algorithm[i] = static_cast<char>(i);
  const CublasLt library(13);
  CublasLtMatmul matmul(library, kHandle, fp8(3), 4096, algorithm);
  CHECK(matmul.algorithm() == algorithm);
  CHECK_EQUAL(matmul.operands(), 5U);
  CHECK_EQUAL(matmul.workspace_bytes(), 4096U);
  CHECK_EQUAL(fakes::cublas().heuristics, 0);

  void* const addresses[] = {at(1), at(2), at(3), at(0xA1), at(0xB1)};
  // A workspace that is longer changes nothing: its length limits what algorithms may use.
  matmul.launch(addresses, {at(0xF0), 8192}, kStream);
  const auto& seen = fakes::cublas().matmuls.back();
  CHECK(seen.handle == kHandle && seen.stream == kStream);
  CHECK(seen.a_address == at(1) && seen.b_address == at(2) && seen.d_address == at(3));
  CHECK(seen.c_address == nullptr);
  CHECK_EQUAL(seen.alpha, 1.0F);
  CHECK_EQUAL(seen.beta, 0.0F);
  CHECK(seen.workspace == at(0xF0));
  CHECK_EQUAL(seen.workspace_bytes, 4096U);
  CHECK(std::memcmp(seen.algorithm.data(), algorithm.data(), algorithm.size()) == 0);
  CHECK_EQUAL(attribute<cublasOperation_t>(seen, CUBLASLT_MATMUL_DESC_TRANSA), CUBLAS_OP_T);
  CHECK_EQUAL(attribute<cublasOperation_t>(seen, CUBLASLT_MATMUL_DESC_TRANSB), CUBLAS_OP_N);
  CHECK_EQUAL(static_cast<int>(attribute<std::int8_t>(seen, CUBLASLT_MATMUL_DESC_FAST_ACCUM)), 1);
  CHECK(attribute<void*>(seen, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) == at(0xA1));
  CHECK(attribute<void*>(seen, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) == at(0xB1));
  CHECK(seen.a.type == CUDA_R_8F_E4M3 && seen.b.type == CUDA_R_8F_E5M2);
  CHECK(seen.d.type == CUDA_R_16BF);
  CHECK(seen.a.rows == 32 && seen.a.columns == 48 && seen.a.ld == 32 && seen.a.stride == 32 * 48);
  CHECK(seen.b.rows == 32 && seen.b.columns == 16 && seen.b.ld == 32 && seen.b.stride == 32 * 16);
  CHECK(seen.d.rows == 48 && seen.d.columns == 16 && seen.d.ld == 48 && seen.d.stride == 48 * 16);
  CHECK(seen.a.batch == 3 && seen.b.batch == 3 && seen.d.batch == 3);

  // The scales of a launch are those that it was given, also when they were others before.
  void* const others[] = {at(1), at(2), at(3), at(0xA1), at(0xB2)};
  matmul.launch(others, {at(0xF0), 4096}, kStream);
  CHECK(attribute<void*>(fakes::cublas().matmuls.back(), CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) ==
        at(0xB2));
}

void heuristic() {
  const CublasLt library(13);
  CublasLtMatmul matmul(library, kHandle, fp8(1), 12345, std::nullopt);
  CHECK_EQUAL(fakes::cublas().heuristics, 1);
  CHECK_EQUAL(fakes::cublas().limit, 12345U);
  void* const addresses[] = {at(1), at(2), at(3), at(4), at(5)};
  matmul.launch(addresses, {at(6), 12345}, kStream);
  matmul.launch(addresses, {at(6), 12345}, kStream);
  CHECK_EQUAL(fakes::cublas().heuristics, 1);
  const auto& seen = fakes::cublas().matmuls.back();
  CHECK_EQUAL(seen.algorithm, std::string(64, 'A'));
  CHECK(seen.a.batch == 1 && seen.a.stride == 0);
}

void unscaled() {
  const CublasLt library(13);
  CublasLtMatmul matmul(library, kHandle,
                        {CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F, 1, 48, 16, 32, nullptr, nullptr}, 64,
                        std::nullopt);
  CHECK_EQUAL(matmul.operands(), 3U);
  void* const addresses[] = {at(1), at(2), at(3)};
  matmul.launch(addresses, {at(6), 64}, kStream);
  const auto& desc = fakes::cublas().matmuls.back().desc;
  CHECK_EQUAL(desc.size(), 2U);  // the two transpositions: no scale, no fast sums
}

void refusals() {
  const CublasLt library(13);
  const auto make = [&](const MatmulProblem& problem) {
    CublasLtMatmul matmul(library, kHandle, problem, 64, std::nullopt);
  };
  fakes::cublas().algorithms = 0;
  check_throws<Refused>([&] { make(fp8(1)); }, "names no algorithm");
  fakes::cublas().algorithms = 1;
  auto problem = fp8(1);
  problem.k = 0;
  check_throws<Refused>([&] { make(problem); }, "k is 0");
  problem = fp8(2);
  problem.m = problem.k = 1 << 16;  // one matrix of 2**32 elements
  check_throws<Refused>([&] { make(problem); }, "m * k is 4294967296");
  problem.batch = 1;
  make(problem);  // alone it needs no stride
  problem = fp8(1);
  problem.b_scale = nullptr;
  check_throws<Refused>([&] { make(problem); }, "one scale");

  CublasLtMatmul matmul(library, kHandle, fp8(1), 64, std::nullopt);
  void* const addresses[] = {at(1), at(2), at(3), at(4), at(5)};
  fakes::cublas().status = CUBLAS_STATUS_EXECUTION_FAILED;
  check_throws<LaunchFailed>([&] { matmul.launch(addresses, {at(6), 64}, kStream); }, "status 13");
  fakes::cublas().status = CUBLAS_STATUS_SUCCESS;
  matmul.launch(addresses, {at(6), 64}, kStream);
}

// Threads that launch one problem with scales of their own each get their own.
void threads() {
  const CublasLt library(13);
  CublasLtMatmul matmul(library, kHandle, fp8(1), 64, std::nullopt);
  fakes::cublas().matmuls.clear();
  constexpr std::uintptr_t kThreads = 8, kLaunches = 500;
  std::vector<std::thread> threads;
  for (std::uintptr_t i = 1; i <= kThreads; ++i) {
    threads.emplace_back([&matmul, i] {
      void* const addresses[] = {at(i), at(i), at(i), at(i << 8), at(i << 16)};
      for (std::uintptr_t n = 0; n < kLaunches; ++n) matmul.launch(addresses, {at(i), 64}, kStream);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(fakes::cublas().matmuls.size(), kThreads * kLaunches);
  for (const auto& seen : fakes::cublas().matmuls) {
    const auto i = reinterpret_cast<std::uintptr_t>(seen.a_address);
    CHECK(attribute<void*>(seen, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) == at(i << 8));
    CHECK(attribute<void*>(seen, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) == at(i << 16));
    CHECK(seen.workspace == at(i));
  }
}

}  // namespace

int main() {
  given_algorithm();
  heuristic();
  unscaled();
  refusals();
  threads();
  CHECK_EQUAL(fakes::cublas().live, 0);
  return 0;
}
