// Streams: queues of jobs, each with a worker thread, and the events between them.
#pragma once

#include "clocks.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/python_headers.h>

#include <dlfcn.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <thread>

namespace simulated {

struct Moment;

struct Block {  // of memory; a cache keeps all there ever were
  void* data = nullptr;
  size_t size = 0;  // rounded up
  size_t asked = 0;
  int stream = 0;  // that it was allocated on; kPinned: memory of the host
  bool is_live = false;
  uint64_t number = 0;                         // of this life of it
  std::set<int> used_on;                       // other streams that record_stream has named
  std::vector<std::shared_ptr<Moment>> waits;  // freed, but those have to come so far first
  History history;                             // under the order mutex
};
constexpr int kPinned = -1;

struct Use {
  Block* block;
  Region region;
};
using Uses = std::vector<Use>;

struct Moment {  // what an event has recorded
  int stream;
  Clock clock;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_over = false;
  int64_t at = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

struct Job {
  std::string name;
  std::function<void()> run;
  int64_t delay_us = 0;
  bool is_kernel = false;  // and not one of our own: an event, a wait, memory that is freed
};

struct Queue {
  std::mutex mutex;
  std::condition_variable has_job, has_done;
  std::deque<Job> jobs;
  uint64_t submitted = 0, completed = 0;
  bool is_started = false;
  // Under the order mutex:
  Clock clock;
  uint64_t delays = 0;  // drawn since the seed was set
};

// One mutex orders all queuing: a clock and the place in its queue have to agree.
struct OrderMutex : std::mutex {};
inline std::mutex& order() { return forever<OrderMutex>(); }
// What the host is known to come after. There is one clock for all threads of the host: how they
// synchronize with each other cannot be seen from here.
struct HostClock : Clock {};
inline Clock& host_clock() { return forever<HostClock>(); }
struct Queues {
  std::array<Queue, kStreams> all;
};
inline Queue& queue(int stream) { return forever<Queues>().all[stream]; }

inline int device_of(int stream) { return stream / kStreamsPerDevice; }
inline int number_of(const c10::Stream& stream) {
  return stream.device_index() * kStreamsPerDevice + static_cast<int>(stream.id());
}
inline std::string name_of(int stream) {
  return "simulated:" + std::to_string(device_of(stream)) + "/stream" +
         std::to_string(stream % kStreamsPerDevice);
}

struct WithoutGil {  // while the host waits; a job's meta kernel or a hook may need it
  PyThreadState* state = nullptr;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}  // the host has been warned by the meta kernel
};

// A device's kernels run on one core each: sums in the same order whatever the host's number of
// threads is, and no pools that fight for it. `at::set_num_threads` would set it for all threads.
inline void use_one_core() {
  at::get_num_threads();  // first: the first parallel region would set the process's number
  if (auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads")))
    set(1);
}

inline void work(int stream) {
  Queue& q = queue(stream);
  c10::WarningUtils::set_warning_handler(&forever<NoWarnings>());
  use_one_core();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(q.mutex);
      q.has_job.wait(lock, [&] { return !q.jobs.empty(); });
      job = std::move(q.jobs.front());
      q.jobs.pop_front();
    }
    const int64_t start = now_ns();
    if (job.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(job.delay_us));
    try {
      job.run();
    } catch (const std::exception& e) {
      const std::string text = e.what();
      findings().error(job.name + " on " + name_of(stream) + ": " +
                       text.substr(0, text.find("\nException raised")));
    }
    if (job.is_kernel && settings().trace)
      findings().span({stream, job.name, job.delay_us, start, now_ns()});
    job.run = nullptr;  // what it holds goes before anybody is told that it is done
    {
      std::lock_guard<std::mutex> lock(q.mutex);
      ++q.completed;
    }
    q.has_done.notify_all();
  }
}

// The order mutex is held. The k-th delay of a stream depends on the seed, the stream and k alone.
inline int64_t next_delay(int stream, bool is_copy) {
  const auto& s = settings();
  const int64_t lo = is_copy && s.copy_lo >= 0 ? s.copy_lo : s.lo;
  const int64_t hi = is_copy && s.copy_hi >= 0 ? s.copy_hi : s.hi;
  const uint64_t drawn = mixed(mixed(mixed(s.seed) + stream) + ++queue(stream).delays);
  if (hi <= 0 || (drawn >> 40) / double(1 << 24) >= s.probability) return 0;
  return lo + static_cast<int64_t>(mixed(drawn) %
                                   static_cast<uint64_t>(std::max<int64_t>(hi - lo, 0) + 1));
}

// The order mutex is held.
inline void submit(int stream, Job job) {
  Queue& q = queue(stream);
  std::lock_guard<std::mutex> lock(q.mutex);
  if (!q.is_started) {
    q.is_started = true;
    std::thread(work, stream).detach();
  }
  q.jobs.push_back(std::move(job));
  ++q.submitted;
  q.has_job.notify_one();
}

// The order mutex is held. Takes the next place on a stream, after all that the host has waited
// for.
inline uint64_t next_place(int stream) {
  Queue& q = queue(stream);
  q.clock.join(host_clock());
  return ++q.clock.of[stream];
}

inline std::string told(const Access& next, bool is_write, const Access& old, const Block& block) {
  std::string text;
  if (next.operation == "free") {
    text = "freed in use: '" + old.operation + "' on " + name_of(old.stream) +
           " uses memory that " + name_of(next.stream) +
           " has freed without waiting for it: record_stream is missing";
  } else {
    const bool was_read = block.history.has_read(&old);
    text = std::string(is_write ? "write" : "read") + " after " + (was_read ? "read" : "write") +
           ": '" + next.operation + "' on " + name_of(next.stream) + " is not ordered after '" +
           old.operation + "' on " + name_of(old.stream);
  }
  return text + " (bytes " + std::to_string(old.region.begin()) + " to " +
         std::to_string(old.region.end()) + " of block " + std::to_string(block.number) + ", " +
         std::to_string(block.asked) + " bytes " +
         (block.stream == kPinned ? "of pinned memory)"
                                  : "allocated on " + name_of(block.stream) + ")");
}

// The order mutex is held. Notes the accesses; says what the first unordered one of them is.
inline std::string noted(int stream, uint64_t place, const std::string& name, const Uses& reads,
                         const Uses& writes) {
  if (!settings().races) return "";
  std::string found;
  for (bool is_write : {false, true}) {
    for (const auto& [block, region] : is_write ? writes : reads) {
      const Access next{region, stream, place, name};
      const Access* old = block->history.unordered(next, is_write, queue(stream).clock);
      if (old && found.empty()) found = told(next, is_write, *old, *block);
    }
  }
  for (bool is_write : {false, true})
    for (const auto& [block, region] : is_write ? writes : reads)
      block->history.add({region, stream, place, name}, is_write, host_clock());
  if (!found.empty()) findings().race(found);
  return found;
}

// Queues a kernel or a copy.
inline void enqueue(int stream, std::string name, std::function<void()> run, const Uses& reads,
                    const Uses& writes, bool is_copy = false) {
  std::string race;
  {
    std::lock_guard<std::mutex> guard(order());
    race = noted(stream, next_place(stream), name, reads, writes);
    const int64_t delay = next_delay(stream, is_copy);
    submit(stream, {std::move(name), std::move(run), delay, true});
  }
  TORCH_CHECK(race.empty() || !settings().raise_races, "simulated: ", race);
}

inline void end(Moment& moment) {
  {
    std::lock_guard<std::mutex> lock(moment.mutex);
    moment.is_over = true;
    moment.at = now_ns();
  }
  moment.changed.notify_all();
}

inline MomentPtr record(int stream) {
  auto moment = std::make_shared<Moment>();
  moment->stream = stream;
  std::lock_guard<std::mutex> guard(order());
  next_place(stream);
  moment->clock = queue(stream).clock;
  submit(stream, {"event", [moment] { end(*moment); }});
  return moment;
}

inline void wait(Moment& moment) {
  std::unique_lock<std::mutex> lock(moment.mutex);
  moment.changed.wait(lock, [&] { return moment.is_over; });
}

inline void wait_on_stream(int stream, const MomentPtr& moment) {
  if (moment->stream == stream) return;
  std::lock_guard<std::mutex> guard(order());
  queue(stream).clock.join(moment->clock);
  next_place(stream);
  submit(stream, {"wait", [moment] { wait(*moment); }});
}

inline bool is_over(const MomentPtr& moment) {
  std::lock_guard<std::mutex> lock(moment->mutex);
  return moment->is_over;
}

inline void host_has_seen(const Clock& clock) {
  std::lock_guard<std::mutex> guard(order());
  host_clock().join(clock);
}

inline void wait_on_host(const MomentPtr& moment) {
  {
    WithoutGil no_gil;
    wait(*moment);
  }
  host_has_seen(moment->clock);
}

inline void synchronize(int stream) {
  Queue& q = queue(stream);
  Clock clock;
  {
    WithoutGil no_gil;  // before any mutex: who holds one must not wait for the interpreter
    uint64_t until;
    {
      std::lock_guard<std::mutex> guard(order());
      clock = q.clock;
      std::lock_guard<std::mutex> lock(q.mutex);
      until = q.submitted;
    }
    std::unique_lock<std::mutex> lock(q.mutex);
    q.has_done.wait(lock, [&] { return q.completed >= until; });
  }
  host_has_seen(clock);
}

inline void synchronize_device(int device) {
  for (int i = 0; i < kStreamsPerDevice; ++i) synchronize(device * kStreamsPerDevice + i);
}
inline void synchronize_all() {
  for (int device = 0; device < device_count(); ++device) synchronize_device(device);
}

}  // namespace simulated
