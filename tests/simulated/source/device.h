// How torch gets at devices, streams and events: the guard, and the hooks of the backend.
#pragma once

#include "generator.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

struct Event {
  MomentPtr moment;  // of its last record
  bool is_timed = false;
};

inline void check_index(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "simulated: there is no device ", int(device),
              ": there are ", device_count());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, current_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current_streams[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<std::atomic<unsigned>, kMostDevices> made{};
    return stream(index(device), 1 + made[index(device)]++ % kPoolStreams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue(number_of(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Queue& q = queue(number_of(stream));
    std::lock_guard<std::mutex> lock(q.mutex);
    return q.completed == q.submitted;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_sync("stream.synchronize");
    synchronize(number_of(stream));
    findings().check();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count_sync("device.synchronize");
    synchronize_device(device < 0 ? current_device : device);
    findings().check();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ", int(device),
                " does not match recording stream's device index ", int(stream.device_index()),
                ".");
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->moment = simulated::record(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (const auto moment = moment_of(event)) wait_on_stream(number_of(stream), moment);
  }
  bool queryEvent(void* event) const override {
    const auto moment = moment_of(event);
    if (moment && !is_over(moment)) return false;
    if (moment) host_has_seen(moment->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    count_sync("event.synchronize");
    if (const auto moment = moment_of(event)) wait_on_host(moment);
    findings().check();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto from = moment_of(first), to = moment_of(second);
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(static_cast<Event*>(first)->is_timed && static_cast<Event*>(second)->is_timed,
                "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(is_over(from) && is_over(to),
                "Both events must be completed before calculating elapsed time.");
    TORCH_CHECK(device_of(from->stream) == device_of(to->stream),
                "simulated: there is no elapsed time between events of two devices");
    return static_cast<double>(to->at - from->at) * 1e-6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }

 private:
  static c10::DeviceIndex index(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  static c10::Stream stream(c10::DeviceIndex device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  static MomentPtr moment_of(void* event) {
    return event ? static_cast<Event*>(event)->moment : nullptr;
  }
};

// Other memory, and what was there is copied on the current stream. torch's own would copy at once.
inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = allocator().allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes())) {
    void *to = fresh.get(), *from = storage.mutable_data();
    const Region region(0, static_cast<int64_t>(kept));
    enqueue(current_stream(), "resize a storage", [=] { std::memcpy(to, from, kept); },
            {{static_cast<Block*>(storage.data_ptr().get_context()), region}},
            {{static_cast<Block*>(fresh.get_context()), region}});
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_index(device);
    current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device;
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }

  bool isPinnedPtr(const void* data) const override { return pinned_block(data) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace simulated
