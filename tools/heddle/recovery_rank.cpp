// heddle bench recovery: what a rank's process does.
#include <chrono>
#include <cstdio>

#include "job.hpp"
#include "layer/token_sizes.hpp"
#include "recovery.hpp"

namespace heddle::tool {

double steady_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

namespace {

std::uint32_t bits_of(const std::vector<bool>& live) {
  std::uint32_t bits = 0;
  for (std::size_t rank = 0; rank < live.size(); ++rank) bits |= live[rank] ? 1u << rank : 0u;
  return bits;
}

RecoveryRecord record_of(const Interruption& one) {
  const double noticed = std::chrono::duration<double>(one.noticed.time_since_epoch()).count();
  return {bits_of(one.members.live), noticed, one.agree, one.meet, one.memory, one.experts, one.again, one.experts_moved};
}

LayerInput input_of(const Inputs& inputs, int rank) {
  int first = 0;
  for (int before = 0; before < rank; ++before) first += inputs.tokens_per_rank[static_cast<std::size_t>(before)];
  return TokenSizes::of(inputs.source.shape)
      .from(LayerInput{inputs.tokens_per_rank[static_cast<std::size_t>(rank)], inputs.hidden_states.data(),
                       inputs.routing.ids.data(), inputs.routing.weights.data()},
            first);
}

void run_steps(const RecoveryBench& bench, int rank, Entry entry) {
  const Inputs& inputs = bench.inputs;
  RecoveryBoard::Seat& seat = bench.board->seats[static_cast<std::size_t>(rank)];
  const GroupOptions patient{std::chrono::milliseconds(60000)};
  const auto group = entry == Entry::late ? rejoin_process_group(bench.group, rank, inputs.ranks, patient)
                                          : join_process_group(bench.group, rank, inputs.ranks, patient);
  const Placement placement = Placement::contiguous(inputs.source.shape.experts, inputs.ranks);
  RecoveryOptions recovery;
  recovery.grace = std::chrono::milliseconds(bench.grace_ms);
  RecoveringLayers layers(*group, {{&inputs.source, placement, bench.options}}, recovery, entry);
  group->set_deadline(std::chrono::milliseconds(inputs.deadline_ms));
  const LayerInput input = input_of(inputs, rank);
  int most_tokens = 0;
  for (const int tokens : inputs.tokens_per_rank) most_tokens = std::max(most_tokens, tokens);
  std::vector<bf16> out(static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(inputs.source.shape.hidden));
  std::size_t told = entry == Entry::late ? layers.interruptions().size() : 0;
  while (bench.board->last_step == 0 || layers.steps() < bench.board->last_step) {
    const double begin = steady_seconds();
    layers.forward(input, {most_tokens, Phase::decode}, out.data());
    if (told == layers.interruptions().size()) seat.step_seconds = steady_seconds() - begin;
    for (; told < layers.interruptions().size(); ++told) {
      seat.record[seat.records % RecoveryBoard::most_records] = record_of(layers.interruptions()[told]);
      seat.records += 1;
    }
    seat.live = bits_of(layers.members().live);
    seat.steps = layers.steps();
  }
}

}  // namespace

void run_recovering_rank(const RecoveryBench& bench, int rank, Entry entry) {
  try {
    run_steps(bench, rank, entry);
  } catch (const std::exception& error) {
    auto& text = bench.board->seats[static_cast<std::size_t>(rank)].error;
    std::snprintf(text, sizeof text, "rank %d: %s", rank, error.what());
  }
}

}  // namespace heddle::tool
