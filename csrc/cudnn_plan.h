// An execution plan of cuDNN, rebuilt from what the frontend serialized: the same engine, with the
// same knobs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher.h"

namespace gemm_workspace {

// The cuDNN that this process has loaded, checked once.
class Cudnn {
 public:
  // Throws Refused if no cuDNN is loaded, or two, or one whose major or minor version is not
  // that of the headers that this was compiled with.
  Cudnn();

  // major * 10000 + minor * 100 + patch, of the library.
  std::size_t version() const { return version_; }

  // The same of the headers.
  static std::size_t compiled_version();

 private:
  std::size_t version_;
};

// Operands: in ascending order of the graph's uids. Uses the handle that it was given, on the
// stream that the handle has: the caller sets that stream, and sees to it that one thread at a
// time uses the handle, from setting the stream to the end of launch().
class CudnnPlan final : public Launcher {
 public:
  // `serialized` is what `Graph::serialize` of cudnn-frontend gives: the plan that the graph has
  // selected. Takes as long as building it did; never under capture. `name` is the frontend's
  // name of that plan, engine and knobs; empty if there is none to compare. Throws Refused: for
  // a plan of another name, and for a graph that needs more at each launch than addresses
  // (values passed from the host, memory that is filled before, tensors that are dumped).
  CudnnPlan(const Cudnn& library, std::intptr_t handle, std::string_view serialized,
            std::string_view name);
  ~CudnnPlan() override;

  std::size_t operands() const override;
  std::size_t workspace_bytes() const override;
  void launch(void* const* addresses, Workspace workspace, cudaStream_t stream) override;

  // Of the operands, in their order.
  const std::vector<std::int64_t>& uids() const;
  // Engine and knobs, as the frontend writes them.
  const std::string& name() const;

 private:
  struct Body;  // keeps the frontend's headers, and its compile time, in one file
  std::unique_ptr<Body> body_;
};

}  // namespace gemm_workspace
