// Random numbers: a seed and an offset for each device, as CUDA has it. What an operation draws
// depends on where the generator is when it is queued, and not on when it runs.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>

namespace simulated {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kType, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kType; }

  // The seed for the next operation.
  uint64_t next() {
    std::lock_guard<std::mutex> guard(mutex_);
    const uint64_t seed = mixed(mixed(seed_) + offset_);
    offset_ += kStep;
    return seed;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == kStateBytes,
                "RNG state must be a tensor of ", kStateBytes, " bytes on the CPU");
    const auto* part = static_cast<const uint64_t*>(state.data());
    seed_ = part[0];
    offset_ = part[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, c10::kByte);
    auto* part = static_cast<uint64_t*>(state.data_ptr());
    part[0] = seed_;
    part[1] = offset_;
    return state.getIntrusivePtr();
  }

 private:
  static constexpr int64_t kStateBytes = 16;
  static constexpr uint64_t kStep = 4;  // Philox's: CUDA refuses other offsets

  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Generators {
  std::vector<at::Generator> all;
  Generators() {
    for (int i = 0; i < kMostDevices; ++i)
      all.push_back(at::make_generator<Generator>(c10::DeviceIndex(i)));
  }
};
inline at::Generator& default_generator(c10::DeviceIndex device) {
  return forever<Generators>().all[device < 0 ? current_device : device];
}

}  // namespace simulated
