#include "signature.h"

namespace gemm_workspace {
namespace {

__extension__ typedef unsigned __int128 Wide;

// One round of a multiply-and-fold hash: every bit of the word reaches every bit of the result.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  const Wide product = static_cast<Wide>(hash ^ word) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

bool Signature::read(std::int64_t variant, const TVMFFIAny* arguments, int count) {
  size_ = 0;
  if (count > kMostTensors) return false;
  std::uint64_t* next = words_.data();
  *next++ = static_cast<std::uint64_t>(variant);
  for (int i = 0; i < count; ++i) {
    if (arguments[i].type_index == kTVMFFINone) {
      *next++ = ~std::uint64_t{0};  // no tensor has this many dimensions
      continue;
    }
    const DLTensor* tensor = tensor_of(arguments[i]);
    // Without strides a tensor is dense; torch always gives them.
    if (tensor == nullptr || tensor->ndim > kMostDimensions || tensor->strides == nullptr) {
      return false;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(address_of(*tensor));
    const DLDataType& type = tensor->dtype;
    *next++ = static_cast<std::uint64_t>(tensor->ndim) | std::uint64_t{type.code} << 8 |
              std::uint64_t{type.bits} << 16 | std::uint64_t{type.lanes} << 24 |
              std::uint64_t{address & (~address + 1) & (kAlignment - 1)} << 40;
    *next++ = static_cast<std::uint64_t>(static_cast<std::uint32_t>(tensor->device.device_type)) |
              static_cast<std::uint64_t>(static_cast<std::uint32_t>(tensor->device.device_id))
                  << 32;
    for (int axis = 0; axis < tensor->ndim; ++axis) {
      *next++ = static_cast<std::uint64_t>(tensor->shape[axis]);
      *next++ = static_cast<std::uint64_t>(tensor->strides[axis]);
    }
  }
  size_ = static_cast<std::size_t>(next - words_.data());
  std::uint64_t hash = size_;
  for (std::size_t i = 0; i < size_; ++i) hash = mixed(hash, words_[i]);
  hash_ = hash;
  return true;
}

}  // namespace gemm_workspace
