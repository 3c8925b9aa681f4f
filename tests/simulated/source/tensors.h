// Tensors of a device as other tensors: the same memory for a CPU kernel, a copy, only the shape.
#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace simulated {

using at::Tensor;
using c10::IValue;

// Below autograd, autocast and the modes of Python: what is called here is our own doing.
struct Below {
  c10::impl::ExcludeDispatchKeyGuard no_autograd{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::impl::TorchFunctionDisabledState before =
      at::impl::PythonTorchFunctionTLS::get_disabled_state();
  Below() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Below() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

inline Tensor made(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                   c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}
inline Tensor made_like(const Tensor& t, c10::DeviceIndex device) {
  return made(t.sizes(), t.strides(), t.scalar_type(), c10::Device(kType, device));
}

inline void resize_tensor(const Tensor& t, at::IntArrayRef sizes) {
  if (!t.device().is_privateuseone()) {
    at::native::resize_(t, sizes, std::nullopt);
    return;
  }
  if (t.sizes() == sizes) return;
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t bytes = (t.storage_offset() + t.numel()) * t.element_size();
  if (bytes > t.storage().nbytes()) resize_storage(t.storage(), bytes);
}

// A number that Python has made a tensor of: it promotes types in another way.
inline Tensor as_wrapped_as(const Tensor& t, Tensor other) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    other.unsafeGetTensorImpl()->set_wrapped_number(true);
  return other;
}

// The same memory, as a CPU kernel takes it. It does not keep the memory: that is the allocator's
// matter, and a tensor freed too early shall be read too late here as on a real device.
inline Tensor as_cpu(const Tensor& t) {
  TORCH_CHECK(!t.is_conj() && !t.is_neg(),
              "simulated: there are no lazily conjugated or negated tensors");
  auto* base = static_cast<char*>(const_cast<void*>(t.storage().data()));
  if (t.numel() == 0 || !base)
    return as_wrapped_as(t, at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
  const auto options = at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU);
  return as_wrapped_as(t, at::from_blob(base + t.storage_offset() * t.element_size(), t.sizes(),
                                        t.strides(), options));
}

// A tensor of the host as it is now: what is queued reads it later. It may be expanded, and no copy
// can be written to memory that several of its elements share.
inline Tensor host_copy(const Tensor& t) {
  Tensor copy = t.is_non_overlapping_and_dense()
                    ? at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type())
                    : at::detail::empty_cpu(t.sizes(), t.scalar_type());
  if (t.numel()) {
    Below below;
    as_cpu(copy).copy_(as_cpu(t));
  }
  return as_wrapped_as(t, copy);
}

inline Tensor as_meta(const Tensor& t) {
  return as_wrapped_as(t, at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()));
}

// A value with each tensor in it replaced by what `f` makes of it.
template <typename F>
IValue mapped(const IValue& value, F&& f) {
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    return t.defined() ? IValue(f(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      out.push_back(t.has_value() && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  return value;
}

template <typename F>
void each_tensor(const IValue& value, F&& f) {
  mapped(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

}  // namespace simulated
