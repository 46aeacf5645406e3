// What is remembered: launchers by number, and which of them a signature launches.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "cudart.h"
#include "launcher.h"
#include "signature.h"

namespace gemm_workspace {

// A tensor that a launch makes: dense, like the one that the release's path made.
struct Output {
  std::vector<std::int64_t> shape;
  DLDataType type;
};

// How a signature is launched. `operands`: for each of the launcher's, the place of the argument
// that it is, or kMade for the output that is made. With an `output` one is made.
struct Recipe {
  static constexpr int kMade = -1;

  std::shared_ptr<Launcher> launcher;
  std::vector<int> operands;
  std::optional<Output> output;
  DLDevice device;
};

// What a call came to.
enum class Outcome : std::int64_t {
  kLaunched = 0,
  kUnknown = 1,      // no such signature
  kOtherDevice = 2,  // the tensors' device is not the current one
  kCapturing = 3,
  kNoWorkspace = 4,  // none is known for the current stream
};

// Threads may call everything at once. A launcher that is forgotten while it launches goes when
// that launch returns.
class Table {
 public:
  explicit Table(const Cudart* runtime) : runtime_(runtime) {}

  // Number of a launcher from now on; numbers are not used again.
  std::int64_t add(std::shared_ptr<Launcher> launcher);

  // The launcher of that number; null if it was forgotten.
  std::shared_ptr<Launcher> get(std::int64_t number) const;

  // Forget a launcher, its signatures and its workspaces. False if there was none.
  bool forget(std::int64_t number);

  // Forget the signatures of a launcher, not the launcher. Calls nothing of CUDA. False if there
  // is no such launcher.
  bool unlearn(std::int64_t number);

  // Let `signature` launch launcher `number`. Throws Refused if operands do not fit.
  void remember(const Signature& signature, std::int64_t number, Recipe recipe);

  // From now on launches of `number` on `stream` use `workspace`, which stays valid for good.
  // Throws Refused if that is too short.
  void use(std::int64_t number, cudaStream_t stream, Workspace workspace);

  // Make the launch that the arguments' signature stands for, on the current stream of tvm-ffi's
  // environment. Without a launch nothing has happened. `made` is the output, if one is made;
  // the caller owns it. Throws LaunchFailed.
  Outcome call(std::int64_t variant, const TVMFFIAny* arguments, int count,
               TVMFFIObjectHandle* made);

  struct Counts {
    std::int64_t launchers, signatures, launches;
  };
  Counts counts() const;

 private:
  struct Entry {
    std::shared_ptr<Launcher> launcher;
    // By stream. A launch runs on few streams, so a list is looked through sooner than a map.
    std::vector<std::pair<cudaStream_t, Workspace>> workspaces;
    // In known_, whose keys stay where they are.
    std::vector<const Signature*> signatures;
  };
  struct Known {
    std::int64_t number;
    std::shared_ptr<const Recipe> recipe;
  };
  struct Hash {
    std::size_t operator()(const Signature& signature) const { return signature.hash(); }
  };

  // Take out what is known of an entry; the caller has the lock, and drops it without.
  std::vector<std::shared_ptr<const Recipe>> taken_out(Entry& entry);

  const Cudart* const runtime_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::int64_t, Entry> entries_;
  std::unordered_map<Signature, Known, Hash> known_;
  std::int64_t next_ = 1;
  std::atomic<std::int64_t> launches_{0};
};

}  // namespace gemm_workspace
