// What concerns only the host's side of a tensor: new ones, views, storages.
#pragma once

#include "tensors.h"

#include <ATen/native/Resize.h>

namespace simulated {

inline c10::Device device_or_current(std::optional<c10::Device> device) {
  return device.value_or(c10::Device(kType, current_device));
}
inline Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                    std::optional<at::Layout>, std::optional<c10::Device> device,
                    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(sizes, &allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}
inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                            std::optional<at::ScalarType> type, std::optional<at::Layout>,
                            std::optional<c10::Device> device, std::optional<bool>) {
  return made(sizes, strides, c10::dtype_or_default(type), device_or_current(device));
}

inline Tensor as_strided(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                         std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides), at);
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes,
                            c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}
inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes,
                             std::optional<at::MemoryFormat> format) {
  resize_tensor(self, C10_AS_INTARRAYREF_SLOW(sizes));
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline Tensor& set_parts(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                         at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr || strides.size() != sizes.size())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, strides);
  return self;
}
inline Tensor& set_storage_offset(Tensor& self, at::Storage storage, c10::SymInt offset,
                                  c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return set_parts(self, std::move(storage), offset.guard_int(__FILE__, __LINE__),
                   C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto items = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_parts(self, std::move(storage), 0, {items}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_parts(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// `tensor.data = ` from the CPU to the device and back, as CUDA allows it.
inline bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

}  // namespace simulated
