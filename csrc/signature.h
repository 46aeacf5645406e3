// The key of a call: everything about its tensors that a release's path looks at.
#pragma once

#include <tvm/ffi/c_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gemm_workspace {

// Pointers aligned to this many bytes, or better, are alike (as in signature.py).
inline constexpr std::uintptr_t kAlignment = 256;

// Tensors of a call that may be remembered, and their dimensions.
inline constexpr int kMostTensors = 8, kMostDimensions = 4;

// The tensor behind an argument, or null if there is none in it.
inline const DLTensor* tensor_of(const TVMFFIAny& argument) {
  if (argument.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(argument.v_obj);
  if (argument.type_index == kTVMFFIDLTensorPtr) return static_cast<DLTensor*>(argument.v_ptr);
  return nullptr;
}

inline void* address_of(const DLTensor& tensor) {
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// Equal signatures: the same variant, and tensors at the same places of the same sizes, strides,
// dtype, device and alignment. What is not a tensor is told apart by the variant, a number that
// the caller gives.
class Signature {
 public:
  // Of `count` arguments, tensors or None. Returns false for anything else, and for too many.
  bool read(std::int64_t variant, const TVMFFIAny* arguments, int count);

  bool operator==(const Signature& other) const {
    return size_ == other.size_ &&
           std::memcmp(words_.data(), other.words_.data(), size_ * sizeof(words_[0])) == 0;
  }
  std::size_t hash() const { return hash_; }

 private:
  std::array<std::uint64_t, 1 + kMostTensors * (2 + 2 * kMostDimensions)> words_;
  std::size_t size_ = 0;
  std::size_t hash_ = 0;
};

}  // namespace gemm_workspace
