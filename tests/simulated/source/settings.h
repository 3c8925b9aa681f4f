// What a test may set, and what it may ask for afterwards.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;
constexpr int kPoolStreams = 32;                     // what torch.Stream() hands out in turn
constexpr int kStreamsPerDevice = kPoolStreams + 1;  // and the default stream, number 0
constexpr int kStreams = kMostDevices * kStreamsPerDevice;
constexpr size_t kDeviceMemory = size_t(4) << 30;  // what a device says it has; nothing enforces it

inline int device_count() {
  static const int count = [] {
    const char* wanted = std::getenv("SIMULATED_DEVICES");
    return std::clamp(wanted ? std::atoi(wanted) : 4, 1, kMostDevices);
  }();
  return count;
}

inline int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

// All state of the process is made once and never destroyed: worker threads outlive `main`.
template <typename T>
T& forever() {
  static T* it = new T;
  return *it;
}

struct Settings {
  // Delays in microseconds, of kernels and of copies between devices (-1: as kernels).
  std::atomic<int64_t> lo{0}, hi{0}, copy_lo{-1}, copy_hi{-1};
  std::atomic<double> probability{1.0};
  std::atomic<uint64_t> seed{0};
  std::atomic<bool> poison{true};        // freed memory is filled with NaN
  std::atomic<bool> races{true};         // unordered accesses are looked for
  std::atomic<bool> raise_races{false};  // ... and raise where the second is queued
  std::atomic<bool> raise_syncs{false};  // a host that waits for a device raises
  std::atomic<bool> trace{false};        // spans are kept
};
inline Settings& settings() { return forever<Settings>(); }

struct Span {
  int stream;
  std::string name;
  int64_t delay;       // microseconds, from the start on
  int64_t start, end;  // nanoseconds of the host's monotonic clock
};

// What has been seen since the last reset.
class Findings {
 public:
  void count(const std::string& what) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++counts_[what];
  }
  void race(const std::string& text) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++counts_["races"];
    if (races_.size() < kMostRaces) races_.push_back(text);
  }
  void error(const std::string& text) {  // the first wins, as in a CUDA context
    std::lock_guard<std::mutex> guard(mutex_);
    if (error_.empty()) error_ = text;
    has_error_ = true;
  }
  void span(Span span) {
    std::lock_guard<std::mutex> guard(mutex_);
    spans_.push_back(std::move(span));
  }
  // An error of the past surfaces at whatever the host does next, as with CUDA.
  void check() {
    if (has_error_)
      TORCH_CHECK(false, "simulated: an asynchronous operation has failed: ", error());
  }
  void reset() {
    std::lock_guard<std::mutex> guard(mutex_);
    counts_.clear();
    races_.clear();
    spans_.clear();
    error_.clear();
    has_error_ = false;
  }

  std::map<std::string, int64_t> counts() const { return copied(counts_); }
  std::vector<std::string> races() const { return copied(races_); }
  std::vector<Span> spans() const { return copied(spans_); }
  std::string error() const { return copied(error_); }

 private:
  static constexpr size_t kMostRaces = 200;

  template <typename T>
  T copied(const T& what) const {
    std::lock_guard<std::mutex> guard(mutex_);
    return what;
  }

  mutable std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
  std::vector<std::string> races_;
  std::vector<Span> spans_;
  std::string error_;
  std::atomic<bool> has_error_{false};
};
inline Findings& findings() { return forever<Findings>(); }

// The host is about to wait for a device.
inline void count_sync(const std::string& what) {
  findings().count("sync: " + what);
  TORCH_CHECK(!settings().raise_syncs, "simulated: the host waits for the device: ", what);
}

inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace simulated
