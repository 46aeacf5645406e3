#include "table.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <utility>

#include "errors.h"

namespace gemm_workspace {

std::int64_t Table::add(std::shared_ptr<Launcher> launcher) {
  if (launcher->operands() > kMostTensors) {
    throw Refused("a launch of " + std::to_string(launcher->operands()) +
                  " operands, wanted at most " + std::to_string(kMostTensors));
  }
  const std::lock_guard lock(mutex_);
  entries_[next_].launcher = std::move(launcher);
  return next_++;
}

std::shared_ptr<Launcher> Table::get(std::int64_t number) const {
  const std::shared_lock lock(mutex_);
  const auto entry = entries_.find(number);
  return entry == entries_.end() ? nullptr : entry->second.launcher;
}

bool Table::forget(std::int64_t number) {
  // Freed after the lock is: a plan's end unloads code, which takes its time.
  std::vector<std::shared_ptr<const Recipe>> recipes;
  Entry gone;
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(number);
  if (entry == entries_.end()) return false;
  recipes = taken_out(entry->second);
  gone = std::move(entry->second);
  entries_.erase(entry);
  return true;
}

bool Table::unlearn(std::int64_t number) {
  std::vector<std::shared_ptr<const Recipe>> recipes;
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(number);
  if (entry == entries_.end()) return false;
  recipes = taken_out(entry->second);
  return true;
}

std::vector<std::shared_ptr<const Recipe>> Table::taken_out(Entry& entry) {
  std::vector<std::shared_ptr<const Recipe>> recipes;
  for (const Signature* signature : entry.signatures) {
    const auto known = known_.find(*signature);
    recipes.push_back(std::move(known->second.recipe));
    known_.erase(known);
  }
  entry.signatures.clear();
  return recipes;
}

void Table::remember(const Signature& signature, std::int64_t number, Recipe recipe) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(number);
  if (entry == entries_.end())
    throw Refused("launcher " + std::to_string(number) + " is forgotten");
  recipe.launcher = entry->second.launcher;
  if (recipe.operands.size() != recipe.launcher->operands()) {
    throw Refused(std::to_string(recipe.operands.size()) + " operands are given, wanted " +
                  std::to_string(recipe.launcher->operands()));
  }
  for (const int place : recipe.operands) {
    if (place >= kMostTensors || place < Recipe::kMade ||
        (place == Recipe::kMade && !recipe.output)) {
      throw Refused("operand at place " + std::to_string(place) + ", wanted that of an argument");
    }
  }
  const auto [known, added] = known_.try_emplace(signature);
  if (!added) {
    auto& before = entries_.find(known->second.number)->second.signatures;
    before.erase(std::find(before.begin(), before.end(), &known->first));
  }
  known->second = {number, std::make_shared<const Recipe>(std::move(recipe))};
  entry->second.signatures.push_back(&known->first);
}

void Table::use(std::int64_t number, cudaStream_t stream, Workspace workspace) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(number);
  if (entry == entries_.end())
    throw Refused("launcher " + std::to_string(number) + " is forgotten");
  const std::size_t wanted = entry->second.launcher->workspace_bytes();
  if (workspace.bytes < wanted || (wanted > 0 && workspace.address == nullptr)) {
    throw Refused("a workspace of " + std::to_string(workspace.bytes) + " bytes, wanted " +
                  std::to_string(wanted));
  }
  auto& workspaces = entry->second.workspaces;
  for (auto& each : workspaces) {
    if (each.first == stream) {
      each.second = workspace;
      return;
    }
  }
  workspaces.emplace_back(stream, workspace);
}

Outcome Table::call(std::int64_t variant, const TVMFFIAny* arguments, int count,
                    TVMFFIObjectHandle* made) {
  Signature signature;
  if (!signature.read(variant, arguments, count)) return Outcome::kUnknown;
  std::shared_ptr<const Recipe> recipe;
  std::optional<Workspace> workspace;
  cudaStream_t stream = nullptr;
  {
    const std::shared_lock lock(mutex_);
    const auto known = known_.find(signature);
    if (known == known_.end()) return Outcome::kUnknown;
    recipe = known->second.recipe;
    stream = static_cast<cudaStream_t>(
        TVMFFIEnvGetStream(recipe->device.device_type, recipe->device.device_id));
    for (const auto& each : entries_.find(known->second.number)->second.workspaces) {
      if (each.first == stream) workspace = each.second;
    }
  }
  if (runtime_->current_device() != recipe->device.device_id) return Outcome::kOtherDevice;
  if (runtime_->may_be_capturing(stream)) return Outcome::kCapturing;
  if (!workspace) return Outcome::kNoWorkspace;
  void* output = nullptr;
  if (recipe->output) {
    DLTensor prototype{};
    prototype.device = recipe->device;
    prototype.dtype = recipe->output->type;
    prototype.ndim = static_cast<int>(recipe->output->shape.size());
    prototype.shape = const_cast<std::int64_t*>(recipe->output->shape.data());
    if (TVMFFIEnvTensorAlloc(&prototype, made) != 0) throw LaunchFailed("no memory for the output");
    output = address_of(*TVMFFITensorGetDLTensorPtr(*made));
  }
  std::array<void*, kMostTensors> addresses;
  for (std::size_t i = 0; i < recipe->operands.size(); ++i) {
    const int place = recipe->operands[i];
    // A signature that is equal has its tensors at the same places.
    addresses[i] = place == Recipe::kMade ? output : address_of(*tensor_of(arguments[place]));
  }
  recipe->launcher->launch(addresses.data(), *workspace, stream);
  launches_.fetch_add(1, std::memory_order_relaxed);
  return Outcome::kLaunched;
}

Table::Counts Table::counts() const {
  const std::shared_lock lock(mutex_);
  return {static_cast<std::int64_t>(entries_.size()), static_cast<std::int64_t>(known_.size()),
          launches_.load(std::memory_order_relaxed)};
}

}  // namespace gemm_workspace
