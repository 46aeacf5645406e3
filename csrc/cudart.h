// What is asked of the CUDA runtime at each call.
#pragma once

#include <cuda_runtime_api.h>

namespace gemm_workspace {

class Cudart {
 public:
  // Throws Refused if no CUDA runtime of that major version is loaded, or two are.
  explicit Cudart(int major);

  // Index of the calling thread's current device, -1 if there is none.
  int current_device() const;

  // Whether work on `stream` is, or may be, being captured. An error counts: the legacy stream
  // cannot be asked while another stream captures. Leaves no error behind for cudaGetLastError.
  bool may_be_capturing(cudaStream_t stream) const;

 private:
  decltype(cudaGetDevice)* get_device_;
  decltype(cudaStreamIsCapturing)* is_capturing_;
  decltype(cudaGetLastError)* get_last_error_;
};

}  // namespace gemm_workspace
