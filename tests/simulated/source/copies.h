// Copies between devices and the host, and values that the host asks for.
#pragma once

#include "tensors.h"

namespace simulated {

// On the source's current stream, and in order with the target's: so does CUDA.
inline void copy_between_devices(const Tensor& from, const Tensor& to) {
  const int sends = current_stream(from.device().index()),
            receives = current_stream(to.device().index());
  const bool is_across = from.device() != to.device();
  if (is_across) wait_on_stream(sends, record(receives));
  enqueue(
      sends, is_across ? "copy to another device" : "copy",
      [x = as_cpu(from), y = as_cpu(to)] { y.copy_(x); }, use_of(from), use_of(to), is_across);
  if (is_across) wait_on_stream(receives, record(sends));
}

inline void keep_until_done(Block* pinned, int stream) {
  std::lock_guard<std::mutex> guard(memory());
  pinned->used_on.insert(stream);
}

// Pinned memory is read when the copy runs, so it must not change before. Pageable memory goes
// through a buffer of the driver's, which is filled before the call returns.
inline void copy_from_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!non_blocking) count_sync("copy from the host, blocking");
  const int stream = current_stream(to.device().index());
  Block* pinned = from.is_contiguous() ? block_of(from) : nullptr;
  if (!pinned && non_blocking) findings().count("pageable memory to the device, non_blocking");
  const Tensor source = pinned ? as_cpu(from) : host_copy(from);
  enqueue(
      stream, "copy from the host", [x = source, y = as_cpu(to)] { y.copy_(x); },
      pinned ? use_of(from) : Uses{}, use_of(to), true);
  if (pinned) keep_until_done(pinned, stream);
  if (non_blocking) return;
  synchronize(stream);
  findings().check();
}

// To pageable memory the host waits always, and copies from the driver's buffer itself: no stream
// ever writes to memory that is not ours.
inline void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  Block* pinned = block_of(to);
  const bool waits = !pinned || !non_blocking;
  if (waits) count_sync("copy to the host");
  const int stream = current_stream(from.device().index());
  const Tensor target =
      pinned ? as_cpu(to)
             : at::detail::empty_strided_cpu(to.sizes(), to.strides(), to.scalar_type());
  enqueue(
      stream, "copy to the host", [x = as_cpu(from), y = target] { y.copy_(x); }, use_of(from),
      use_of(to), true);
  if (pinned) keep_until_done(pinned, stream);
  if (!waits) return;
  synchronize(stream);
  findings().check();
  if (pinned) return;
  Below below;
  as_cpu(to).copy_(target);
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  findings().check();
  if (to.numel() == 0) return to;
  const bool sends = from.device().type() == kType, receives = to.device().type() == kType;
  TORCH_CHECK((sends || from.is_cpu()) && (receives || to.is_cpu()),
              "simulated: there is no copy from ", from.device(), " to ", to.device());
  if (sends && receives)
    copy_between_devices(from, to);
  else if (receives)
    copy_from_host(from, to, non_blocking);
  else
    copy_to_host(from, to, non_blocking);
  return to;
}
inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize_tensor(to, from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar_dense(const Tensor& t) {
  count_sync("item");
  const int stream = current_stream(t.device().index());
  Tensor value = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  enqueue(stream, "item", [x = as_cpu(t), value] { value.copy_(x); }, use_of(t), {}, true);
  synchronize(stream);
  findings().check();
  return at::native::_local_scalar_dense_cpu(value);
}

}  // namespace simulated
