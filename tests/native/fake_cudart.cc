#include "fakes.h"

namespace fakes {
Runtime& runtime() {
  static auto* const made = new Runtime();
  return *made;
}
}  // namespace fakes

extern "C" {

// For tests in Python.
FAKE void fake_capturing(void* stream) {
  fakes::runtime().capturing = static_cast<cudaStream_t>(stream);
}

FAKE void fake_device(int device) { fakes::runtime().device = device; }

FAKE cudaError_t cudaGetDevice(int* device) {
  *device = fakes::runtime().device;
  return cudaSuccess;
}

FAKE cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream == fakes::runtime().capturing ? cudaStreamCaptureStatusActive
                                                 : cudaStreamCaptureStatusNone;
  if (fakes::runtime().error != cudaSuccess) fakes::runtime().last_error = fakes::runtime().error;
  return fakes::runtime().error;
}

FAKE cudaError_t cudaGetLastError() {
  const cudaError_t error = fakes::runtime().last_error;
  fakes::runtime().last_error = cudaSuccess;
  return error;
}

}  // extern "C"
