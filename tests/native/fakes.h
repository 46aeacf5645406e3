// What the stand-ins of the vendor libraries recorded. Each stand-in has the soname of the library
// that it stands for, so that it is found as that library would be.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fakes {

#define FAKE __attribute__((visibility("default")))

struct Runtime {
  int device = 0;
  cudaStream_t capturing = reinterpret_cast<cudaStream_t>(-1);
  cudaError_t error = cudaSuccess;       // of asking whether a stream captures
  cudaError_t last_error = cudaSuccess;  // that nobody has fetched
};

struct Matmul {
  cublasLtHandle_t handle;
  // Of the descriptor, by attribute.
  std::map<int, std::vector<char>> desc;
  struct Layout {
    cudaDataType_t type;
    std::uint64_t rows, columns;
    std::int64_t ld, stride;
    std::int32_t batch;
  } a, b, d;
  const void *a_address, *b_address, *c_address;
  void* d_address;
  float alpha, beta;
  std::string algorithm;  // its 64 bytes
  void* workspace;
  std::size_t workspace_bytes;
  cudaStream_t stream;
};

struct Cublas {
  std::mutex mutex;
  std::vector<Matmul> matmuls;
  int live = 0;                                   // descriptors that were made and not destroyed
  std::uint64_t limit = 0;                        // of the last preference, bytes
  int heuristics = 0;                             // how often the heuristic was asked
  int algorithms = 1;                             // how many it names
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;  // of the next matmuls
};

struct Execution {
  void* handle;
  std::string plan;  // what it was loaded from
  void* workspace;
  std::vector<void*> addresses;
  std::vector<std::int64_t> uids;
};

struct Dnn {
  std::mutex mutex;
  std::vector<Execution> executions;
  int live = 0;
  std::size_t version = 0;
  int status = 0;  // of the next executions
};

FAKE Runtime& runtime();
FAKE Cublas& cublas();
FAKE Dnn& dnn();

}  // namespace fakes
