// Memory: a caching allocator for the devices, one for pinned memory of the host.
//
// What is freed is used again at once, by the stream it was allocated on, the last freed first: the
// sharpest that a real allocator can be. Streams that `record_stream` has named are waited for
// first.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

namespace simulated {

// Which device and streams the host's threads are on.
inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local int current_streams[kMostDevices] = {0};
inline int current_stream(int device) {
  return device * kStreamsPerDevice + current_streams[device];
}
inline int current_stream() { return current_stream(current_device); }

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr int kNaN = 0xFF;  // of each byte; as integers it is -1

struct MemoryMutex : std::mutex {};
inline std::mutex& memory() { return forever<MemoryMutex>(); }  // before the order mutex

class Pool {  // of one device, or of the host's pinned memory. The memory mutex is held.
 public:
  c10::CachingDeviceAllocator::DeviceStats stats;

  Block* take(int stream, size_t bytes) {
    look_after_waiting();
    const size_t size = (bytes + kAligned - 1) / kAligned * kAligned;
    auto& list = free_[{stream, size}];
    Block* block;
    if (list.empty()) {
      block = fresh(stream, size);
    } else {
      block = list.back();
      list.pop_back();
    }
    static uint64_t lives = 0;
    block->number = ++lives;
    block->asked = bytes;
    block->is_live = true;
    stats.allocated_bytes[kAll].increase(size);
    stats.active_bytes[kAll].increase(size);
    stats.allocation[kAll].increase(1);
    return block;
  }

  void give_back(Block* block) {
    block->is_live = false;
    stats.allocated_bytes[kAll].decrease(block->size);
    stats.allocation[kAll].decrease(1);
    for (int stream : block->used_on) block->waits.push_back(record(stream));
    block->used_on.clear();
    if (!block->waits.empty()) {
      waiting_.push_back(block);
      return;
    }
    if (block->stream == kPinned) check_unused(*block);
    release(block);
  }

  // Every block of all pools by its address.
  static std::map<uintptr_t, Block*>& blocks() { return forever<std::map<uintptr_t, Block*>>(); }

 private:
  static constexpr size_t kAligned = 512;

  Block* fresh(int stream, size_t size) {
    auto* block = new Block;
    block->size = size;
    block->stream = stream;
    TORCH_CHECK(posix_memalign(&block->data, kAligned, size) == 0, "simulated: the machine has no ",
                size, " bytes of memory");
    std::memset(block->data, kNaN, size);
    blocks()[reinterpret_cast<uintptr_t>(block->data)] = block;
    stats.reserved_bytes[kAll].increase(size);
    return block;
  }

  void release(Block* block) {
    stats.active_bytes[kAll].decrease(block->size);
    if (settings().poison && block->stream == kPinned) {
      std::memset(block->data, kNaN, block->size);
    } else if (settings().poison) {
      // In the stream's order: who reads it later there, or unordered elsewhere, reads NaN.
      std::lock_guard<std::mutex> guard(order());
      const Uses all{{block, Region(0, static_cast<int64_t>(block->size))}};
      noted(block->stream, next_place(block->stream), "free", {}, all);
      submit(block->stream,
             {"free", [data = block->data, size = block->size] { std::memset(data, kNaN, size); }});
    }
    free_[{block->stream, block->size}].push_back(block);
  }

  void look_after_waiting() {
    auto is_done = [&](Block* block) {
      if (!std::all_of(block->waits.begin(), block->waits.end(), is_over)) return false;
      {
        std::lock_guard<std::mutex> guard(order());
        for (auto& moment : block->waits) block->history.forget(moment->clock);
      }
      block->waits.clear();
      release(block);
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_done), waiting_.end());
  }

  static void check_unused(const Block& block) {
    std::lock_guard<std::mutex> guard(order());
    if (const Access* access = block.history.unfinished(host_clock()))
      findings().race("freed in use: '" + access->operation + "' on " + name_of(access->stream) +
                      " uses pinned memory that the host has freed");
  }

  std::map<std::pair<int, size_t>, std::vector<Block*>> free_;  // by stream and size
  std::vector<Block*> waiting_;                                 // freed, but used on other streams
};
struct Pools {
  std::array<Pool, kMostDevices + 1> all;
};
inline Pool& pool(int device) { return forever<Pools>().all[device]; }
inline Pool& pinned_pool() { return pool(kMostDevices); }

inline void free_block(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> guard(memory());
  pool(device_of(block->stream)).give_back(block);
}
inline void free_pinned(void* context) {
  if (!context) return;
  std::lock_guard<std::mutex> guard(memory());
  pinned_pool().give_back(static_cast<Block*>(context));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    std::lock_guard<std::mutex> guard(memory());
    Block* block = pool(current_device).take(current_stream(), bytes);
    return {block->data, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { findings().count("empty_cache"); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data.get_context() || data.get_deleter() != &free_block) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> guard(memory());
    if (number_of(stream) != block->stream) block->used_on.insert(number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory());
    return pool(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory());
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory());
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory());
    return {kDeviceMemory - pool(device).stats.allocated_bytes[kAll].current, kDeviceMemory};
  }

 private:
  template <typename F>
  static void each(int device, F&& f) {
    auto& s = pool(device).stats;
    for (auto* stat : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.allocation})
      f((*stat)[kAll]);
  }
};
inline Allocator& allocator() { return forever<Allocator>(); }

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCPU);
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, device};
    std::lock_guard<std::mutex> guard(memory());
    Block* block = pinned_pool().take(kPinned, bytes);
    return {block->data, block, &free_pinned, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  // A copy that is queued on a stream uses it: it is not used again before.
  bool record_event(void*, void* context, c10::Stream stream) override {
    if (!context) return false;
    std::lock_guard<std::mutex> guard(memory());
    static_cast<Block*>(context)->used_on.insert(number_of(stream));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator& pinned_allocator() { return forever<PinnedAllocator>(); }

// The pinned block that an address of the host is in, if any: also from within, for views.
inline Block* pinned_block(const void* address) {
  std::lock_guard<std::mutex> guard(memory());
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto after = Pool::blocks().upper_bound(at);
  if (after == Pool::blocks().begin()) return nullptr;
  const auto& [begin, block] = *std::prev(after);
  return block->stream == kPinned && block->is_live && at < begin + block->size ? block : nullptr;
}

inline Block* block_of(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  const auto& data = t.storage().data_ptr();
  if (data.get_deleter() == &free_block) return static_cast<Block*>(data.get_context());
  return t.is_cpu() ? pinned_block(data.get()) : nullptr;
}

// What an operation touches of a tensor: the bytes of it, in memory of a device or pinned memory.
inline void add_use(Uses& uses, const at::Tensor& t) {
  Block* block = block_of(t);
  if (!block) return;
  const auto* base = static_cast<const char*>(t.storage().data());
  const int64_t begin = base - static_cast<const char*>(block->data);
  uses.push_back({block, Region(begin + t.storage_offset() * t.element_size(), t)});
}
inline Uses use_of(const at::Tensor& t) {
  Uses uses;
  add_use(uses, t);
  return uses;
}

}  // namespace simulated
