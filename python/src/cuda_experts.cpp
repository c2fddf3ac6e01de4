// Experts on a GPU without an exchange. Calls queue kernels on the caller's stream; what they are given stays with the caller until
// these have run.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>

#include "arrays.hpp"
#include "heddle/device_experts.hpp"
#include "lent_rows.hpp"
#include "options.hpp"
#include "rooms.hpp"
#include "sharing.hpp"
#include "source.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

class RankDeviceExperts {
 public:
  RankDeviceExperts(const LayerWeights& weights, const ExpertOptions& options, const DeviceExpertsOptions& device)
      : gpu_(device.device), experts_(weights.experts, weights.shape.hidden, intermediate_of(weights), options, device) {}

  void contiguous(nb::handle given, nb::handle scales, nb::handle begins, nb::handle counts, nb::handle row_weights, nb::handle out,
                  int expected_rows, std::uintptr_t stream) {
    const LentRows rows = lend(given, scales, {"rows", experts_.hidden()});
    const Lent first = lend_counts(begins, "begins"), count = lend_counts(counts, "counts");
    const auto weights = lend_weights(row_weights, {rows.size(0)});
    const Lent results = lend_results(out, {rows.size(0), experts_.hidden()});
    if (rows.size(0) == 0) return;
    const nb::gil_scoped_release others_run;
    experts_.contiguous(rows.view(), first.data<const int>(), count.data<const int>(), pointer(weights), {results.data<bf16>()},
                        stream_of(stream), expected_rows);
  }

  void masked(nb::handle given, nb::handle scales, nb::handle counts, nb::handle row_weights, nb::handle out, int expected_rows,
              std::uintptr_t stream) {
    const LentRows rows = lend(given, scales, {experts_.count(), "rows", experts_.hidden()});
    const std::int64_t block = rows.size(1);
    const Lent count = lend_counts(counts, "counts");
    const auto weights = lend_weights(row_weights, {experts_.count(), block});
    const Lent results = lend_results(out, {experts_.count(), block, experts_.hidden()});
    const nb::gil_scoped_release others_run;
    experts_.masked(rows.view(), static_cast<int>(block), count.data<const int>(), pointer(weights), {results.data<bf16>()},
                    stream_of(stream), expected_rows);
  }

  void routed(nb::handle given, nb::handle scales, nb::handle local_ids, nb::handle given_weights, nb::handle out,
              int expected_rows, std::uintptr_t stream) {
    const LentRows rows = lend(given, scales, {"tokens", experts_.hidden()});
    const Lent ids(local_ids, {"local_ids", Element::int32, {rows.size(0), "topk"}, Access::read, gpu_});
    const Lent weights(given_weights, {"weights", Element::float32, {rows.size(0), ids.size(1)}, Access::read, gpu_});
    const Lent results = lend_results(out, {rows.size(0), experts_.hidden()});
    const nb::gil_scoped_release others_run;
    experts_.routed(rows.view(), static_cast<int>(rows.size(0)), static_cast<int>(ids.size(1)), ids.data<const std::int32_t>(),
                    weights.data<const float>(), RoutedOutput::sum, {results.data<bf16>()}, stream_of(stream), nullptr,
                    expected_rows);
  }

  void throw_if_failed() { experts_.throw_if_failed(); }
  std::size_t weight_bytes() const { return experts_.report().device_bytes; }
  std::size_t buffer_bytes() const { return experts_.buffer_bytes(); }

 private:
  static DeviceStream stream_of(std::uintptr_t stream) { return reinterpret_cast<DeviceStream>(stream); }
  LentRows lend(nb::handle rows, nb::handle scales, std::vector<Size> sizes) const {
    return {rows, scales, std::move(sizes), experts_.options().quantisation, gpu_};
  }
  Lent lend_counts(nb::handle counts, const char* name) const {
    return {counts, {name, Element::int32, {experts_.count()}, Access::read, gpu_}};
  }
  std::optional<Lent> lend_weights(nb::handle given, std::vector<Size> sizes) const {
    if (given.is_none()) return std::nullopt;
    return Lent(given, {"row_weights", Element::float32, std::move(sizes), Access::read, gpu_});
  }
  Lent lend_results(nb::handle out, std::vector<Size> sizes) const {
    return {out, {"out", Element::bf16, std::move(sizes), Access::write, gpu_, row_alignment}};
  }
  static const float* pointer(const std::optional<Lent>& weights) { return weights ? weights->data<const float>() : nullptr; }

  int gpu_;
  DeviceExperts experts_;
};

std::shared_ptr<RankDeviceExperts> make_experts(const RankWeights& weights, nb::handle given, int device, int most_rows,
                                                int most_tokens, int topk) {
  const ExpertOptions options = expert_options_of(given, weights.weights);
  DeviceExpertsOptions on;
  on.device = device;
  on.most_rows = most_rows;
  on.most_tokens = most_tokens;
  on.topk = topk;
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<RankDeviceExperts>(weights.weights, options, on);
}

}  // namespace

void bind_device_experts(nb::module_& module) {
  nb::class_<RankDeviceExperts>(module, "RankDeviceExperts")
      .def(nb::new_(&make_experts), "weights"_a, "options"_a, "device"_a, "most_rows"_a, "most_tokens"_a, "topk"_a)
      .def("contiguous", &RankDeviceExperts::contiguous, "rows"_a, "scales"_a.none(), "begins"_a, "counts"_a,
           "row_weights"_a.none(), "out"_a, "expected_rows"_a, "stream"_a)
      .def("masked", &RankDeviceExperts::masked, "rows"_a, "scales"_a.none(), "counts"_a, "row_weights"_a.none(), "out"_a,
           "expected_rows"_a, "stream"_a)
      .def("routed", &RankDeviceExperts::routed, "rows"_a, "scales"_a.none(), "local_ids"_a, "weights"_a, "out"_a,
           "expected_rows"_a, "stream"_a)
      .def("throw_if_failed", &RankDeviceExperts::throw_if_failed)
      .def_prop_ro("weight_bytes", &RankDeviceExperts::weight_bytes)
      .def_prop_ro("buffer_bytes", &RankDeviceExperts::buffer_bytes);
}

}  // namespace heddle::python
