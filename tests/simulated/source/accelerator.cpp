// A simulated asynchronous accelerator, as PyTorch's PrivateUse1 backend. See README.md.
//
// One translation unit, for PyTorch's headers are most of the compile time. To be read in this
// order: settings, clocks, streams, memory, generator, device, tensors, operations, copies, views.
#include "copies.h"
#include "operations.h"
#include "views.h"

#include <ATen/autocast_mode.h>
#include <pybind11/functional.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace simulated {

template <auto* kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("convolution_overrideable", boxed<&convolution>());
  m.impl("convolution_backward_overrideable", boxed<&convolution_backward>());
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

// Autocast casts what it casts on CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
#define SIMULATED_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMULATED_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMULATED_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMULATED_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(SIMULATED_LOWER) AT_FORALL_FP32(SIMULATED_FP32)
        AT_FORALL_FP32_SET_OPT_DTYPE(SIMULATED_SET_DTYPE) AT_FORALL_PROMOTE(SIMULATED_PROMOTE)}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void set_delay(int64_t lo, int64_t hi, double probability, uint64_t seed, int64_t copy_lo,
               int64_t copy_hi) {
  std::lock_guard<std::mutex> guard(order());
  auto& s = settings();
  s.lo = lo;
  s.hi = hi;
  s.probability = probability;
  s.seed = seed;
  s.copy_lo = copy_lo;
  s.copy_hi = copy_hi;
  for (int i = 0; i < kStreams; ++i) queue(i).delays = 0;
}

void set_flags(bool poison, bool races, bool raise_races, bool raise_syncs, bool trace) {
  auto& s = settings();
  s.poison = poison;
  s.races = races;
  s.raise_races = raise_races;
  s.raise_syncs = raise_syncs;
  s.trace = trace;
}

std::map<std::string, bool> flags() {
  const auto& s = settings();
  return {{"poison", s.poison},
          {"races", s.races},
          {"raise_races", s.raise_races},
          {"raise_syncs", s.raise_syncs},
          {"trace", s.trace}};
}

auto spans() {
  std::vector<std::tuple<int, int, std::string, int64_t, int64_t>> found;
  for (const auto& s : findings().spans())
    found.emplace_back(device_of(s.stream), s.stream % kStreamsPerDevice, s.name, s.start, s.end);
  return found;
}

// One after the other, as the spans ended: device, stream, microseconds.
auto delays() {
  std::vector<std::tuple<int, int, int64_t>> found;
  for (const auto& s : findings().spans())
    found.emplace_back(device_of(s.stream), s.stream % kStreamsPerDevice, s.delay);
  return found;
}

// A kernel that takes until what comes back is called.
std::function<void()> hold() {
  auto moment = std::make_shared<Moment>();
  enqueue(current_stream(), "hold", [moment] { wait(*moment); }, {}, {});
  return [moment] { end(*moment); };
}

void sleep(int64_t microseconds) {
  enqueue(current_stream(), "sleep",
          [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }, {}, {});
}

PYBIND11_MODULE(_accelerator, m) {
  c10::SetAllocator(kType, &allocator());
  static at::HostAllocatorRegistry<at::kPrivateUse1> host_allocator(&pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", &device_count);
  m.def("set_delay", &set_delay, py::arg("lo"), py::arg("hi"), py::arg("probability") = 1.0,
        py::arg("seed") = 0, py::arg("copy_lo") = -1, py::arg("copy_hi") = -1);
  m.def("set_flags", &set_flags, py::arg("poison") = true, py::arg("races") = true,
        py::arg("raise_races") = false, py::arg("raise_syncs") = false, py::arg("trace") = false);
  m.def("flags", &flags);
  m.def("counts", [] { return findings().counts(); });
  m.def("races", [] { return findings().races(); });
  m.def("error", [] { return findings().error(); });
  m.def("spans", &spans);
  m.def("settle", &synchronize_all);
  m.def("reset", [] {
    synchronize_all();
    findings().reset();
  });
  m.def("delays", &delays);
  m.def("sleep", &sleep);
  m.def("hold", &hold);
  m.def("default_generator",
        [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
}

}  // namespace simulated
