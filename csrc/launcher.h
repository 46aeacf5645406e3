// A launch that is ready to be made again, for other addresses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace gemm_workspace {

// Device memory that one launch at a time may write to.
struct Workspace {
  void* address = nullptr;
  std::size_t bytes = 0;
};

class Launcher {
 public:
  Launcher() = default;
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  virtual ~Launcher() = default;

  // How many addresses a launch takes.
  virtual std::size_t operands() const = 0;

  // Bytes of workspace that a launch is to be given, at least.
  virtual std::size_t workspace_bytes() const = 0;

  // Launch on `stream`, which does not capture, of the current device. `addresses` has
  // operands() of them, in the order in which the launcher was made. Threads may call at once,
  // unless the launcher says otherwise. Throws LaunchFailed.
  virtual void launch(void* const* addresses, Workspace workspace, cudaStream_t stream) = 0;
};

}  // namespace gemm_workspace
