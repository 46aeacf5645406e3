// Every property of a tensor that matters makes another signature; its address does not.
#include <functional>

#include "check.h"
#include "signature.h"
#include "tensors.h"

using gemm_workspace::Signature;

namespace {

Signature of(std::vector<TVMFFIAny> arguments, std::int64_t variant = 7) {
  Signature signature;
  CHECK(signature.read(variant, arguments.data(), static_cast<int>(arguments.size())));
  return signature;
}

bool same(const Signature& left, const Signature& right) {
  if (left == right) CHECK_EQUAL(left.hash(), right.hash());
  return left == right;
}

}  // namespace

int main() {
  FakeTensor a(0x10000, {2, 3}, {3, 1}), b(0x20000, {3, 4}, {4, 1});
  const Signature first = of({a.argument(), b.argument()});
  CHECK(same(first, of({a.argument(), b.argument()})));

  FakeTensor moved(0x90000, {2, 3}, {3, 1});
  CHECK(same(first, of({moved.argument(), b.argument()})));

  std::vector<Signature> all{first,
                             of({a.argument(), b.argument()}, 8),
                             of({a.argument()}),
                             of({b.argument(), a.argument()}),
                             of({}),
                             of({a.argument(), b.argument(), none()}),
                             of({none(), a.argument(), b.argument()}),
                             of({a.argument(), none(), b.argument()})};
  const std::vector<std::function<void(DLTensor&)>> changes{
      [](DLTensor& t) { t.shape[0] = 3; },
      [](DLTensor& t) { t.shape[1] = 2; },
      [](DLTensor& t) { t.strides[0] = 4; },
      [](DLTensor& t) { t.strides[1] = 2; },
      [](DLTensor& t) { t.dtype.code = kDLFloat; },
      [](DLTensor& t) { t.dtype.bits = 8; },
      [](DLTensor& t) { t.dtype.lanes = 2; },
      [](DLTensor& t) { t.device.device_id = 1; },
      [](DLTensor& t) { t.device.device_type = kDLCPU; },
      [](DLTensor& t) { t.byte_offset = 16; },
      [](DLTensor& t) { t.byte_offset = 32; },
      [](DLTensor& t) { t.data = static_cast<char*>(t.data) + 1; },
      [](DLTensor& t) { t.ndim = 1; },
  };
  for (const auto& change : changes) {
    FakeTensor changed(0x10000, {2, 3}, {3, 1});
    change(changed.tensor);
    all.push_back(of({changed.argument(), b.argument()}));
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < all.size(); ++j) CHECK_EQUAL(same(all[i], all[j]), i == j);
  }
  // Aligned to 256 bytes or to more is the same.
  FakeTensor better(0x10100, {2, 3}, {3, 1});
  CHECK(same(first, of({better.argument(), b.argument()})));

  // What cannot be told is not read.
  Signature signature;
  const auto reads = [&](std::vector<TVMFFIAny> arguments) {
    return signature.read(7, arguments.data(), static_cast<int>(arguments.size()));
  };
  CHECK(!reads({a.argument(), number(3)}));
  CHECK(reads(std::vector<TVMFFIAny>(gemm_workspace::kMostTensors, a.argument())));
  CHECK(!reads(std::vector<TVMFFIAny>(gemm_workspace::kMostTensors + 1, none())));
  const auto ones = [](int count) { return std::vector<std::int64_t>(count, 1); };
  constexpr int kMost = gemm_workspace::kMostDimensions;
  FakeTensor largest(0, ones(kMost), ones(kMost)), larger(0, ones(kMost + 1), ones(kMost + 1));
  CHECK(reads(std::vector<TVMFFIAny>(gemm_workspace::kMostTensors, largest.argument())));
  CHECK(!reads({larger.argument()}));
  a.tensor.strides = nullptr;
  CHECK(!reads({a.argument()}));
  return 0;
}
