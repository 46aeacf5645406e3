// Which launch a call makes, on which stream and workspace; when none; and threads that call,
// remember and forget at once.
#include <tvm/ffi/extra/c_env_api.h>

#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "errors.h"
#include "fakes.h"
#include "table.h"
#include "tensors.h"

using namespace gemm_workspace;

namespace {

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

struct Seen {
  std::vector<void*> addresses;
  Workspace workspace;
  cudaStream_t stream;
};

class Recorder final : public Launcher {
 public:
  static inline std::atomic<int> alive{0};

  explicit Recorder(std::size_t operands = 2) : operands_(operands) { ++alive; }
  ~Recorder() override { --alive; }
  std::size_t operands() const override { return operands_; }
  std::size_t workspace_bytes() const override { return 100; }
  void launch(void* const* addresses, Workspace workspace, cudaStream_t stream) override {
    if (fails) throw LaunchFailed("told to");
    const std::lock_guard lock(mutex_);
    seen.push_back({{addresses, addresses + operands_}, workspace, stream});
  }

  bool fails = false;
  std::vector<Seen> seen;

 private:
  const std::size_t operands_;
  std::mutex mutex_;
};

// One call of two tensors, as Python makes it: on the current stream of tvm-ffi's environment.
struct Call {
  FakeTensor a{0x10000, {2, 3}, {3, 1}}, b{0x20000, {3, 4}, {4, 1}};

  Signature signature(std::int64_t variant = 1) {
    const TVMFFIAny arguments[] = {a.argument(), b.argument()};
    Signature signature;
    CHECK(signature.read(variant, arguments, 2));
    return signature;
  }
  Outcome make(Table& table, std::int64_t variant = 1, TVMFFIObjectHandle* made = nullptr) {
    TVMFFIObjectHandle nothing = nullptr;
    const TVMFFIAny arguments[] = {a.argument(), b.argument()};
    return table.call(variant, arguments, 2, made == nullptr ? &nothing : made);
  }
};

Recipe recipe(std::vector<int> operands) {
  return {nullptr, std::move(operands), std::nullopt, {kDLCUDA, 0}};
}

void current_stream(std::uintptr_t handle) {
  CHECK_EQUAL(TVMFFIEnvSetStream(kDLCUDA, 0, at(handle), nullptr), 0);
}

void outcomes(const Cudart& runtime) {
  Table table(&runtime);
  Call call;
  auto recorder = std::make_shared<Recorder>();
  const std::int64_t number = table.add(recorder);
  CHECK(call.make(table) == Outcome::kUnknown);
  table.remember(call.signature(), number, recipe({1, 0}));
  CHECK(call.make(table, 2) == Outcome::kUnknown);
  current_stream(0x51);
  CHECK(call.make(table) == Outcome::kNoWorkspace);
  table.use(number, stream(0x51), {at(0xF1), 100});
  table.use(number, stream(0x52), {at(0xF2), 200});
  CHECK(call.make(table) == Outcome::kLaunched);
  CHECK((recorder->seen.back().addresses == std::vector<void*>{at(0x20000), at(0x10000)}));
  CHECK(recorder->seen.back().workspace.address == at(0xF1));
  CHECK(recorder->seen.back().stream == stream(0x51));
  current_stream(0x52);
  CHECK(call.make(table) == Outcome::kLaunched);
  CHECK(recorder->seen.back().workspace.address == at(0xF2));
  CHECK_EQUAL(recorder->seen.back().workspace.bytes, 200U);
  current_stream(0x53);
  CHECK(call.make(table) == Outcome::kNoWorkspace);
  table.use(number, stream(0x52), {at(0xF4), 300});
  current_stream(0x52);
  CHECK(call.make(table) == Outcome::kLaunched);
  CHECK(recorder->seen.back().workspace.address == at(0xF4));

  fakes::runtime().capturing = stream(0x52);
  CHECK(call.make(table) == Outcome::kCapturing);
  fakes::runtime().capturing = stream(0x51);
  CHECK(call.make(table) == Outcome::kLaunched);
  fakes::runtime().error = cudaErrorStreamCaptureImplicit;
  CHECK(call.make(table) == Outcome::kCapturing);
  CHECK_EQUAL(fakes::runtime().last_error, cudaSuccess);
  fakes::runtime() = {};
  fakes::runtime().device = 1;
  CHECK(call.make(table) == Outcome::kOtherDevice);
  fakes::runtime().device = 0;

  recorder->fails = true;
  check_throws<LaunchFailed>([&] { call.make(table); }, "told to");
  recorder->fails = false;
  CHECK_EQUAL(recorder->seen.size(), 4U);
  CHECK_EQUAL(table.counts().launches, 4);

  CHECK(table.forget(number));
  CHECK(!table.forget(number));
  CHECK(call.make(table) == Outcome::kUnknown);
  CHECK(table.get(number) == nullptr);
  CHECK_EQUAL(table.counts().launchers, 0);
  CHECK_EQUAL(table.counts().signatures, 0);
  CHECK(table.add(recorder) != number);
}

void refusals(const Cudart& runtime) {
  Table table(&runtime);
  Call call;
  const std::int64_t number = table.add(std::make_shared<Recorder>());
  check_throws<Refused>([&] { table.remember(call.signature(), number, recipe({0})); },
                        "1 operands are given, wanted 2");
  check_throws<Refused>([&] { table.remember(call.signature(), number, recipe({0, -1})); },
                        "operand at place -1");
  check_throws<Refused>([&] { table.remember(call.signature(), number, recipe({0, -2})); },
                        "operand at place -2");
  check_throws<Refused>([&] { table.remember(call.signature(), 99, recipe({0, 1})); },
                        "launcher 99 is forgotten");
  check_throws<Refused>([&] { table.use(99, nullptr, {at(1), 100}); }, "launcher 99 is forgotten");
  check_throws<Refused>([&] { table.use(number, nullptr, {at(1), 99}); }, "99 bytes, wanted 100");
  check_throws<Refused>([&] { table.use(number, nullptr, {nullptr, 100}); }, "wanted 100");
  check_throws<Refused>([&] { table.add(std::make_shared<Recorder>(kMostTensors + 1)); },
                        std::to_string(kMostTensors + 1) + " operands");
  CHECK_EQUAL(table.counts().signatures, 0);
}

// A signature that is remembered again belongs to the last launcher; unlearning keeps the launcher.
void relearning(const Cudart& runtime) {
  Table table(&runtime);
  Call call;
  current_stream(0x51);
  const auto first = std::make_shared<Recorder>(), second = std::make_shared<Recorder>();
  const std::int64_t one = table.add(first), two = table.add(second);
  for (const std::int64_t number : {one, two}) {
    table.use(number, stream(0x51), {at(0xF1), 100});
    table.remember(call.signature(1), number, recipe({0, 1}));
    table.remember(call.signature(10 + number), number, recipe({0, 1}));
  }
  CHECK_EQUAL(table.counts().signatures, 3);
  CHECK(call.make(table) == Outcome::kLaunched);
  CHECK(first->seen.empty() && second->seen.size() == 1);
  CHECK(table.forget(one));  // takes its own signature, not the one that it lost
  CHECK_EQUAL(table.counts().signatures, 2);
  CHECK(call.make(table) == Outcome::kLaunched);
  CHECK(table.unlearn(two));
  CHECK(!table.unlearn(one));
  CHECK(call.make(table) == Outcome::kUnknown);
  CHECK_EQUAL(table.counts().signatures, 0);
  CHECK(table.get(two) == second);
  table.remember(call.signature(1), two, recipe({0, 1}));
  CHECK(call.make(table) == Outcome::kLaunched);
}

// Threads call while others remember, forget and hand in workspaces. Each launch must be of the
// launcher and of the workspace that belong to its variant and stream.
void threads(const Cudart& runtime) {
  Table table(&runtime);
  constexpr int kVariants = 4, kRounds = 300;
  std::atomic<bool> done{false};
  std::atomic<int> launched{0};
  std::vector<std::thread> callers;
  for (std::uintptr_t i = 1; i <= 4; ++i) {
    callers.emplace_back([&, i] {
      current_stream(i);  // the environment is each thread's own
      Call call;
      while (!done) {
        for (int variant = 0; variant < kVariants; ++variant) {
          if (call.make(table, variant) == Outcome::kLaunched) ++launched;
        }
      }
    });
  }
  Call call;
  std::mt19937 random(1);
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (int round = 0; round < kRounds || launched < 1000; ++round) {
    recorders.push_back(std::make_shared<Recorder>());
    const std::int64_t number = table.add(recorders.back());
    const auto tag = static_cast<std::uintptr_t>(round + 1) << 8;
    for (std::uintptr_t i = 1; i <= 4; ++i) table.use(number, stream(i), {at(tag | i), 100});
    table.remember(call.signature(static_cast<int>(random() % kVariants)), number, recipe({0, 1}));
    if (random() % 2 == 0) table.forget(number);
    if (random() % 4 == 0) table.unlearn(number);
  }
  done = true;
  for (auto& caller : callers) caller.join();
  int seen = 0;
  for (std::size_t round = 0; round < recorders.size(); ++round) {
    for (const Seen& each : recorders[round]->seen) {
      ++seen;
      const auto i = reinterpret_cast<std::uintptr_t>(each.stream);
      CHECK(each.workspace.address == at((static_cast<std::uintptr_t>(round + 1) << 8) | i));
    }
  }
  CHECK_EQUAL(seen, launched.load());
}

}  // namespace

int main() {
  fakes::runtime();
  const Cudart runtime(13);
  outcomes(runtime);
  refusals(runtime);
  relearning(runtime);
  threads(runtime);
  CHECK_EQUAL(Recorder::alive.load(), 0);
  return 0;
}
