// A simulated asynchronous accelerator for PyTorch's PrivateUse1 backend. See README.md.
//
// Every stream is a queue with a worker thread; operations are queued and run later, with a delay,
// by the CPU's kernels on memory of the device. Shapes of results come from the meta kernels.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace sim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
constexpr auto kDev = DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8, kPool = 32, kPer = kPool + 1;
constexpr int kStreams = kMaxDevices * kPer;

int device_count() {
  static int n = [] {
    const char* e = std::getenv("SIMULATED_DEVICES");
    int v = e ? std::atoi(e) : 4;
    return std::min(std::max(v, 1), kMaxDevices);
  }();
  return n;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Config {
  std::atomic<int64_t> lo{0}, hi{0}, copy_lo{-1}, copy_hi{-1};
  std::atomic<double> probability{1.0};
  std::atomic<uint64_t> seed{0};
  std::atomic<bool> poison{true}, races{true}, raise_races{false}, trace{false};
  std::atomic<bool> raise_syncs{false};
};
Config& config() { static Config* c = new Config; return *c; }

// --- counters, errors, races, trace

struct Books {
  std::mutex m;
  std::map<std::string, int64_t> counts;
  std::vector<std::string> races;
  std::string error;
  std::atomic<bool> has_error{false};
  struct Span { int stream; std::string name; int64_t start, end; };
  std::vector<Span> spans;
};
Books& books() { static Books* b = new Books; return *b; }

void count(const std::string& what, int64_t n = 1) {
  std::lock_guard<std::mutex> g(books().m);
  books().counts[what] += n;
}
void note_error(const std::string& text) {
  std::lock_guard<std::mutex> g(books().m);
  if (books().error.empty()) books().error = text;
  books().has_error = true;
}
void check_errors() {
  if (!books().has_error) return;
  std::string e;
  { std::lock_guard<std::mutex> g(books().m); e = books().error; }
  TORCH_CHECK(false, "simulated: an asynchronous operation has failed: ", e);
}
void count_sync(const std::string& what) {
  count("sync: " + what);
  TORCH_CHECK(!config().raise_syncs, "simulated: called a synchronizing operation: ", what);
}

// --- vector clocks

struct Clock {
  std::vector<uint64_t> v;
  Clock() : v(kStreams, 0) {}
  void join(const Clock& o) { for (int i = 0; i < kStreams; ++i) v[i] = std::max(v[i], o.v[i]); }
};

struct Access { int stream = -1; uint64_t seq = 0; std::string op; };

struct Block {
  void* ptr = nullptr;
  size_t size = 0, asked = 0;
  int stream = 0;  // allocated on; -1: pinned host memory
  bool live = false;
  uint64_t number = 0;
  std::set<int> used_on;
  std::vector<std::shared_ptr<struct Moment>> waits;
  Access write;
  std::vector<Access> reads;
};

struct Moment {  // a recorded state of an event
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  int64_t at = 0;
  int stream = -1;
  Clock clock;
};
using MomentPtr = std::shared_ptr<Moment>;

struct Job { std::string name; std::function<void()> fn; int64_t delay_us; bool visible; };

struct Queue {
  int index = 0;
  std::mutex m;
  std::condition_variable cv, idle;
  std::deque<Job> jobs;
  uint64_t submitted = 0, completed = 0;
  bool started = false;
  Clock clock;  // under the order mutex
};

std::mutex& order() { static auto* m = new std::mutex; return *m; }
Clock& host_clock() { static auto* c = new Clock; return *c; }
Queue& queue(int index) {
  static auto* queues = [] {
    auto* q = new std::vector<Queue>(kStreams);
    for (int i = 0; i < kStreams; ++i) (*q)[i].index = i;
    return q;
  }();
  return (*queues)[index];
}
std::string stream_name(int s) {
  return "simulated:" + std::to_string(s / kPer) + "/stream" + std::to_string(s % kPer);
}
int index_of(const c10::Stream& s) {
  return static_cast<int>(s.device_index()) * kPer + static_cast<int>(s.id());
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

int64_t delay_of(int stream, uint64_t seq, bool is_copy) {
  auto& c = config();
  int64_t lo = is_copy && c.copy_lo >= 0 ? c.copy_lo.load() : c.lo.load();
  int64_t hi = is_copy && c.copy_hi >= 0 ? c.copy_hi.load() : c.hi.load();
  if (hi <= 0) return 0;
  uint64_t r = mix(c.seed * 1000003ull + stream * 7919ull + seq * 104729ull);
  double p = (r >> 40) / double(1 << 24);
  if (p >= c.probability) return 0;
  return lo + (hi > lo ? static_cast<int64_t>(mix(r) % static_cast<uint64_t>(hi - lo + 1)) : 0);
}

struct Quiet final : c10::WarningHandler { void process(const c10::Warning&) override {} };

void work(Queue* q) {
  static auto* quiet = new Quiet;
  c10::WarningUtils::set_warning_handler(quiet);
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::AutoDispatchBelowADInplaceOrView below;
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> l(q->m);
      q->cv.wait(l, [&] { return !q->jobs.empty(); });
      job = std::move(q->jobs.front());
      q->jobs.pop_front();
    }
    int64_t start = now_ns();
    if (job.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(job.delay_us));
    try {
      job.fn();
    } catch (const std::exception& e) {
      std::string text = e.what();
      note_error(job.name + " on " + stream_name(q->index) + ": " + text.substr(0, text.find("\nException raised")));
    }
    if (job.visible && config().trace) {
      std::lock_guard<std::mutex> g(books().m);
      books().spans.push_back({q->index, job.name, start, now_ns()});
    }
    job.fn = nullptr;
    {
      std::lock_guard<std::mutex> l(q->m);
      ++q->completed;
    }
    q->idle.notify_all();
  }
}

// The order mutex is held. Not a write and not a read of any block: empty lists.
std::string push(int s, std::string name, std::function<void()> fn, const std::vector<Block*>& reads,
                 const std::vector<Block*>& writes, bool delayed, bool is_copy, bool visible) {
  Queue& q = queue(s);
  q.clock.join(host_clock());
  uint64_t seq = ++q.clock.v[s];
  std::string report;
  if (config().races) {
    auto ordered = [&](const Access& a) {
      return a.stream < 0 || a.stream == s || q.clock.v[a.stream] >= a.seq;
    };
    auto tell = [&](const char* kind, Block* b, const Access& a) {
      if (!report.empty()) return;
      report = std::string(kind) + ": '" + name + "' on " + stream_name(s) + " is not ordered after '" +
          a.op + "' on " + stream_name(a.stream) + " (block " + std::to_string(b->number) + " of " +
          std::to_string(b->asked) + " bytes" +
          (b->stream < 0 ? ", pinned" : ", allocated on " + stream_name(b->stream)) + ")";
    };
    for (Block* b : reads)
      if (!ordered(b->write)) tell("read after write", b, b->write);
    for (Block* b : writes) {
      if (!ordered(b->write)) tell("write after write", b, b->write);
      for (auto& a : b->reads)
        if (!ordered(a)) tell("write after read", b, a);
    }
    for (Block* b : writes) {
      b->write = {s, seq, name};
      b->reads.clear();
    }
    for (Block* b : reads) {
      if (std::find(writes.begin(), writes.end(), b) != writes.end()) continue;
      auto it = std::find_if(b->reads.begin(), b->reads.end(), [&](auto& a) { return a.stream == s; });
      if (it == b->reads.end()) b->reads.push_back({s, seq, name});
      else *it = {s, seq, name};
    }
    if (!report.empty()) {
      std::lock_guard<std::mutex> g(books().m);
      books().counts["races"]++;
      if (books().races.size() < 200) books().races.push_back(report);
    }
  }
  int64_t delay = delayed ? delay_of(s, seq, is_copy) : 0;
  std::lock_guard<std::mutex> l(q.m);
  if (!q.started) {
    q.started = true;
    std::thread(work, &q).detach();
  }
  q.jobs.push_back({std::move(name), std::move(fn), delay, visible});
  ++q.submitted;
  q.cv.notify_one();
  return report;
}

void enqueue(int s, std::string name, std::function<void()> fn, const std::vector<Block*>& reads,
             const std::vector<Block*>& writes, bool is_copy = false) {
  std::string report;
  {
    std::lock_guard<std::mutex> g(order());
    report = push(s, std::move(name), std::move(fn), reads, writes, true, is_copy, true);
  }
  TORCH_CHECK(report.empty() || !config().raise_races, "simulated: race: ", report);
}

MomentPtr record_on(int s, bool is_locked = false) {
  auto m = std::make_shared<Moment>();
  m->stream = s;
  std::unique_lock<std::mutex> g(order(), std::defer_lock);
  if (!is_locked) g.lock();
  push(s, "event", [m] {
    { std::lock_guard<std::mutex> l(m->m); m->done = true; m->at = now_ns(); }
    m->cv.notify_all();
  }, {}, {}, false, false, false);
  m->clock = queue(s).clock;
  return m;
}

void wait_on(int s, const MomentPtr& m) {
  if (m->stream == s) return;
  std::lock_guard<std::mutex> g(order());
  queue(s).clock.join(m->clock);
  push(s, "wait", [m] {
    std::unique_lock<std::mutex> l(m->m);
    m->cv.wait(l, [&] { return m->done; });
  }, {}, {}, false, false, false);
}

bool is_done(const MomentPtr& m) { std::lock_guard<std::mutex> l(m->m); return m->done; }

struct WithoutGil {
  PyThreadState* state = nullptr;
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread(); }
  ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

void wait_for(const MomentPtr& m) {
  {
    WithoutGil no_gil;
    std::unique_lock<std::mutex> l(m->m);
    m->cv.wait(l, [&] { return m->done; });
  }
  std::lock_guard<std::mutex> g(order());
  host_clock().join(m->clock);
}

void synchronize(int s) {
  Queue& q = queue(s);
  Clock clock;
  {
    std::lock_guard<std::mutex> g(order());
    clock = q.clock;
  }
  {
    WithoutGil no_gil;
    std::unique_lock<std::mutex> l(q.m);
    uint64_t until = q.submitted;
    q.idle.wait(l, [&] { return q.completed >= until; });
  }
  std::lock_guard<std::mutex> g(order());
  host_clock().join(clock);
}

void synchronize_device(int d) { for (int i = 0; i < kPer; ++i) synchronize(d * kPer + i); }

// --- memory

struct Pool {  // of one device, or (the last) of pinned memory
  std::map<std::pair<int, size_t>, std::vector<Block*>> free;  // by (stream, size): the last first
  std::vector<Block*> pending;                                  // freed, but used on other streams
  c10::CachingDeviceAllocator::DeviceStats stats;
};
std::mutex& memory() { static auto* m = new std::mutex; return *m; }
Pool& pool(int d) { static auto* p = new std::vector<Pool>(kMaxDevices + 1); return (*p)[d]; }
std::map<uintptr_t, Block*>& blocks() { static auto* b = new std::map<uintptr_t, Block*>; return *b; }
std::atomic<uint64_t> g_numbers{0};

using c10::CachingAllocator::StatType;
constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
size_t rounded(size_t n) { return (n + 511) / 512 * 512; }

void release(Pool& p, Block* b) {  // the memory mutex is held
  p.stats.active_bytes[kAll].decrease(b->size);
  if (config().poison) {
    if (b->stream >= 0) {
      std::lock_guard<std::mutex> g(order());
      void* ptr = b->ptr; size_t n = b->size;
      push(b->stream, "free", [ptr, n] { std::memset(ptr, 0xFF, n); }, {}, {b}, false, false, false);
    } else {
      std::memset(b->ptr, 0xFF, b->size);
    }
  }
  p.free[{b->stream, b->size}].push_back(b);
}

void look_after_pending(Pool& p) {
  auto& w = p.pending;
  for (size_t i = 0; i < w.size();) {
    Block* b = w[i];
    bool over = std::all_of(b->waits.begin(), b->waits.end(), is_done);
    if (!over) { ++i; continue; }
    {
      std::lock_guard<std::mutex> g(order());
      Clock seen;
      for (auto& m : b->waits) seen.join(m->clock);
      auto is_over = [&](const Access& a) { return a.stream < 0 || seen.v[a.stream] >= a.seq; };
      if (is_over(b->write)) b->write = {};
      b->reads.erase(std::remove_if(b->reads.begin(), b->reads.end(), is_over), b->reads.end());
    }
    b->waits.clear();
    release(p, b);
    w[i] = w.back();
    w.pop_back();
  }
}

Block* take(Pool& p, int stream, size_t n) {  // the memory mutex is held
  size_t size = rounded(n);
  look_after_pending(p);
  Block* b;
  auto it = p.free.find({stream, size});
  if (it != p.free.end() && !it->second.empty()) {
    b = it->second.back();
    it->second.pop_back();
  } else {
    b = new Block;
    b->size = size;
    b->stream = stream;
    TORCH_CHECK(posix_memalign(&b->ptr, 512, size) == 0, "simulated: out of memory");
    std::memset(b->ptr, 0xFF, size);
    blocks()[reinterpret_cast<uintptr_t>(b->ptr)] = b;
    p.stats.reserved_bytes[kAll].increase(size);
  }
  b->number = ++g_numbers;
  b->asked = n;
  b->live = true;
  b->used_on.clear();
  p.stats.allocated_bytes[kAll].increase(size);
  p.stats.active_bytes[kAll].increase(size);
  p.stats.allocation[kAll].increase(1);
  return b;
}

void give_back(Pool& p, Block* b) {  // the memory mutex is held
  b->live = false;
  p.stats.allocated_bytes[kAll].decrease(b->size);
  p.stats.allocation[kAll].decrease(1);
  if (b->used_on.empty()) {
    if (b->stream < 0) {
      std::lock_guard<std::mutex> g(order());
      auto check = [&](const Access& a) {
        if (a.stream < 0 || host_clock().v[a.stream] >= a.seq) return;
        std::lock_guard<std::mutex> h(books().m);
        books().counts["races"]++;
        books().races.push_back("pinned memory freed while '" + a.op + "' on " +
                                stream_name(a.stream) + " uses it");
      };
      check(b->write);
      for (auto& a : b->reads) check(a);
    }
    release(p, b);
    return;
  }
  for (int s : b->used_on) b->waits.push_back(record_on(s));
  b->used_on.clear();
  p.pending.push_back(b);
}

thread_local DeviceIndex t_device = 0;
thread_local int t_stream[kMaxDevices] = {0};

void delete_block(void* ctx) {
  if (!ctx) return;
  auto* b = static_cast<Block*>(ctx);
  std::lock_guard<std::mutex> g(memory());
  give_back(pool(b->stream / kPer), b);
}
void delete_pinned(void* ctx) {
  if (!ctx) return;
  std::lock_guard<std::mutex> g(memory());
  give_back(pool(kMaxDevices), static_cast<Block*>(ctx));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Device device(kDev, t_device);
    if (n == 0) return {nullptr, nullptr, &delete_block, device};
    std::lock_guard<std::mutex> g(memory());
    Block* b = take(pool(t_device), t_device * kPer + t_stream[t_device], n);
    return {b->ptr, b, &delete_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { count("emptyCache"); }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    if (!p.get_context() || p.get_deleter() != &delete_block) return;
    auto* b = static_cast<Block*>(p.get_context());
    std::lock_guard<std::mutex> g(memory());
    int i = index_of(s);
    if (i != b->stream) b->used_on.insert(i);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> g(memory());
    return pool(d).stats;
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> g(memory());
    pool(d).stats.allocated_bytes[kAll].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> g(memory());
    auto& s = pool(d).stats;
    for (auto* a : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.allocation}) (*a)[kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<std::mutex> g(memory());
    size_t total = size_t(4) << 30;
    return {total - pool(d).stats.allocated_bytes[kAll].current, total};
  }
};
Allocator& allocator() { static auto* a = new Allocator; return *a; }

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &delete_pinned, Device(c10::kCPU)};
    std::lock_guard<std::mutex> g(memory());
    Block* b = take(pool(kMaxDevices), -1, n);
    return {b->ptr, b, &delete_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
  bool record_event(void*, void* ctx, c10::Stream s) override {
    if (!ctx) return false;
    std::lock_guard<std::mutex> g(memory());
    static_cast<Block*>(ctx)->used_on.insert(index_of(s));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
Pinned& pinned() { static auto* p = new Pinned; return *p; }

Block* pinned_block(const void* p) {
  std::lock_guard<std::mutex> g(memory());
  auto& all = blocks();
  auto it = all.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (it == all.begin()) return nullptr;
  Block* b = std::prev(it)->second;
  auto from = reinterpret_cast<uintptr_t>(b->ptr), at = reinterpret_cast<uintptr_t>(p);
  return b->stream < 0 && b->live && at < from + b->size ? b : nullptr;
}

Block* block_of(const Tensor& t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  const auto& p = t.storage().data_ptr();
  if (p.get_deleter() == &delete_block) return static_cast<Block*>(p.get_context());
  if (t.is_cpu()) return pinned_block(p.get());
  return nullptr;
}

// --- random numbers: a seed and an offset, as CUDA has it

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex i)
      : c10::GeneratorImpl(Device(kDev, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t s) override { seed_ = s; offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return seed_; }
  void set_state(const c10::TensorImpl& t) override {
    TORCH_CHECK(t.device().is_cpu() && t.numel() == 16, "RNG state must be 16 bytes on the CPU");
    const auto* p = static_cast<const uint64_t*>(t.data());
    seed_ = p[0]; offset_ = p[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, c10::kByte, c10::kStrided, c10::kCPU, false, std::nullopt);
    auto* p = static_cast<uint64_t*>(t.data_ptr());
    p[0] = seed_; p[1] = offset_;
    return t.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* g = new Generator(device().index());
    g->seed_ = seed_; g->offset_ = offset_;
    return g;
  }
  static DeviceType device_type() { return kDev; }
};
at::Generator& default_generator(DeviceIndex i) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>;
    for (int d = 0; d < kMaxDevices; ++d) v->push_back(at::make_generator<Generator>(DeviceIndex(d)));
    return v;
  }();
  return (*all)[i < 0 ? t_device : i];
}

// --- the guard: devices, streams, events

struct Event { MomentPtr moment; bool timed = false; };

void check_device(DeviceIndex d) {
  TORCH_CHECK(d >= 0 && d < device_count(), "simulated: invalid device index ", int(d));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kDev; }
  Device exchangeDevice(Device d) const override {
    Device old(kDev, t_device);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kDev, t_device); }
  void setDevice(Device d) const override { check_device(d.index()); t_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) t_device = d.index(); }
  c10::Stream made(DeviceIndex d, int id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kDev, d), id);
  }
  static DeviceIndex real(Device d) { return d.index() < 0 ? t_device : d.index(); }
  c10::Stream getStream(Device d) const override { return made(real(d), t_stream[real(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return made(real(d), 0); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(Device d, int) const override {
    static std::atomic<unsigned> next[kMaxDevices];
    return made(real(d), 1 + next[real(d)]++ % kPool);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    t_stream[s.device_index()] = static_cast<int>(s.id());
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &queue(index_of(s)); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, const DeviceIndex d, const c10::EventFlag flag) const override {
    TORCH_CHECK(d == -1 || d == s.device_index(), "Event device index ", int(d),
                " does not match recording stream's device index ", int(s.device_index()), ".");
    if (!*e) *e = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*e)->moment = record_on(index_of(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    if (e && static_cast<Event*>(e)->moment) wait_on(index_of(s), static_cast<Event*>(e)->moment);
  }
  bool queryEvent(void* e) const override {
    if (!e || !static_cast<Event*>(e)->moment) return true;
    auto& m = static_cast<Event*>(e)->moment;
    if (!is_done(m)) return false;
    std::lock_guard<std::mutex> g(order());
    host_clock().join(m->clock);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream& s) const override {
    Queue& q = queue(index_of(s));
    std::lock_guard<std::mutex> l(q.m);
    return q.completed == q.submitted;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    count_sync("stream.synchronize");
    synchronize(index_of(s));
    check_errors();
  }
  void synchronizeEvent(void* e) const override {
    count_sync("event.synchronize");
    if (e && static_cast<Event*>(e)->moment) wait_for(static_cast<Event*>(e)->moment);
    check_errors();
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    count_sync("device.synchronize");
    synchronize_device(d < 0 ? t_device : d);
    check_errors();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    allocator().recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto *x = static_cast<Event*>(a), *y = static_cast<Event*>(b);
    TORCH_CHECK(x && y && x->moment && y->moment, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(x->timed && y->timed, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(is_done(x->moment) && is_done(y->moment), "Both events must be completed before calculating elapsed time.");
    TORCH_CHECK(x->moment->stream / kPer == y->moment->stream / kPer, "simulated: events of two devices have no distance");
    return (y->moment->at - x->moment->at) * 1e-6;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { check_device(d); t_device = d; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = t_device;
    setCurrentDevice(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? t_device : exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pinned_block(p) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  Device getDeviceFromPtr(void*) const override { return Device(kDev, t_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? t_device : i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    Device device = storage.device();
    c10::DeviceGuard guard(device);
    auto fresh = allocator().allocate(n);
    size_t keep = std::min(n, storage.nbytes());
    if (keep) {
      void *to = fresh.get(), *from = storage.mutable_data();
      enqueue(device.index() * kPer + t_stream[device.index()], "resize storage",
              [=] { std::memcpy(to, from, keep); },
              {static_cast<Block*>(storage.data_ptr().get_context())}, {static_cast<Block*>(fresh.get_context())});
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(n);
  }
};

// --- operations

Tensor make(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType type, Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

void* data_of(const Tensor& t) {
  auto* base = static_cast<char*>(const_cast<void*>(t.storage().data()));
  return base ? base + t.storage_offset() * t.element_size() : nullptr;
}

Tensor raw_cpu(const Tensor& t) {  // the same memory, seen by the CPU
  TORCH_CHECK(!t.is_conj() && !t.is_neg(), "simulated: no conjugate or negative views");
  Tensor r;
  if (t.numel() == 0 || !data_of(t)) {
    r = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  } else {
    r = at::from_blob(data_of(t), t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

Tensor host_copy(const Tensor& t) {  // now
  Tensor r = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  if (t.numel()) {
    c10::impl::ExcludeDispatchKeyGuard a(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    c10::impl::ExcludeDispatchKeyGuard b(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    raw_cpu(r).copy_(raw_cpu(t));
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

Tensor as_meta(const Tensor& t) {
  Tensor r = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

template <typename F>
IValue mapped(const IValue& v, F&& f) {
  if (v.isTensor()) {
    const auto& t = v.toTensor();
    return t.defined() ? IValue(f(t)) : v;
  }
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      out.push_back(t.has_value() && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  return v;
}

// Not the host's modes, autograd or autocast: below all of them.
struct Below {
  c10::impl::ExcludeDispatchKeyGuard a{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard b{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::impl::ExcludeDispatchKeyGuard c{c10::autocast_dispatch_keyset};
  at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  Below() { at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~Below() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

const std::unordered_set<std::string> kWaits = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::_unique",
    "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave", "aten::bincount", "aten::is_set_to"};
const std::unordered_set<std::string> kWritesStatistics = {
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::batch_norm_gather_stats_with_counts"};
const std::unordered_set<std::string> kTakesHostIndices = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_errors();
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t n = schema.arguments().size(), base = stack->size() - n;
  // where
  std::optional<Device> device;
  std::vector<Block*> reads, writes;
  for (size_t i = 0; i < n; ++i) {
    const IValue& v = (*stack)[base + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool is_written = alias && alias->isWrite();
    if (kWritesStatistics.count(name) && schema.arguments()[i].name().rfind("running", 0) == 0) is_written = true;
    mapped(v, [&](const Tensor& t) {
      if (t.device().type() == kDev) {
        TORCH_CHECK(!device || *device == t.device(),
                    "Expected all tensors to be on the same device, but found at least two devices, ",
                    *device, " and ", t.device(), "! (", name, ")");
        device = t.device();
        if (Block* b = block_of(t)) (is_written ? writes : reads).push_back(b);
      }
      return t;
    });
  }
  for (size_t i = 0; i < n; ++i) {
    const IValue& v = (*stack)[base + i];
    if (v.isDevice() && !device) device = v.toDevice();
    mapped(v, [&](const Tensor& t) {
      TORCH_CHECK(t.device().type() == kDev || (t.is_cpu() && (t.dim() == 0 || t.numel() == 0 || kTakesHostIndices.count(name))),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device ? device->str() : "simulated", " and ", t.device(), "! (", name, ")");
      return t;
    });
  }
  DeviceIndex d = device && device->index() >= 0 ? device->index() : t_device;
  c10::DeviceGuard guard(Device(kDev, d));
  const int s = d * kPer + t_stream[d];

  // random numbers: where the device's generator is now
  std::optional<uint64_t> seed;
  for (size_t i = 0; i < n; ++i) {
    const auto& type = schema.arguments()[i].type();
    bool is_generator = type->str().find("Generator") != std::string::npos;
    if (!is_generator) continue;
    IValue& v = (*stack)[base + i];
    at::Generator g = v.isNone() ? default_generator(d) : v.toGenerator();
    if (!g.defined()) g = default_generator(d);
    TORCH_CHECK(g.device().type() == kDev, "Expected a 'simulated' device type for generator but found '", g.device().type(), "'");
    auto* own = g.get<Generator>();
    std::lock_guard<std::mutex> l(own->mutex_);
    seed = mix(own->seed_ * 31 + own->offset_);
    own->offset_ += 4;
  }

  auto for_cpu = [&]() {
    torch::jit::Stack cpu;
    for (size_t i = 0; i < n; ++i) {
      const IValue& v = (*stack)[base + i];
      if (v.isDevice()) cpu.emplace_back(Device(at::kCPU));
      else if (seed && schema.arguments()[i].type()->str().find("Generator") != std::string::npos)
        cpu.emplace_back(at::detail::createCPUGenerator(*seed));
      else
        cpu.push_back(mapped(v, [](const Tensor& t) { return t.is_cpu() ? host_copy(t) : raw_cpu(t); }));
    }
    return cpu;
  };

  // what comes back
  const auto& returns = schema.returns();
  std::vector<int> from(returns.size(), -1);  // which argument a return is
  bool has_fresh = false, has_others = false;
  for (size_t r = 0; r < returns.size(); ++r) {
    const auto* alias = returns[r].alias_info();
    if (!alias) {
      has_fresh = true;
      bool tensors = returns[r].type()->isSubtypeOf(*c10::TensorType::get()) ||
          returns[r].type()->isSubtypeOf(*c10::ListType::ofTensors());
      has_others |= !tensors;
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "simulated: no view operation ", name, ".", schema.overload_name());
    for (size_t i = 0; i < n; ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) from[r] = static_cast<int>(i);
    }
    TORCH_CHECK(from[r] >= 0, "simulated: what does ", name, " return?");
  }
  bool is_out = schema.overload_name().find("out") != std::string::npos && !from.empty() && from[0] >= 0;
  bool waits = has_others || (kWaits.count(name) != 0 && (name != "aten::repeat_interleave" || schema.overload_name() == "Tensor"));

  torch::jit::Stack meta;
  bool needs_meta = has_fresh;
  if (is_out && !waits) {
    for (int i : from)
      if (i >= 0 && (*stack)[base + i].isTensor() && (*stack)[base + i].toTensor().numel() == 0) needs_meta = true;
  }
  if (needs_meta && !waits) {
    Below below;
    for (size_t i = 0; i < n; ++i) {
      const IValue& v = (*stack)[base + i];
      if (v.isDevice()) meta.emplace_back(Device(at::kMeta));
      else if (seed && schema.arguments()[i].type()->str().find("Generator") != std::string::npos) meta.emplace_back();
      else meta.push_back(mapped(v, as_meta));
    }
    try {
      op.callBoxed(&meta);
    } catch (const c10::NotImplementedError& e) {
      count("simulator waits, no meta kernel: " + name);
      waits = true;
    } catch (const std::exception& e) {
      if (std::string(e.what()).find("meta") == std::string::npos && std::string(e.what()).find("Meta") == std::string::npos) throw;
      count("simulator waits, meta failed: " + name);
      waits = true;
    }
    if (waits && is_out) TORCH_CHECK(false, "simulated: no meta kernel for ", name, " with an empty out");
  } else if (waits) {
    count_sync(name);
  }

  torch::jit::Stack results;
  if (waits) {
    synchronize(s);
    auto cpu = for_cpu();
    { Below below; op.callBoxed(&cpu); }
    for (size_t r = 0; r < returns.size(); ++r) {
      if (from[r] >= 0) { results.push_back((*stack)[base + from[r]]); continue; }
      results.push_back(mapped(cpu[r], [&](const Tensor& t) {
        Tensor out = make(t.sizes(), t.strides(), t.scalar_type(), Device(kDev, d));
        Tensor to = raw_cpu(out);
        std::vector<Block*> w;
        if (Block* b = block_of(out)) w.push_back(b);
        enqueue(s, name, [to, t]() mutable { to.copy_(t); }, {}, w);
        return out;
      }));
    }
    stack->erase(stack->end() - static_cast<ptrdiff_t>(n), stack->end());
    for (auto& v : results) stack->push_back(std::move(v));
    return;
  }

  std::vector<std::pair<size_t, std::vector<Tensor>>> targets;  // where fresh results go
  for (size_t r = 0; r < returns.size(); ++r) {
    if (from[r] >= 0) {
      const IValue& v = (*stack)[base + from[r]];
      if (is_out && needs_meta && v.isTensor() && meta[r].isTensor() && v.toTensor().sizes() != meta[r].toTensor().sizes()) {
        const Tensor& t = v.toTensor();
        at::native::resize_(t, meta[r].toTensor().sizes(), std::nullopt);
        if (Block* b = block_of(t)) writes.push_back(b);
      }
      results.push_back(v);
      continue;
    }
    std::vector<Tensor> to;
    results.push_back(mapped(meta[r], [&](const Tensor& t) {
      Tensor out = make(t.sizes(), t.strides(), t.scalar_type(), Device(kDev, d));
      to.push_back(raw_cpu(out));
      if (Block* b = block_of(out)) writes.push_back(b);
      return out;
    }));
    targets.emplace_back(r, std::move(to));
  }
  auto cpu = std::make_shared<torch::jit::Stack>(for_cpu());
  if (is_out) {
    // Into new memory, then to where it belongs: a structured operation that reduces (mse_loss.out)
    // is not made for an output that has its last size already.
    for (size_t r = 0; r < returns.size(); ++r) {
      if (from[r] < 0 || !(*cpu)[from[r]].isTensor()) continue;
      Tensor to = (*cpu)[from[r]].toTensor();
      (*cpu)[from[r]] = at::detail::empty_cpu({0}, to.scalar_type());
      targets.emplace_back(r, std::vector<Tensor>{to});
    }
  }
  enqueue(s, name + (schema.overload_name().empty() ? "" : "." + schema.overload_name()),
          [op, cpu, targets, name]() mutable {
            op.callBoxed(cpu.get());
            for (auto& [r, to] : targets) {
              size_t k = 0;
              mapped((*cpu)[r], [&](const Tensor& t) {
                TORCH_CHECK(k < to.size(), "more results than expected");
                if (t.sizes() == to[k].sizes()) to[k].copy_(t);
                else TORCH_CHECK(t.numel() == 0 || to[k].numel() == 0, "a result of ", name, " has sizes ", t.sizes(), ", and ", to[k].sizes(), " was expected");
                ++k;
                return t;
              });
            }
          },
          reads, writes);
  stack->erase(stack->end() - static_cast<ptrdiff_t>(n), stack->end());
  for (auto& v : results) stack->push_back(std::move(v));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack); }

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run(op, stack);
}
void convolution_backward(const c10::OperatorHandle& own, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  size_t base = stack->size() - own.schema().arguments().size();
  const Tensor weight = (*stack)[base + 2].toTensor();
  const Tensor grad = (*stack)[base].toTensor();
  // grad, input, weight, [bias_sizes], stride, ...
  stack->insert(stack->begin() + static_cast<ptrdiff_t>(base) + 3, IValue(std::vector<int64_t>{grad.size(1)}));
  run(op, stack);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kDev, t_device)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return make(size, stride, c10::dtype_or_default(dtype), device.value_or(Device(kDev, t_device)));
}

std::vector<Block*> only(Block* b) { return b ? std::vector<Block*>{b} : std::vector<Block*>{}; }

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  check_errors();
  if (dst.numel() == 0) return dst;
  if (src.device().type() == kDev && dst.device().type() == kDev) {
    int a = src.device().index(), b = dst.device().index();
    int on = a * kPer + t_stream[a], to = b * kPer + t_stream[b];
    if (a != b) wait_on(on, record_on(to));
    Tensor x = raw_cpu(src), y = raw_cpu(dst);
    enqueue(on, a == b ? "copy" : "copy to another device", [x, y]() mutable { y.copy_(x); },
            only(block_of(src)), only(block_of(dst)), a != b);
    if (a != b) wait_on(to, record_on(on));
    return dst;
  }
  if (src.is_cpu()) {
    int d = dst.device().index(), s = d * kPer + t_stream[d];
    Block* p = block_of(src);
    Tensor y = raw_cpu(dst);
    bool as_is = p && src.is_contiguous();
    Tensor x = as_is ? raw_cpu(src) : host_copy(src);
    if (!p && non_blocking) count("pageable memory to the device, non_blocking");
    enqueue(s, "copy from the host", [x, y]() mutable { y.copy_(x); }, only(as_is ? p : nullptr), only(block_of(dst)), true);
    if (as_is) pinned().record_event(nullptr, p, c10::Stream(c10::Stream::UNSAFE, dst.device(), t_stream[d]));
    if (!non_blocking) { count_sync("copy from the host, blocking"); synchronize(s); check_errors(); }
    return dst;
  }
  TORCH_CHECK(dst.is_cpu(), "simulated: copy to ", dst.device());
  int d = src.device().index(), s = d * kPer + t_stream[d];
  Block* p = block_of(dst);
  Tensor x = raw_cpu(src), y = raw_cpu(dst);
  enqueue(s, "copy to the host", [x, y]() mutable { y.copy_(x); }, only(block_of(src)), only(p), true);
  if (p) pinned().record_event(nullptr, p, c10::Stream(c10::Stream::UNSAFE, src.device(), t_stream[d]));
  if (!non_blocking || !p) { count_sync("copy to the host"); synchronize(s); check_errors(); }
  return dst;
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  at::native::resize_(dst, src.sizes(), std::nullopt);
  return copy_from(src, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& t) {
  int d = t.device().index(), s = d * kPer + t_stream[d];
  count_sync("item");
  Tensor x = raw_cpu(t), y = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  enqueue(s, "item", [x, y]() mutable { y.copy_(x); }, only(block_of(t)), {});
  synchronize(s);
  check_errors();
  return at::native::_local_scalar_dense_cpu(y);
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> o;
  if (offset) o = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), o);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  auto steps = C10_AS_INTARRAYREF_SLOW(stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  if (stride.data() == nullptr || stride.size() != size.size()) impl->set_sizes_contiguous(shape);
  else impl->set_sizes_and_strides(shape, steps);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({n});
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(other.storage());
  impl->set_storage_offset(other.storage_offset());
  impl->set_sizes_and_strides(other.sizes(), other.strides());
  return self;
}
void record_stream(Tensor& self, c10::Stream s) { allocator().recordStream(self.storage().data_ptr(), s); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(input) : input * mask * (1.0 / (1.0 - p)), mask};
}

// `tensor.data = ` from the CPU to the device and back, as CUDA allows it.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace sim

PYBIND11_MODULE(_accelerator, m) {
  using namespace sim;
  c10::SetAllocator(kDev, &allocator());
  static at::HostAllocatorRegistry<at::kPrivateUse1> host_allocator(&pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", &device_count);
  m.def("set_delay", [](int64_t lo, int64_t hi, double probability, uint64_t seed, int64_t copy_lo, int64_t copy_hi) {
    auto& c = config();
    c.lo = lo; c.hi = hi; c.probability = probability; c.seed = seed; c.copy_lo = copy_lo; c.copy_hi = copy_hi;
  }, py::arg("lo"), py::arg("hi"), py::arg("probability") = 1.0, py::arg("seed") = 0, py::arg("copy_lo") = -1, py::arg("copy_hi") = -1);
  m.def("set_flags", [](bool poison, bool races, bool raise_races, bool raise_syncs, bool trace) {
    auto& c = config();
    c.poison = poison; c.races = races; c.raise_races = raise_races; c.raise_syncs = raise_syncs; c.trace = trace;
  }, py::arg("poison") = true, py::arg("races") = true, py::arg("raise_races") = false, py::arg("raise_syncs") = false, py::arg("trace") = false);
  m.def("counts", [] { std::lock_guard<std::mutex> g(books().m); return books().counts; });
  m.def("races", [] { std::lock_guard<std::mutex> g(books().m); return books().races; });
  m.def("error", [] { std::lock_guard<std::mutex> g(books().m); return books().error; });
  m.def("reset", [] {
    for (int i = 0; i < kStreams; ++i) synchronize(i);
    std::lock_guard<std::mutex> g(books().m);
    books().counts.clear(); books().races.clear(); books().error.clear(); books().has_error = false; books().spans.clear();
  });
  m.def("settle", [] { for (int i = 0; i < kStreams; ++i) synchronize(i); });
  m.def("spans", [] {
    std::lock_guard<std::mutex> g(books().m);
    std::vector<std::tuple<int, int, std::string, int64_t, int64_t>> out;
    for (auto& s : books().spans) out.emplace_back(s.stream / kPer, s.stream % kPer, s.name, s.start, s.end);
    return out;
  });
  m.def("default_generator", [](int i) { return default_generator(static_cast<DeviceIndex>(i)); });
  m.def("sleep", [](int64_t us) {  // a kernel on the current stream that takes as long
    int d = t_device;
    enqueue(d * kPer + t_stream[d], "sleep", [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); }, {}, {});
  });
}
