#include "cudart.h"

#include "loaded_library.h"

namespace gemm_workspace {

Cudart::Cudart(int major) {
  const auto library = LoadedLibrary::find("libcudart", major);
  get_device_ = library.function<decltype(cudaGetDevice)>("cudaGetDevice");
  is_capturing_ = library.function<decltype(cudaStreamIsCapturing)>("cudaStreamIsCapturing");
  get_last_error_ = library.function<decltype(cudaGetLastError)>("cudaGetLastError");
}

int Cudart::current_device() const {
  int device = -1;
  return get_device_(&device) == cudaSuccess ? device : -1;
}

bool Cudart::may_be_capturing(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (is_capturing_(stream, &status) != cudaSuccess) {
    get_last_error_();
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace gemm_workspace
