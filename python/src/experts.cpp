// Experts without an exchange, and their products one by one: for exchanges and chains of one's own.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <vector>

#include "arrays.hpp"
#include "experts/host/grouped.hpp"
#include "lent_rows.hpp"
#include "matrices.hpp"
#include "options.hpp"
#include "rooms.hpp"
#include "source.hpp"

using namespace nanobind::literals;

namespace heddle::python {

ExpertOptions expert_options_of(nb::handle given, const LayerWeights& weights) {
  ExpertOptions options;
  const nb::object activation = given.attr("activation");
  options.activation = weights.kind == WeightKind::bf16 ? Activation::bf16 : Activation::fp8;
  if (!activation.is_none()) options.activation = value_of(tool::activations, activation, "activation");
  options.quantisation = quantisation_of(given.attr("quantisation"));
  options.clamp = field<std::optional<float>>(given, "clamp");
  if (!options.clamp) options.clamp = weights.shape.clamp;
  options.weight_at = value_of(tool::weight_places, given.attr("weight_at"), "weight_at");
  return options;
}

int intermediate_of(const LayerWeights& weights) {
  return weights.experts.empty() ? weights.shape.intermediate : weights.experts[0].gate.rows;
}

namespace {

class RankExperts {
 public:
  RankExperts(std::shared_ptr<RankWeights> weights, const ExpertOptions& options)
      : weights_(std::move(weights)),
        experts_(weights_->weights.experts, weights_->weights.shape.hidden, intermediate_of(weights_->weights), options) {}

  void contiguous(nb::handle given, nb::handle scales, nb::handle begins, nb::handle counts, nb::handle row_weights,
                  nb::handle out) const {
    const LentRows rows(given, scales, {"rows", experts_.hidden()}, experts_.options().quantisation);
    const Lent first(begins, {"begins", Element::int32, {experts_.count()}});
    const Lent count(counts, {"counts", Element::int32, {experts_.count()}});
    for (int expert = 0; expert < experts_.count(); ++expert) {
      const std::int64_t begin = first.data<const int>()[expert], many = count.data<const int>()[expert];
      if (begin < 0 || many < 0 || begin + many > rows.size(0))
        throw InputError(fmt::format("local expert {}: rows {} to {} of {}", expert, begin, begin + many, rows.size(0)));
    }
    const auto weights = lend_weights(row_weights, {rows.size(0)});
    const Lent results(out, {"out", Element::bf16, {rows.size(0), experts_.hidden()}, Access::write});
    const nb::gil_scoped_release others_run;
    experts_.contiguous(rows.view(), of(first), of(count), pointer(weights), {results.data<bf16>()});
  }

  void masked(nb::handle given, nb::handle scales, nb::handle counts, nb::handle row_weights, nb::handle out) const {
    const LentRows rows(given, scales, {experts_.count(), "rows", experts_.hidden()}, experts_.options().quantisation);
    const std::int64_t block = rows.size(1);
    const Lent count(counts, {"counts", Element::int32, {experts_.count()}});
    const auto weights = lend_weights(row_weights, {experts_.count(), block});
    const Lent results(out, {"out", Element::bf16, {experts_.count(), block, experts_.hidden()}, Access::write});
    const nb::gil_scoped_release others_run;
    experts_.masked(rows.view(), static_cast<int>(block), of(count), pointer(weights), {results.data<bf16>()});
  }

  void routed(nb::handle given, nb::handle scales, nb::handle local_ids, nb::handle given_weights, nb::handle out) const {
    const LentRows rows(given, scales, {"tokens", experts_.hidden()}, experts_.options().quantisation);
    const Lent ids(local_ids, {"local_ids", Element::int32, {rows.size(0), "topk"}});
    const Lent weights(given_weights, {"weights", Element::float32, {rows.size(0), ids.size(1)}});
    const Lent results(out, {"out", Element::bf16, {rows.size(0), experts_.hidden()}, Access::write});
    const nb::gil_scoped_release others_run;
    experts_.routed(rows.view(), static_cast<int>(rows.size(0)), static_cast<int>(ids.size(1)), ids.data<const std::int32_t>(),
                    weights.data<const float>(), RoutedOutput::sum, {results.data<bf16>()});
  }

 private:
  static std::span<const int> of(const Lent& counts) {
    return {counts.data<const int>(), static_cast<std::size_t>(counts.size(0))};
  }
  static std::optional<Lent> lend_weights(nb::handle given, std::vector<Size> sizes) {
    if (given.is_none()) return std::nullopt;
    return Lent(given, {"row_weights", Element::float32, std::move(sizes)});
  }
  static const float* pointer(const std::optional<Lent>& weights) { return weights ? weights->data<const float>() : nullptr; }

  std::shared_ptr<RankWeights> weights_;
  HostExperts experts_;
};

/// rows [M, K] and weights [groups, N, K] to out [M, N].
void grouped_product_into(nb::handle rows, nb::handle row_scales, nb::handle given, nb::handle kind, nb::handle weights,
                          nb::handle weight_scales, nb::handle groups, nb::handle out) {
  const Quantisation quantisation = quantisation_of(given);
  const MatrixStack stack("weights", value_of(tool::kinds, kind, "kind"), weights, weight_scales);
  const LentRows lent(rows, row_scales, {"rows", stack.cols()}, quantisation);
  const Lent group_of(groups, {"groups", Element::int32, {lent.size(0)}});
  const Lent results(out, {"out", Element::bf16, {lent.size(0), stack.rows()}, Access::write});
  const std::vector<WeightMatrix> matrices = stack.matrices();
  const nb::gil_scoped_release others_run;
  grouped_product(lent.view(), {group_of.data<const int>(), static_cast<std::size_t>(group_of.size(0))}, matrices,
                  lent.view().format, quantisation, {results.data<bf16>()});
}

}  // namespace

void bind_experts(nb::module_& module) {
  nb::class_<RankExperts>(module, "RankExperts")
      .def(nb::new_([](std::shared_ptr<RankWeights> weights, nb::handle options) {
             const ExpertOptions made = expert_options_of(options, weights->weights);
             return std::make_shared<RankExperts>(std::move(weights), made);
           }),
           "weights"_a, "options"_a)
      .def("contiguous", &RankExperts::contiguous, "rows"_a, "scales"_a.none(), "begins"_a, "counts"_a, "row_weights"_a.none(),
           "out"_a)
      .def("masked", &RankExperts::masked, "rows"_a, "scales"_a.none(), "counts"_a, "row_weights"_a.none(), "out"_a)
      .def("routed", &RankExperts::routed, "rows"_a, "scales"_a.none(), "local_ids"_a, "weights"_a, "out"_a);
  module.def("grouped_product_into", &grouped_product_into, "rows"_a, "row_scales"_a.none(), "quantisation"_a, "kind"_a,
             "weights"_a, "weight_scales"_a.none(), "groups"_a, "out"_a);
}

}  // namespace heddle::python
