// Arguments as tvm-ffi passes them, over memory that is nobody's.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <vector>

struct FakeTensor {
  FakeTensor(std::uintptr_t address, std::vector<std::int64_t> sizes,
             std::vector<std::int64_t> steps, DLDataType dtype = {kDLBfloat, 16, 1},
             DLDevice where = {kDLCUDA, 0})
      : shape(std::move(sizes)), strides(std::move(steps)) {
    tensor.data = reinterpret_cast<void*>(address);
    tensor.device = where;
    tensor.ndim = static_cast<std::int32_t>(shape.size());
    tensor.dtype = dtype;
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    tensor.byte_offset = 0;
  }
  FakeTensor(const FakeTensor&) = delete;

  TVMFFIAny argument() {
    TVMFFIAny any{};
    any.type_index = kTVMFFIDLTensorPtr;
    any.v_ptr = &tensor;
    return any;
  }

  std::vector<std::int64_t> shape, strides;
  DLTensor tensor;
};

inline TVMFFIAny none() {
  TVMFFIAny any{};
  any.type_index = kTVMFFINone;
  return any;
}

inline TVMFFIAny number(std::int64_t value) {
  TVMFFIAny any{};
  any.type_index = kTVMFFIInt;
  any.v_int64 = value;
  return any;
}
