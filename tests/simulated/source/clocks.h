// Which accesses to memory are ordered: vector clocks, and the bytes that an access touches.
//
// Each stream counts what is queued on it. A clock says how far of every stream something is known
// to come after. Events and waits, and a host that waits, carry clocks from stream to stream; two
// accesses to the same bytes, one of them a write, must be ordered by them. This is decided when
// the later one is queued, so it does not depend on which of them happened to run first.
#pragma once

#include "settings.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace simulated {

struct Clock {
  std::vector<uint64_t> of = std::vector<uint64_t>(kStreams, 0);
  void join(const Clock& other) {
    for (int i = 0; i < kStreams; ++i) of[i] = std::max(of[i], other.of[i]);
  }
};

// The bytes of a block that a tensor touches. Slices of one tensor may lie between each other
// (columns), so the extent alone does not say whether two of them overlap.
class Region {
 public:
  Region(int64_t begin, int64_t end) : begin_(begin), end_(end), is_dense_(true) {}

  Region(int64_t begin, const at::Tensor& t) : begin_(begin), item_(t.element_size()) {
    int64_t last = 0, bytes = item_;
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (t.size(d) == 1 || t.stride(d) == 0) continue;  // the same elements again
      sizes_.push_back(t.size(d));
      strides_.push_back(t.stride(d) * item_);
      last += (t.size(d) - 1) * t.stride(d) * item_;
      bytes *= t.size(d);
    }
    end_ = begin_ + last + item_;
    is_dense_ = bytes == end_ - begin_;
    if (t.numel() == 0) end_ = begin_;
  }

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  bool overlaps(const Region& other) const {
    const int64_t lo = std::max(begin_, other.begin_), hi = std::min(end_, other.end_);
    if (lo >= hi) return false;
    if (is_dense_ && other.is_dense_) return true;
    std::vector<bool> mine(hi - lo);
    each_item([&](int64_t from, int64_t to) {
      for (int64_t i = std::max(from, lo); i < std::min(to, hi); ++i) mine[i - lo] = true;
    });
    bool found = false;
    other.each_item([&](int64_t from, int64_t to) {
      for (int64_t i = std::max(from, lo); i < std::min(to, hi) && !found; ++i)
        found = mine[i - lo];
    });
    return found;
  }

  bool covers(const Region& other) const {  // false also where it would be long to find out
    if (is_dense_) return begin_ <= other.begin_ && other.end_ <= end_;
    return begin_ == other.begin_ && end_ == other.end_ && sizes_ == other.sizes_ &&
           strides_ == other.strides_;
  }

 private:
  template <typename F>
  void each_item(F&& f) const {
    if (is_dense_) return f(begin_, end_);
    at_dim(0, begin_, f);
  }
  template <typename F>
  void at_dim(size_t dim, int64_t at, F& f) const {
    if (dim == sizes_.size()) return f(at, at + item_);
    for (int64_t i = 0; i < sizes_[dim]; ++i) at_dim(dim + 1, at + i * strides_[dim], f);
  }

  int64_t begin_, end_ = 0, item_ = 1;
  bool is_dense_ = false;
  c10::SmallVector<int64_t, 4> sizes_, strides_;  // in bytes
};

struct Access {
  Region region;
  int stream;
  uint64_t number;  // its place on the stream
  std::string operation;
};

// The accesses to one block that something later may have to be ordered with.
class History {
 public:
  // An earlier access to the same bytes, one of the two a write, that is not ordered before this.
  const Access* unordered(const Access& next, bool is_write, const Clock& clock) const {
    const auto* found = conflict(writes_, next, clock);
    return found || !is_write ? found : conflict(reads_, next, clock);
  }
  bool has_read(const Access* access) const {
    return std::any_of(reads_.begin(), reads_.end(), [&](auto& read) { return &read == access; });
  }

  // What a new access covers need not be kept: what comes after the new one comes after that too.
  void add(Access next, bool is_write, const Clock& host) {
    auto is_covered = [&](const Access& old) {
      return (is_write || old.stream == next.stream) && next.region.covers(old.region);
    };
    erase(reads_, is_covered);
    if (is_write) erase(writes_, is_covered);
    auto& list = is_write ? writes_ : reads_;
    list.push_back(std::move(next));
    if (list.size() % 64 == 0) forget(host);  // slices of a long-lived tensor
  }

  // What is known to be over no longer counts.
  void forget(const Clock& seen) {
    auto is_over = [&](const Access& old) { return seen.of[old.stream] >= old.number; };
    erase(reads_, is_over);
    erase(writes_, is_over);
  }

  const Access* unfinished(const Clock& host) const {
    for (const auto* list : {&writes_, &reads_})
      for (const auto& access : *list)
        if (host.of[access.stream] < access.number) return &access;
    return nullptr;
  }

 private:
  using List = std::vector<Access>;

  static const Access* conflict(const List& list, const Access& next, const Clock& clock) {
    for (const auto& old : list) {
      const bool is_ordered = old.stream == next.stream || clock.of[old.stream] >= old.number;
      if (!is_ordered && old.region.overlaps(next.region)) return &old;
    }
    return nullptr;
  }
  template <typename F>
  static void erase(List& list, F&& f) {
    list.erase(std::remove_if(list.begin(), list.end(), f), list.end());
  }

  List writes_, reads_;
};

}  // namespace simulated
