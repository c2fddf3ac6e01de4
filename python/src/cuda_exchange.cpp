// One way on one GPU without experts of its own, for all ranks that live there: rows out, results home, queued on a stream.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda_calls.hpp"
#include "exchanges.hpp"
#include "heddle/device.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

class RankDeviceExchange : public DeviceCalls {
 public:
  RankDeviceExchange(const std::shared_ptr<DeviceContext>& context, const ExchangeOptions& options,
                     const DeviceExchangeOptions& device)
      : DeviceCalls(context, 0, {options.hidden, options.topk, options.cap}),
        options_(options),
        exchange_(create_device_exchange(context->workspace(), 0, options, context->memory(), device)) {}

  void dispatch(const nb::list& inputs, nb::handle step, std::uintptr_t stream);
  void combine(const nb::list& results, const nb::list& outputs, std::uintptr_t stream);
  void reset(const std::optional<std::vector<bool>>& live) {
    sent_.clear();
    context().reset(live);
  }
  void throw_if_failed() const { workspace().throw_if_aborted(); }
  void set_deadline(double seconds) {
    const auto deadline = deadline_of(seconds);
    const nb::gil_scoped_release others_run;  // a copy to the GPU may wait for its kernels
    workspace().set_deadline(deadline);
  }

  DeviceWorkspace& workspace() const { return context().workspace(); }
  const ExchangeOptions& options() const { return options_; }
  int cuda_device() const { return device(); }
  Arrived arrived(int local) const {
    if (sent_.empty()) throw InputError("nothing has arrived: dispatch comes first");
    if (local < 0 || static_cast<std::size_t>(local) >= ranks())
      throw InputError(fmt::format("rank {} of {} that live on this GPU", local, ranks()));
    return exchange_->arrived(local);
  }
  std::vector<int> experts(int local) const {
    const auto mine = options_.placement.experts_of(workspace().first_rank(gpu()) + local);
    return {mine.begin(), mine.end()};
  }

 private:
  std::vector<const bf16*> results_of(const nb::list& given) const;

  ExchangeOptions options_;
  std::unique_ptr<DeviceExchange> exchange_;
  std::vector<std::int64_t> sent_;  ///< tokens of each rank in the last dispatch
};

void RankDeviceExchange::dispatch(const nb::list& given, nb::handle step, std::uintptr_t stream) {
  const Turn turn(place(), "dispatch");
  or_refuse(stream, [&] {
    Inputs inputs = inputs_of(given, stream_of(stream));
    const Step all = step_of(step);
    sent_ = std::move(inputs.rows);
    const nb::gil_scoped_release others_run;
    exchange_->dispatch(inputs.of_ranks, all, stream_of(stream));
  });
}

std::vector<const bf16*> RankDeviceExchange::results_of(const nb::list& given) const {
  check_ranks(given, "results");
  std::vector<const bf16*> results;
  for (std::size_t rank = 0; rank < ranks(); ++rank) {
    const std::vector<Size> sizes = result_sizes(arrived(static_cast<int>(rank)), options_);
    const Lent lent(given[rank], {"results", Element::bf16, sizes, Access::read, device(), row_alignment});
    results.push_back(lent.data<const bf16>());
  }
  return results;
}

void RankDeviceExchange::combine(const nb::list& given, const nb::list& out, std::uintptr_t stream) {
  const Turn turn(place(), "combine");
  or_refuse(stream, [&] {
    const std::vector<const bf16*> results = results_of(given);
    std::vector<DeviceOutput> outputs;
    for (bf16* const of_rank : outputs_of(out, sent_)) outputs.push_back({of_rank});
    const nb::gil_scoped_release others_run;
    exchange_->combine(results, outputs, stream_of(stream));
  });
}

std::shared_ptr<RankDeviceExchange> make_exchange(std::shared_ptr<RankGroup> group, nb::handle given, int device, int ranks,
                                                  double deadline, int sms) {
  const int all = ranks * (group ? group->group().ranks() : 1);
  const ExchangeOptions options = exchange_options_of(given, all);
  check_options(options);
  LayerNeeds needs{exchange_memory(options), describe(options), all, 1};
  const auto context = make_context(std::move(group), {ranks, {device}, deadline_of(deadline)}, std::move(needs));
  DeviceExchangeOptions on_device;
  on_device.sms = sms;
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<RankDeviceExchange>(context, options, on_device);
}

/// An array of no framework, in the memory of a GPU, that keeps its owner alive.
template <class T>
nb::object device_view_of(const T* data, std::initializer_list<std::size_t> sizes, nb::handle owner, int device) {
  return nb::cast(nb::ndarray<nb::array_api, T, nb::device::cuda>(const_cast<T*>(data), sizes, owner, {}, nb::dtype<T>(),
                                                                  nb::device::cuda::value, device));
}

nb::dict arrived_of(nb::handle self, int local) {
  const auto& exchange = nb::cast<const RankDeviceExchange&>(self);
  return fields_of(exchange.arrived(local), exchange.options(), exchange.experts(local).size(),
                   [&](const auto* data, std::initializer_list<std::size_t> sizes) {
                     return device_view_of(data, sizes, self, exchange.cuda_device());
                   });
}

}  // namespace

void bind_device_exchange(nb::module_& module) {
  nb::class_<RankDeviceExchange>(module, "RankDeviceExchange")
      .def(nb::new_(&make_exchange), "group"_a.none(), "options"_a, "device"_a, "ranks"_a, "deadline"_a, "sms"_a)
      .def("dispatch", &RankDeviceExchange::dispatch, "inputs"_a, "step"_a, "stream"_a)
      .def("combine", &RankDeviceExchange::combine, "results"_a, "outputs"_a, "stream"_a)
      .def(
          "arrived", [](const nb::object& self, int local) { return arrived_of(self, local); }, "local"_a)
      .def("experts", &RankDeviceExchange::experts, "local"_a)
      .def("refuse", &RankDeviceExchange::refuse, "stream"_a)
      .def("reset", &RankDeviceExchange::reset, "live"_a.none())
      .def("throw_if_failed", &RankDeviceExchange::throw_if_failed)
      .def("set_deadline", &RankDeviceExchange::set_deadline, "seconds"_a)
      .def_prop_ro("ranks", [](const RankDeviceExchange& self) { return self.workspace().ranks(); })
      .def_prop_ro("first_rank", [](const RankDeviceExchange& self) { return self.workspace().first_rank(0); })
      .def_prop_ro("live", [](const RankDeviceExchange& self) { return self.workspace().live(); })
      .def_prop_ro("bytes", [](const RankDeviceExchange& self) { return self.workspace().bytes(); });
}

}  // namespace heddle::python
