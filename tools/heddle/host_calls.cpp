#include "host_calls.hpp"

#include <fmt/format.h>

#include <chrono>

#include "heddle/error.hpp"
#include "job_ranks.hpp"
#include "layer/options.hpp"
#include "layer/token_sizes.hpp"

namespace heddle::tool {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// The tokens of one rank, which follow those of the ranks before it.
LayerInput input_of(const Inputs& inputs, int rank) {
  int first = 0;
  for (int before = 0; before < rank; ++before) first += inputs.tokens_per_rank[index(before)];
  return TokenSizes::of(inputs.source.shape)
      .from(LayerInput{inputs.tokens_per_rank[index(rank)], inputs.hidden_states.data(), inputs.routing.ids.data(),
                       inputs.routing.weights.data()},
            first);
}

}  // namespace

HostRank::HostRank(Group& group, const Inputs& inputs, const LayerOptions& options, int layers)
    : group_(group), input_(input_of(inputs, group.rank())), out_(index(input_.tokens) * index(inputs.source.shape.hidden)) {
  const Placement placement = default_placement(inputs.source.shape, inputs.ranks, options);
  const LayerWeights weights = LayerWeights::load(inputs.source, placement, group.rank());
  const ExchangeMemory memory = layer_memory(weights, options);
  workspace_ = std::make_unique<Workspace>(group, memory.heap_bytes(group.ranks()), describe(weights, options));
  for (int i = 0; i < layers; ++i) layers_.emplace_back(*workspace_, memory, weights, options);
}

const LayerReport& HostRank::call(int layer, int tokens) {
  LayerInput input = input_;
  input.tokens = tokens;
  MoeLayer& one = layers_[index(layer) % layers_.size()];
  one.forward(input, {tokens, Phase::decode}, out_.data());
  return one.report();
}

void on_thread_group(int ranks, int deadline_ms, const std::string& what, const std::function<void(Group&)>& body) {
  std::vector<RankOutcome> outcomes(index(ranks));
  auto groups = create_thread_group(ranks, {std::chrono::milliseconds(deadline_ms)});
  run_in_threads(0, ranks, [&](int rank) {
    attempt(outcomes[index(rank)], rank, [&] {
      const auto group = std::move(groups[index(rank)]);  // gone with a rank that fails, which the others notice
      body(*group);
    });
  });
  throw_failure(outcomes, what + ": ");
}

void on_host_ranks(const Inputs& inputs, const LayerOptions& options, int layers, const std::function<void(HostRank&)>& body) {
  on_thread_group(inputs.ranks, inputs.deadline_ms, std::string(name(options.way)), [&](Group& group) {
    HostRank rank(group, inputs, options, layers);
    body(rank);
    rank.close();
  });
}

}  // namespace heddle::tool
