// Workspaces and layers on GPUs. Calls queue kernels on the caller's stream; what they are given stays with the caller until these
// have run.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "arrays.hpp"
#include "exchange/cuda_exchange.hpp"
#include "group.hpp"
#include "group/cuda_workspace.hpp"
#include "heddle/device_layer.hpp"
#include "layers.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

/// A device workspace with the group it was made over, if there is one. A thread at a time uses a GPU; several GPUs of a process
/// may have threads of their own.
class DeviceContext {
 public:
  DeviceContext(std::shared_ptr<RankGroup> group, const DeviceGroupOptions& mine, LayerNeeds needs)
      : group_(std::move(group)), needs_(std::move(needs)) {
    const std::size_t bytes = needs_.memory.heap_bytes(needs_.ranks);
    workspace_ = group_ ? std::make_unique<DeviceWorkspace>(group_->group(), mine, bytes, needs_.configuration)
                        : std::make_unique<DeviceWorkspace>(mine, bytes);
    if (workspace_->ranks() != needs_.ranks) {
      throw InputError(fmt::format("the layers are placed on {} ranks, the processes bring {}", needs_.ranks, workspace_->ranks()));
    }
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) places_.emplace_back("GPU", fmt::format("GPU {}", gpu));
  }
  DeviceWorkspace& workspace() const { return *workspace_; }
  const ExchangeMemory& memory() const { return needs_.memory; }
  Place& place(std::size_t gpu) { return places_[gpu]; }
  /// The group, where there is one, and all GPUs, for as long as they are held.
  struct Turns {
    std::unique_ptr<RankGroup::Turn> of_group;
    std::deque<Turn> of_gpus;
  };
  Turns all_turns(const char* what) {
    Turns turns;
    if (group_) turns.of_group = std::make_unique<RankGroup::Turn>(*group_, what);
    for (Place& place : places_) turns.of_gpus.emplace_back(place, what);
    return turns;
  }
  /// Held while a layer is made: layers of several GPUs write to what their workspace keeps of them.
  std::mutex& making() { return making_; }
  std::size_t gpu(std::size_t number) const {
    if (number >= workspace_->gpus())
      throw InputError(fmt::format("no GPU number {}: this process has {}", number, workspace_->gpus()));
    return number;
  }

 private:
  std::shared_ptr<RankGroup> group_;
  LayerNeeds needs_;
  std::unique_ptr<DeviceWorkspace> workspace_;
  std::deque<Place> places_;  ///< of GPUs
  std::mutex making_;
};

std::shared_ptr<DeviceContext> make_context(std::shared_ptr<RankGroup> group, int ranks, std::vector<int> devices, double deadline,
                                            const nb::list& layers) {
  const DeviceGroupOptions mine{ranks, std::move(devices), deadline_of(deadline)};
  LayerNeeds needs = needs_of(layers);
  const auto turn = group ? std::make_unique<RankGroup::Turn>(*group, "a new device workspace") : nullptr;
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<DeviceContext>(group, mine, std::move(needs));
}

void reset(DeviceContext& self, const std::optional<std::vector<bool>>& live) {
  const auto turns = self.all_turns("reset");
  const nb::gil_scoped_release others_run;
  live ? self.workspace().reset(*live) : self.workspace().reset();
}

/// Numbers on the GPU that calls point at, n for n tokens, so that nothing is copied and a graph can be captured. What was made
/// stays where it is, since graphs may read it.
class TokenCounts {
 public:
  TokenCounts(int device, int most) : device_(device) { make(most); }
  int most() const { return made_.back().most; }
  /// Null for more than `most`.
  const int* at(std::int64_t tokens) const {
    for (const Numbers& numbers : made_) {
      if (tokens <= numbers.most) return numbers.there.data() + tokens;
    }
    return nullptr;
  }
  /// The numbers 0 to `most`. Allocates and waits, so not in a capture.
  void make(int most) {
    std::vector<int> numbers(static_cast<std::size_t>(most) + 1);
    std::iota(numbers.begin(), numbers.end(), 0);
    DeviceArray<int> there(device_, numbers.size());
    const cuda::DeviceScope scope(device_);
    cuda::check(cudaMemcpy(there.data(), numbers.data(), numbers.size() * sizeof(int), cudaMemcpyHostToDevice), "token counts");
    cuda::check(cudaDeviceSynchronize(), "token counts");
    made_.push_back({std::move(there), most});
  }

 private:
  struct Numbers {
    DeviceArray<int> there;
    int most;
  };
  int device_;
  std::vector<Numbers> made_;
};

/// Is a graph being captured that work on this stream would belong to, or break? Changes nothing.
bool is_capturing(DeviceStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the default stream, while another one captures
  return true;
}

class RankDeviceLayer {
 public:
  RankDeviceLayer(std::shared_ptr<DeviceContext> context, std::size_t gpu, const std::vector<LayerWeights>& weights,
                  const LayerOptions& options, const DeviceLayerOptions& device)
      : context_(std::move(context)),
        gpu_(context_->gpu(gpu)),
        shape_(weights.front().shape),
        splits_(options.overflow == Overflow::split),
        layer_(context_->workspace(), gpu_, context_->memory(), weights, options, device),
        counts_(context_->workspace().device(gpu_),
                options.tensor_parallel ? options.cap * context_->workspace().ranks() : options.cap) {}

  void begin(const nb::list& inputs, nb::handle step, std::uintptr_t stream);
  void end(const nb::list& outputs, std::uintptr_t stream);
  void forward(const nb::list& inputs, const nb::list& outputs, nb::handle step, std::uintptr_t stream);
  /// For what is found wrong before a call comes here. The calls themselves do it, too: the others shall not wait for a rank whose
  /// input was refused.
  void refuse(std::uintptr_t stream);
  void throw_if_failed() {
    const nb::gil_scoped_release others_run;
    layer_.throw_if_failed();
  }
  std::string explain(nb::handle step) const { return layer_.explain(step_of(step)).text(); }
  const DeviceLayer& layer() const { return layer_; }

 private:
  template <class Work>
  void or_refuse(std::uintptr_t stream, Work&& work);
  void tell_refusal(std::uintptr_t stream) noexcept;
  static DeviceStream stream_of(std::uintptr_t stream) { return reinterpret_cast<DeviceStream>(stream); }
  std::size_t ranks() const { return static_cast<std::size_t>(context_->workspace().ranks_on(gpu_)); }
  int device() const { return context_->workspace().device(gpu_); }
  void check_ranks(const nb::list& given, const char* what) const {
    if (given.size() == ranks()) return;
    throw InputError(fmt::format("{} of {} ranks: {} live on this GPU", what, given.size(), ranks()));
  }
  struct Inputs {
    std::vector<DeviceInput> of_ranks;
    std::vector<std::int64_t> rows;  ///< of each rank's hidden
  };
  Inputs inputs_of(const nb::list& given, DeviceStream stream);
  std::vector<bf16*> outputs_of(const nb::list& given, const std::vector<std::int64_t>& rows) const;
  DeviceInput input_of(const Lent& states, nb::handle ids, nb::handle weights, const int* count) const;
  const int* count_of(std::int64_t rows, DeviceStream stream);

  std::shared_ptr<DeviceContext> context_;
  std::size_t gpu_;
  LayerShape shape_;
  bool splits_;
  DeviceLayer layer_;
  TokenCounts counts_;
  std::vector<std::int64_t> begun_;  ///< rows of each rank's hidden in the call that was begun
};

/// Where the number of a batch's rows lies.
const int* RankDeviceLayer::count_of(std::int64_t rows, DeviceStream stream) {
  if (const int* count = counts_.at(rows)) return count;
  if (!splits_) throw InputError(fmt::format("hidden has {} tokens, a call takes at most {} (the cap)", rows, counts_.most()));
  if (is_capturing(stream)) {
    throw InputError(fmt::format(
        "hidden has {} tokens, captured calls so far at most {}: call once with so many before the capture", rows, counts_.most()));
  }
  if (rows > 1 << 30) throw InputError(fmt::format("hidden has {} tokens, a call takes at most {}", rows, 1 << 30));
  counts_.make(static_cast<int>(std::bit_ceil(static_cast<std::uint32_t>(rows))));
  return counts_.at(rows);
}

DeviceInput RankDeviceLayer::input_of(const Lent& states, nb::handle ids, nb::handle weights, const int* count) const {
  const int here = device();
  const std::int64_t rows = states.size(0);
  const Lent choices(ids, {"ids", Element::int32, {rows, shape_.topk}, Access::read, here});
  const Lent factors(weights, {"weights", Element::float32, {rows, shape_.topk}, Access::read, here});
  return {count, states.data<const bf16>(), choices.data<const std::int32_t>(), factors.data<const float>(), {}};
}

RankDeviceLayer::Inputs RankDeviceLayer::inputs_of(const nb::list& given, DeviceStream stream) {
  check_ranks(given, "inputs");
  Inputs inputs;
  for (const nb::handle rank : given) {
    const auto of = [&](int index) { return nb::object(rank.attr("__getitem__")(index)); };
    const Lent states(of(0), {"hidden", Element::bf16, {"tokens", shape_.hidden}, Access::read, device(), row_alignment});
    const nb::object tokens = of(3);
    const int* const count = tokens.is_none()
                                 ? count_of(states.size(0), stream)
                                 : Lent(tokens, {"tokens", Element::int32, {1}, Access::read, device()}).data<const int>();
    inputs.of_ranks.push_back(input_of(states, of(1), of(2), count));
    inputs.rows.push_back(states.size(0));
  }
  return inputs;
}

std::vector<bf16*> RankDeviceLayer::outputs_of(const nb::list& given, const std::vector<std::int64_t>& rows) const {
  check_ranks(given, "outputs");
  std::vector<bf16*> outputs;
  for (std::size_t rank = 0; rank < ranks(); ++rank) {
    const Lent out(given[rank], {"out", Element::bf16, {rows[rank], shape_.hidden}, Access::write, device(), row_alignment});
    outputs.push_back(out.data<bf16>());
  }
  return outputs;
}

void RankDeviceLayer::begin(const nb::list& given, nb::handle step, std::uintptr_t stream) {
  const Turn turn(context_->place(gpu_), "begin");
  or_refuse(stream, [&] {
    Inputs inputs = inputs_of(given, stream_of(stream));
    const Step all = step_of(step);
    begun_ = std::move(inputs.rows);
    const nb::gil_scoped_release others_run;
    layer_.begin(inputs.of_ranks, all, stream_of(stream));
  });
}

void RankDeviceLayer::end(const nb::list& given, std::uintptr_t stream) {
  const Turn turn(context_->place(gpu_), "end");
  or_refuse(stream, [&] {
    if (begun_.size() != ranks()) throw InputError("end without begin");
    const std::vector<bf16*> outputs = outputs_of(given, begun_);
    begun_.clear();
    const nb::gil_scoped_release others_run;
    layer_.end(outputs, stream_of(stream));
  });
}

/// All arrays are looked at before anything is launched.
void RankDeviceLayer::forward(const nb::list& given, const nb::list& out, nb::handle step, std::uintptr_t stream) {
  const Turn turn(context_->place(gpu_), "forward");
  or_refuse(stream, [&] {
    const Inputs inputs = inputs_of(given, stream_of(stream));
    const std::vector<bf16*> outputs = outputs_of(out, inputs.rows);
    const Step all = step_of(step);
    const nb::gil_scoped_release others_run;
    layer_.forward(inputs.of_ranks, all, outputs, stream_of(stream));
  });
}

template <class Work>
void RankDeviceLayer::or_refuse(std::uintptr_t stream, Work&& work) {
  try {
    work();
  } catch (const FaultError&) {
    throw;
  } catch (...) {
    tell_refusal(stream);
    throw;
  }
}

/// As Workspace::refuse, by a small kernel on this rank's GPU. Nothing runs while a graph is captured, so nobody is told then.
void RankDeviceLayer::tell_refusal(std::uintptr_t stream) noexcept {
  const nb::gil_scoped_release others_run;
  try {
    const cuda::DeviceScope scope(device());
    if (is_capturing(stream_of(stream))) return;
    const int rank = context_->workspace().first_rank(gpu_);
    context_->workspace().impl().give_up(rank, {{WordKind::refused, -1, -1}, rank, 1, 0});
  } catch (const std::exception&) {
    // A GPU that does not even run this kernel: the others' deadlines tell them.
  }
}

void RankDeviceLayer::refuse(std::uintptr_t stream) {
  const Turn turn(context_->place(gpu_), "a call");
  tell_refusal(stream);
}

std::shared_ptr<RankDeviceLayer> make_layer(const std::shared_ptr<DeviceContext>& context, std::size_t gpu, const nb::list& weights,
                                            nb::handle given, int sms, bool timed) {
  std::vector<LayerWeights> of_ranks;
  for (const nb::handle rank : weights) of_ranks.push_back(nb::cast<const RankWeights&>(rank).weights);
  const auto ranks = static_cast<std::size_t>(context->workspace().ranks_on(context->gpu(gpu)));
  if (of_ranks.size() != ranks) throw InputError(fmt::format("weights of {} ranks: {} live on this GPU", of_ranks.size(), ranks));
  const LayerOptions options = options_of(given);
  DeviceLayerOptions device;
  device.exchange.sms = sms;
  device.timed = timed;
  const Turn turn(context->place(gpu), "a new layer");
  const nb::gil_scoped_release others_run;
  const std::lock_guard alone(context->making());
  return make_shared_unlocked<RankDeviceLayer>(context, gpu, of_ranks, options, device);
}

nb::object seconds_of(const RankDeviceLayer& self) {
  const DeviceLayerSeconds seconds = self.layer().seconds();
  return python_class("DeviceSeconds", "heddle.device")(seconds.dispatch, seconds.experts, seconds.shared, seconds.combine);
}

void bind_context(nb::module_& module) {
  nb::class_<DeviceContext>(module, "DeviceContext")
      .def(nb::new_(&make_context), "group"_a.none(), "ranks"_a, "devices"_a, "deadline"_a, "layers"_a)
      .def_prop_ro("ranks", [](const DeviceContext& self) { return self.workspace().ranks(); })
      .def_prop_ro("gpus", [](const DeviceContext& self) { return self.workspace().gpus(); })
      .def_prop_ro("bytes", [](const DeviceContext& self) { return self.workspace().bytes(); })
      .def_prop_ro("live", [](const DeviceContext& self) { return self.workspace().live(); })
      .def(
          "device", [](const DeviceContext& self, std::size_t gpu) { return self.workspace().device(self.gpu(gpu)); }, "gpu"_a)
      .def(
          "first_rank", [](const DeviceContext& self, std::size_t gpu) { return self.workspace().first_rank(self.gpu(gpu)); },
          "gpu"_a)
      .def(
          "ranks_on", [](const DeviceContext& self, std::size_t gpu) { return self.workspace().ranks_on(self.gpu(gpu)); }, "gpu"_a)
      .def("throw_if_aborted", [](const DeviceContext& self) { self.workspace().throw_if_aborted(); })
      .def(
          "set_deadline",
          [](DeviceContext& self, double seconds) {
            const auto deadline = deadline_of(seconds);
            const nb::gil_scoped_release others_run;  // a copy to the GPU may wait for its kernels
            self.workspace().set_deadline(deadline);
          },
          "seconds"_a)
      .def("reset", &reset, "live"_a.none());
}

}  // namespace

void bind_device(nb::module_& module) {
  bind_context(module);
  nb::class_<RankDeviceLayer>(module, "RankDeviceLayer")
      .def(nb::new_(&make_layer), "context"_a, "gpu"_a, "weights"_a, "options"_a, "sms"_a, "timed"_a)
      .def("begin", &RankDeviceLayer::begin, "inputs"_a, "step"_a, "stream"_a)
      .def("end", &RankDeviceLayer::end, "outputs"_a, "stream"_a)
      .def("forward", &RankDeviceLayer::forward, "inputs"_a, "outputs"_a, "step"_a, "stream"_a)
      .def("refuse", &RankDeviceLayer::refuse, "stream"_a)
      .def("throw_if_failed", &RankDeviceLayer::throw_if_failed)
      .def("explain", &RankDeviceLayer::explain, "step"_a)
      .def_prop_ro("seconds", &seconds_of)
      .def_prop_ro("weight_bytes", [](const RankDeviceLayer& self) { return self.layer().weight_bytes(); })
      .def_prop_ro("buffer_bytes", [](const RankDeviceLayer& self) { return self.layer().buffer_bytes(); });
  module.def("gpus_present", [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
  });
}

}  // namespace heddle::python
