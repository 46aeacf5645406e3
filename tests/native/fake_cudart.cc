#include "fakes.h"

namespace fakes {
Runtime& runtime() {
  static auto* const made = new Runtime();
  return *made;
}
}  // namespace fakes

extern "C" {

FAKE cudaError_t cudaGetDevice(int* device) {
  *device = fakes::runtime().device;
  return cudaSuccess;
}

FAKE cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream == fakes::runtime().capturing ? cudaStreamCaptureStatusActive
                                                 : cudaStreamCaptureStatusNone;
  return fakes::runtime().error;
}

}  // extern "C"
