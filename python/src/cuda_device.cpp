// Workspaces and layers on GPUs. Calls queue kernels on the caller's stream; what they are given stays with the caller until these
// have run.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <numeric>
#include <vector>

#include "arrays.hpp"
#include "exchange/cuda_exchange.hpp"
#include "group.hpp"
#include "heddle/device_layer.hpp"
#include "layers.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

constexpr std::size_t row_alignment = 16;

/// A device workspace with the group it was made over, if there is one.
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
  }
  DeviceWorkspace& workspace() const { return *workspace_; }
  const ExchangeMemory& memory() const { return needs_.memory; }
  /// Held while the group is used, where there is one.
  std::unique_ptr<RankGroup::Turn> turn(const char* what) const {
    return group_ ? std::make_unique<RankGroup::Turn>(*group_, what) : nullptr;
  }
  std::size_t gpu(std::size_t number) const {
    if (number >= workspace_->gpus())
      throw InputError(fmt::format("no GPU number {}: this process has {}", number, workspace_->gpus()));
    return number;
  }

 private:
  std::shared_ptr<RankGroup> group_;
  LayerNeeds needs_;
  std::unique_ptr<DeviceWorkspace> workspace_;
};

std::shared_ptr<DeviceContext> make_context(std::shared_ptr<RankGroup> group, int ranks, std::vector<int> devices, double deadline,
                                            const nb::list& layers) {
  const DeviceGroupOptions mine{ranks, std::move(devices), deadline_of(deadline)};
  LayerNeeds needs = needs_of(layers);
  const auto turn = group ? std::make_unique<RankGroup::Turn>(*group, "a new device workspace") : nullptr;
  const nb::gil_scoped_release others_run;
  return std::make_shared<DeviceContext>(group, mine, std::move(needs));
}

void reset(DeviceContext& self, const std::optional<std::vector<bool>>& live) {
  const auto turn = self.turn("reset");
  const nb::gil_scoped_release others_run;
  live ? self.workspace().reset(*live) : self.workspace().reset();
}

class RankDeviceLayer {
 public:
  RankDeviceLayer(std::shared_ptr<DeviceContext> context, std::size_t gpu, const std::vector<LayerWeights>& weights,
                  const LayerOptions& options, const DeviceLayerOptions& device)
      : context_(std::move(context)),
        gpu_(context_->gpu(gpu)),
        shape_(weights.front().shape),
        layer_(context_->workspace(), gpu_, context_->memory(), weights, options, device) {
    make_counts(options.tensor_parallel ? options.cap * context_->workspace().ranks() : options.cap);
  }

  void begin(const nb::list& inputs, nb::handle step, std::uintptr_t stream);
  void end(const nb::list& outputs, std::uintptr_t stream);
  void forward(const nb::list& inputs, const nb::list& outputs, nb::handle step, std::uintptr_t stream);
  void throw_if_failed() { layer_.throw_if_failed(); }
  std::string explain(nb::handle step) const { return layer_.explain(step_of(step)).text(); }
  const DeviceLayer& layer() const { return layer_; }

 private:
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
  Inputs inputs_of(const nb::list& given) const;
  std::vector<bf16*> outputs_of(const nb::list& given, const std::vector<std::int64_t>& rows) const;
  DeviceInput input_of(const Lent& states, nb::handle ids, nb::handle weights, nb::handle tokens) const;

  /// The numbers 0 to `most` on the GPU: a call of n tokens points at n, so that nothing is copied and a graph can be captured.
  void make_counts(int most) {
    most_tokens_ = most;
    std::vector<int> numbers(static_cast<std::size_t>(most) + 1);
    std::iota(numbers.begin(), numbers.end(), 0);
    counts_ = DeviceArray<int>(device(), numbers.size());
    const cuda::DeviceScope scope(device());
    cuda::check(cudaMemcpy(counts_.data(), numbers.data(), numbers.size() * sizeof(int), cudaMemcpyHostToDevice), "token counts");
    cuda::check(cudaDeviceSynchronize(), "token counts");
  }

  std::shared_ptr<DeviceContext> context_;
  std::size_t gpu_;
  LayerShape shape_;
  DeviceLayer layer_;
  int most_tokens_ = 0;
  DeviceArray<int> counts_;
  std::vector<std::int64_t> begun_;  ///< rows of each rank's hidden in the call that was begun
};

DeviceInput RankDeviceLayer::input_of(const Lent& states, nb::handle ids, nb::handle weights, nb::handle tokens) const {
  const int here = device();
  const std::int64_t rows = states.size(0);
  const Lent choices(ids, {"ids", Element::int32, {rows, shape_.topk}, Access::read, here});
  const Lent factors(weights, {"weights", Element::float32, {rows, shape_.topk}, Access::read, here});
  const int* count = nullptr;
  if (!tokens.is_none()) {
    count = Lent(tokens, {"tokens", Element::int32, {1}, Access::read, here}).data<const int>();
  } else if (rows <= most_tokens_) {
    count = counts_.data() + rows;
  } else {
    throw InputError(
        fmt::format("hidden has {} tokens, a call takes at most {} (the cap), or with overflow=split any number that tokens= gives",
                    rows, most_tokens_));
  }
  return {count, states.data<const bf16>(), choices.data<const std::int32_t>(), factors.data<const float>(), {}};
}

RankDeviceLayer::Inputs RankDeviceLayer::inputs_of(const nb::list& given) const {
  check_ranks(given, "inputs");
  Inputs inputs;
  for (const nb::handle rank : given) {
    const auto of = [&](int index) { return nb::object(rank.attr("__getitem__")(index)); };
    const Lent states(of(0), {"hidden", Element::bf16, {"tokens", shape_.hidden}, Access::read, device(), row_alignment});
    inputs.of_ranks.push_back(input_of(states, of(1), of(2), of(3)));
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
  Inputs inputs = inputs_of(given);
  const Step all = step_of(step);
  begun_ = std::move(inputs.rows);
  const nb::gil_scoped_release others_run;
  layer_.begin(inputs.of_ranks, all, stream_of(stream));
}

void RankDeviceLayer::end(const nb::list& given, std::uintptr_t stream) {
  if (begun_.size() != ranks()) throw InputError("end without begin");
  const std::vector<bf16*> outputs = outputs_of(given, begun_);
  begun_.clear();
  const nb::gil_scoped_release others_run;
  layer_.end(outputs, stream_of(stream));
}

/// All arrays are looked at before anything is launched.
void RankDeviceLayer::forward(const nb::list& given, const nb::list& out, nb::handle step, std::uintptr_t stream) {
  const Inputs inputs = inputs_of(given);
  const std::vector<bf16*> outputs = outputs_of(out, inputs.rows);
  const Step all = step_of(step);
  const nb::gil_scoped_release others_run;
  layer_.forward(inputs.of_ranks, all, outputs, stream_of(stream));
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
  const nb::gil_scoped_release others_run;
  return std::make_shared<RankDeviceLayer>(context, gpu, of_ranks, options, device);
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
          "set_deadline", [](DeviceContext& self, double seconds) { self.workspace().set_deadline(deadline_of(seconds)); },
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
