// Operations: any that has no kernel of its own here is queued, and run later by the CPU's kernel.
//
// The host needs the shape of a result at once: the meta kernel gives it. Operations whose shapes
// depend on values (nonzero) wait for the stream, as on a real device. So do those without a meta
// kernel, though a real device would not; they are counted as "simulator waits".
#pragma once

#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <unordered_map>
#include <unordered_set>

namespace simulated {

using Names = std::unordered_set<std::string>;

inline const Names kWaits = {
    "aten::nonzero",    "aten::masked_select",      "aten::_unique2",          "aten::_unique",
    "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
inline const Names kIndexes = {"aten::index", "aten::_unsafe_index", "aten::index_put",
                               "aten::index_put_", "aten::_index_put_impl_"};
// Written, though their schemas do not say so.
inline const Names kWritesStatistics = {"aten::native_batch_norm",
                                        "aten::batch_norm_gather_stats_with_counts"};

// What matters here of an operator's schema.
struct Signature {
  std::string name, overload;
  std::vector<bool> is_written, is_generator;  // of each argument
  std::vector<int> source;  // of each result: the argument that it is, or -1 for a new one
  bool has_new = false;     // results
  bool is_out = false;      // results go into arguments, which get the results' sizes
  bool waits = false;
  bool indexes = false;

  explicit Signature(const c10::FunctionSchema& schema)
      : name(schema.name()), overload(schema.overload_name()) {
    for (const auto& argument : schema.arguments()) {
      const auto* alias = argument.alias_info();
      const bool is_statistics =
          kWritesStatistics.count(name) && argument.name().rfind("running", 0) == 0;
      is_written.push_back((alias && alias->isWrite()) || is_statistics);
      is_generator.push_back(argument.type()->str().find("Generator") != std::string::npos);
    }
    bool has_values = false;  // that are no tensors: the host wants them now
    for (const auto& result : schema.returns()) {
      source.push_back(source_of(schema, result));
      if (source.back() >= 0) continue;
      has_new = true;
      has_values |= !result.type()->isSubtypeOf(*c10::TensorType::get()) &&
                    !result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    }
    is_out = overload.find("out") != std::string::npos && !source.empty() && source[0] >= 0;
    waits = has_values || kWaits.count(name);
    indexes = kIndexes.count(name);
  }

  std::string label() const { return overload.empty() ? name : name + "." + overload; }

 private:
  int source_of(const c10::FunctionSchema& schema, const c10::Argument& result) const {
    const auto* alias = result.alias_info();
    if (!alias) return -1;
    TORCH_CHECK(alias->isWrite(), "simulated: the view operation ", label(), " is not implemented");
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && other->isWrite() && other->beforeSets() == alias->beforeSets())
        return static_cast<int>(i);
    }
    TORCH_CHECK(false, "simulated: it is not clear which argument ", label(), " returns");
  }
};

inline const Signature& signature_of(const c10::OperatorHandle& op) {
  struct Known {
    std::mutex mutex;
    std::unordered_map<c10::OperatorName, std::unique_ptr<Signature>> all;
  };
  auto& known = forever<Known>();
  std::lock_guard<std::mutex> guard(known.mutex);
  auto& signature = known.all[op.operator_name()];
  if (!signature) signature = std::make_unique<Signature>(op.schema());
  return *signature;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        signature_(signature_of(op)),
        stack_(stack),
        count_(signature_.is_written.size()),
        base_(stack.size() - count_) {}

  void run() {
    findings().check();
    find_device();
    const c10::DeviceGuard guard(c10::Device(kType, device_));
    stream_ = current_stream();
    draw();
    const bool waits = signature_.waits;
    if (waits || waits_for_indices()) count_sync(signature_.name);
    torch::jit::Stack shapes;
    const bool is_known = !waits && (!needs_shapes() || find_shapes(shapes));
    auto results = is_known ? queued(shapes) : awaited();
    stack_.erase(stack_.begin() + static_cast<ptrdiff_t>(base_), stack_.end());
    for (auto& result : results) stack_.push_back(std::move(result));
  }

 private:
  IValue& argument(size_t i) { return stack_[base_ + i]; }

  // The one device of all arguments. CPU tensors are numbers, or indices, which are copied.
  void find_device() {
    std::optional<c10::Device> device;
    for (size_t i = 0; i < count_; ++i) {
      each_tensor(argument(i), [&](const Tensor& t) {
        if (t.device().type() != kType) return;
        if (device && *device != t.device()) refuse(*device, t.device());
        device = t.device();
        add_use(signature_.is_written[i] ? writes_ : reads_, t);
      });
    }
    for (size_t i = 0; i < count_; ++i) {
      if (argument(i).isDevice() && !device) device = argument(i).toDevice();
      each_tensor(argument(i), [&](const Tensor& t) {
        const bool is_taken = t.is_cpu() && (t.dim() == 0 || t.numel() == 0 || signature_.indexes);
        if (t.device().type() != kType && !is_taken)
          refuse(device.value_or(c10::Device(kType)), t.device());
      });
    }
    device_ = device && device->has_index() ? device->index() : current_device;
  }
  [[noreturn]] void refuse(c10::Device one, c10::Device other) const {
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                one, " and ", other, "! (", signature_.label(), ")");
  }

  void draw() {
    for (size_t i = 0; i < count_; ++i) {
      if (!signature_.is_generator[i]) continue;
      at::Generator generator = argument(i).isNone() ? at::Generator() : argument(i).toGenerator();
      if (!generator.defined()) generator = default_generator(device_);
      TORCH_CHECK(generator.device().type() == kType,
                  "Expected a 'simulated' device type for generator but found '",
                  generator.device().type(), "'");
      seed_ = generator.get<Generator>()->next();
    }
  }

  // To write where a mask is set a device counts it first, and indices of the host are brought to
  // it. `index` has operations of its own for that, which are seen.
  bool waits_for_indices() {
    if (signature_.name != "aten::_index_put_impl_") return false;
    const bool is_fill = argument(2).toTensor().numel() == 1 && !argument(3).toBool();
    bool found = false;
    each_tensor(argument(1), [&](const Tensor& t) {
      const bool is_mask = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
      found |= (is_mask && !is_fill) || (t.is_cpu() && t.dim() > 0);
    });
    return found;
  }

  bool needs_shapes() {
    if (signature_.has_new) return true;
    if (!signature_.is_out) return false;
    auto is_empty = [&](int i) {
      return i >= 0 && argument(i).isTensor() && argument(i).toTensor().numel() == 0;
    };
    return std::any_of(signature_.source.begin(), signature_.source.end(), is_empty);
  }

  bool find_shapes(torch::jit::Stack& shapes) {
    Below below;
    for (size_t i = 0; i < count_; ++i) {
      if (argument(i).isDevice())
        shapes.emplace_back(c10::Device(at::kMeta));
      else if (signature_.is_generator[i])
        shapes.emplace_back();
      else
        shapes.push_back(mapped(argument(i), as_meta));
    }
    try {
      op_.callBoxed(&shapes);
      return true;
    } catch (const std::exception& e) {
      // Wrong arguments are the caller's error, and are raised here; a kernel may be missing too.
      const std::string text = e.what();
      const bool is_missing = dynamic_cast<const c10::NotImplementedError*>(&e) ||
                              text.find("meta") != std::string::npos ||
                              text.find("Meta") != std::string::npos;
      if (!is_missing) throw;
      findings().count("simulator waits: no meta kernel for " + signature_.name);
      TORCH_CHECK(!signature_.is_out, "simulated: ", signature_.label(),
                  " has no meta kernel for an empty out=");
      return false;
    }
  }

  std::shared_ptr<torch::jit::Stack> arguments_for_cpu() {
    auto cpu = std::make_shared<torch::jit::Stack>();
    for (size_t i = 0; i < count_; ++i) {
      if (argument(i).isDevice())
        cpu->emplace_back(c10::Device(at::kCPU));
      else if (signature_.is_generator[i])
        cpu->emplace_back(at::detail::createCPUGenerator(*seed_));
      else
        cpu->push_back(mapped(
            argument(i), [](const Tensor& t) { return t.is_cpu() ? host_copy(t) : as_cpu(t); }));
    }
    return cpu;
  }

  // The host waits for the operation, makes tensors for what it gave, and has that copied there.
  std::vector<IValue> awaited() {
    auto cpu = arguments_for_cpu();
    auto failure = std::make_shared<std::exception_ptr>();
    enqueue(
        stream_, signature_.label(),
        [op = op_, cpu, failure] {
          try {
            op.callBoxed(cpu.get());
          } catch (...) {
            *failure = std::current_exception();  // the host is waiting: it raises it itself
          }
        },
        reads_, writes_);
    synchronize(stream_);
    if (*failure) std::rethrow_exception(*failure);
    findings().check();
    std::vector<IValue> results;
    for (size_t r = 0; r < signature_.source.size(); ++r) {
      const int from = signature_.source[r];
      results.push_back(from >= 0 ? argument(from) : mapped((*cpu)[r], [&](const Tensor& t) {
        Tensor out = made_like(t, device_);
        enqueue(
            stream_, signature_.label(), [to = as_cpu(out), t] { to.copy_(t); }, {}, use_of(out));
        return out;
      }));
    }
    return results;
  }

  // What a result is copied to on the stream.
  struct Target {
    size_t result;
    std::vector<Tensor> to;
  };

  std::vector<IValue> queued(const torch::jit::Stack& shapes) {
    std::vector<Target> targets;
    std::vector<IValue> results;
    for (size_t r = 0; r < signature_.source.size(); ++r) {
      const int from = signature_.source[r];
      if (from >= 0) {
        if (signature_.is_out && !shapes.empty()) resize_out(argument(from), shapes[r]);
        results.push_back(argument(from));
        continue;
      }
      Target target{r, {}};
      results.push_back(mapped(shapes[r], [&](const Tensor& t) {
        Tensor out = made_like(t, device_);
        target.to.push_back(as_cpu(out));
        add_use(writes_, out);
        return out;
      }));
      targets.push_back(std::move(target));
    }
    auto cpu = arguments_for_cpu();
    if (signature_.is_out) {
      // Into new memory first: a structured operation that reduces (mse_loss.out) is not made for
      // an output that has its final size already.
      for (size_t r = 0; r < signature_.source.size(); ++r) {
        const int from = signature_.source[r];
        if (from < 0 || !(*cpu)[from].isTensor()) continue;
        Tensor to = (*cpu)[from].toTensor();
        (*cpu)[from] = at::detail::empty_cpu({0}, to.scalar_type());
        targets.push_back({r, {to}});
      }
    }
    enqueue(
        stream_, signature_.label(),
        [op = op_, cpu, targets, name = signature_.label()] {
          op.callBoxed(cpu.get());
          for (const auto& target : targets) store(name, (*cpu)[target.result], target.to);
        },
        reads_, writes_);
    return results;
  }

  void resize_out(const IValue& argument, const IValue& shape) {
    if (!argument.isTensor() || !shape.isTensor()) return;
    const Tensor& t = argument.toTensor();
    if (t.sizes() == shape.toTensor().sizes()) return;
    resize_tensor(t, shape.toTensor().sizes());
    add_use(writes_, t);
  }

  static void store(const std::string& name, const IValue& result, const std::vector<Tensor>& to) {
    size_t k = 0;
    each_tensor(result, [&](const Tensor& t) {
      TORCH_CHECK(k < to.size(), "simulated: ", name,
                  " gives more tensors than its meta kernel says");
      // A tensor that is not wanted (a gradient's mask) is empty here or there.
      const bool is_wanted = t.numel() && to[k].numel();
      TORCH_CHECK(!is_wanted || t.sizes() == to[k].sizes(), "simulated: ", name, " gives sizes ",
                  t.sizes(), ", its meta kernel says ", to[k].sizes());
      if (is_wanted) to[k].copy_(t);
      ++k;
    });
  }

  const c10::OperatorHandle& op_;
  const Signature& signature_;
  torch::jit::Stack& stack_;
  const size_t count_, base_;
  c10::DeviceIndex device_ = 0;
  int stream_ = 0;
  std::optional<uint64_t> seed_;
  Uses reads_, writes_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

// torch asks a backend of its own for convolutions under names of their own.
inline void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Call(op, *stack).run();
}
inline void convolution_backward(const c10::OperatorHandle& own, torch::jit::Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const size_t base = stack->size() - own.schema().arguments().size();
  const int64_t channels = (*stack)[base].toTensor().size(1);
  // It has the bias's sizes too, behind grad, input and weight.
  stack->insert(stack->begin() + static_cast<ptrdiff_t>(base) + 3,
                IValue(std::vector<int64_t>{channels}));
  Call(op, *stack).run();
}

inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                                 std::optional<bool> train) {
  const auto bools = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, bools)};
  Tensor mask = at::empty_like(input, bools);
  mask.bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(input) : input * mask * (1.0 / (1.0 - p)), mask};
}

}  // namespace simulated
