#include "against_reference.hpp"

#include "layer/expert_slices.hpp"
#include "layer/options.hpp"
#include "reference/slices.hpp"

namespace heddle::tool {

bool is_slots(const LayerOptions& options) {
  return options.way == Way::low_latency || options.way == Way::mega ||
         (options.way == Way::elastic && options.reduce == Reduce::home);
}

double bound_of(const Inputs& inputs, LayerOptions options) {
  constexpr double of_few_tokens = 4e-2;
  if (options.combine == Combine::add) {
    options.combine = Combine::slots;
    return bound_of(inputs, options) + error_of_additions(inputs.source.shape.topk);
  }
  const LayerShape& shape = inputs.source.shape;
  const bool is_small = static_cast<double>(inputs.tokens()) * shape.topk * shape.intermediate < 1 << 17;
  const bool has_few_outputs = static_cast<double>(inputs.tokens()) * shape.hidden < 1 << 15;
  if (options.combine_wire != Wire::bf16 && (is_small || has_few_outputs)) return of_few_tokens;
  if (activation_of(inputs.source.kind, options) == Activation::bf16) return 4e-3;
  if (inputs.host_experts) return 6e-3;
  constexpr double of_nvfp4_returns = 2e-2;  // docs/numerics.md
  if (is_small) return of_few_tokens;
  return options.combine_wire == Wire::nvfp4 ? of_nvfp4_returns : 1.5e-2;
}

std::vector<bf16> reference_of(const Inputs& inputs, const LayerOptions& options, const ExchangeOptions& exchange) {
  const LayerSource& source = inputs.source;
  const Placement placement = Placement::contiguous(source.shape.experts, inputs.ranks);
  ReferenceInput input;
  input.hidden = source.shape.hidden;
  input.intermediate = source.shape.intermediate;
  input.experts = source.shape.experts;
  input.tokens = inputs.tokens();
  input.topk = source.shape.topk;
  input.hidden_states = inputs.hidden_states;
  input.ids = inputs.routing.ids;
  input.weights = inputs.routing.weights;
  input.expert = source.expert;
  input.shared = source.shared ? &*source.shared : nullptr;
  input.rank_of = placement.rank_map();
  ReferenceOptions reference;
  reference.activation = activation_of(inputs.source.kind, options);
  reference.quantisation = options.quantisation;
  reference.clamp = options.clamp;
  reference.weight_at = options.weight_at;
  reference.sum = is_slots(options) ? Sum::slots : Sum::two_stage;
  reference.wire = exchange.wire;
  reference.combine_wire = options.combine_wire;
  if (!options.expert_slices) return reference_layer(input, reference);
  std::vector<int> ends;
  for (int rank = 0; rank < inputs.ranks; ++rank) {
    const SliceRange slice = slice_of_rank(input.intermediate, rank, inputs.ranks);
    ends.push_back(slice.first + slice.count);
  }
  SlicesAsExperts slices(source.expert, ends, inputs.routing.ids, inputs.routing.weights, input.experts);
  input.experts *= inputs.ranks;
  input.topk *= inputs.ranks;
  input.ids = slices.ids();
  input.weights = slices.weights();
  input.rank_of = slices.rank_of();
  input.expert = [&slices](int id) { return slices.expert(id); };
  return reference_layer(input, reference);
}

}  // namespace heddle::tool
