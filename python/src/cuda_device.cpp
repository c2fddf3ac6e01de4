// Workspaces and layers on GPUs. Calls queue kernels on the caller's stream; what they are given stays with the caller until these
// have run.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda_calls.hpp"
#include "heddle/device_layer.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

std::shared_ptr<DeviceContext> context_of_layers(std::shared_ptr<RankGroup> group, int ranks, std::vector<int> devices,
                                                 double deadline, const nb::list& layers) {
  return make_context(std::move(group), {ranks, std::move(devices), deadline_of(deadline)}, needs_of(layers));
}

class RankDeviceLayer : public DeviceCalls {
 public:
  RankDeviceLayer(const std::shared_ptr<DeviceContext>& context, std::size_t gpu, const std::vector<LayerWeights>& weights,
                  const LayerOptions& options, const DeviceLayerOptions& device)
      : DeviceCalls(context, gpu, sizes_of(*context, weights.front().shape, options)),
        layer_(context->workspace(), gpu, context->memory(), weights, options, device) {}

  void begin(const nb::list& inputs, nb::handle step, std::uintptr_t stream);
  void end(const nb::list& outputs, std::uintptr_t stream);
  void forward(const nb::list& inputs, const nb::list& outputs, nb::handle step, std::uintptr_t stream);
  void throw_if_failed() {
    const nb::gil_scoped_release others_run;
    layer_.throw_if_failed();
  }
  std::string explain(nb::handle step) const { return layer_.explain(step_of(step)).text(); }
  const DeviceLayer& layer() const { return layer_; }

 private:
  static CallSizes sizes_of(const DeviceContext& context, const LayerShape& shape, const LayerOptions& options) {
    const int most = options.tensor_parallel ? options.cap * context.workspace().ranks() : options.cap;
    return {shape.hidden, shape.topk, most, options.overflow == Overflow::split, true};
  }

  DeviceLayer layer_;
  std::vector<std::int64_t> begun_;  ///< rows of each rank's hidden in the call that was begun
};

void RankDeviceLayer::begin(const nb::list& given, nb::handle step, std::uintptr_t stream) {
  const Turn turn(place(), "begin");
  or_refuse(stream, [&] {
    Inputs inputs = inputs_of(given, stream_of(stream));
    const Step all = step_of(step);
    begun_ = std::move(inputs.rows);
    const nb::gil_scoped_release others_run;
    layer_.begin(inputs.of_ranks, all, stream_of(stream));
  });
}

void RankDeviceLayer::end(const nb::list& given, std::uintptr_t stream) {
  const Turn turn(place(), "end");
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
  const Turn turn(place(), "forward");
  or_refuse(stream, [&] {
    const Inputs inputs = inputs_of(given, stream_of(stream));
    const std::vector<bf16*> outputs = outputs_of(out, inputs.rows);
    const Step all = step_of(step);
    const nb::gil_scoped_release others_run;
    layer_.forward(inputs.of_ranks, all, outputs, stream_of(stream));
  });
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
      .def(nb::new_(&context_of_layers), "group"_a.none(), "ranks"_a, "devices"_a, "deadline"_a, "layers"_a)
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
      .def("reset", &DeviceContext::reset, "live"_a.none());
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
