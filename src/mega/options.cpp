#include "mega/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "exchange/host_exchange.hpp"

namespace heddle {

void check_mega(const ExchangeOptions& options) {
  const auto refuse = [](const std::string& text) { throw InputError("mega: " + text); };
  const MegaOptions& mega = options.mega;
  if (options.weight_at == WeightAt::combine)
    refuse(
        "weight_at = combine: results are summed without weights, which were applied at the activation; take weight_at = "
        "activation");
  if (options.combine_wire != Wire::bf16 && options.combine == Combine::add)
    refuse("combine = add: results are added as bf16 where they arrive; take combine_wire = bf16, or combine = slots");
  if (options.combine_wire != Wire::bf16 && mega.extra_expert) {
    refuse(
        "a shared expert as an extra routed expert: its results would travel quantised, unlike any shared expert's; take "
        "combine_wire = bf16, or shared = fused");
  }
  if (mega.intermediate < 64 || mega.intermediate % 64 != 0)
    refuse(fmt::format("intermediate size {} is not a positive multiple of 64", mega.intermediate));
  if (mega.shared_intermediate < 0 || mega.shared_intermediate % 64 != 0)
    refuse(fmt::format("the shared expert's intermediate size {} is not a multiple of 64", mega.shared_intermediate));
  if (mega.block_rows < 8 || mega.block_rows > 256 || mega.block_rows % 8 != 0)
    refuse(fmt::format("row blocks of {} rows; multiples of 8 from 8 to 256 are possible", mega.block_rows));
  const int group = options.quantisation.group;
  if (mega.activation == Activation::fp8 && group != 128 && group != 32)
    refuse(fmt::format("activations in groups of {}; 128 and 32 are supported", group));
  const MegaLayout layout = make_mega_layout(options, options.workers, {});
  const auto tasks_a_block = static_cast<std::size_t>(layout.gemm1_tasks() + layout.gemm2_tasks());
  const std::size_t blocks = worst_blocks(layout.shape, mega.block_rows);
  constexpr std::size_t most = std::numeric_limits<std::int32_t>::max();
  if (blocks > most / (tasks_a_block + 1) || blocks > most / (2 * static_cast<std::size_t>(mega.block_rows))) {
    refuse(
        fmt::format("up to {} row blocks of {} tasks each, or {} rows, are beyond numbers of 32 bits; take a smaller cap than {}",
                    blocks, tasks_a_block, mega.block_rows, options.cap));
  }
}

MegaLayout make_mega_layout(const ExchangeOptions& options, int workers, const Areas& areas) {
  auto layout = make_layout<MegaLayout>(options, areas);
  const MegaOptions& mega = options.mega;
  layout.activated = {mega.intermediate, mega.activation, options.quantisation};
  layout.shared = {mega.shared_intermediate, mega.activation, options.quantisation};
  layout.has_shared = mega.shared_intermediate > 0;
  if (mega.extra_expert) {
    layout.extra_expert = true;
    layout.shape.experts += layout.shape.ranks;
    ++layout.shape.max_local_experts;
    ++layout.shape.topk;
  }
  layout.adds = options.combine == Combine::add;
  layout.block_rows = mega.block_rows;
  layout.lag = lag_of(workers, layout.gemm1_tasks());
  // Blocks that a kernel cuts may be several where the options have one, and a ring has more places than the lag.
  const std::size_t least = std::clamp<std::size_t>(worst_blocks(layout.shape, cut_rows(mega.block_rows)), 1, 2);
  const std::size_t all = std::max(worst_blocks(layout.shape, mega.block_rows), least);
  const auto live = static_cast<std::size_t>(live_blocks(layout.lag, layout.shape.max_local_experts));
  layout.ring_blocks = static_cast<int>(mega.ring == RingSize::full ? all : std::min(live, all));
  return layout;
}

Placement mega_placement(const ExchangeOptions& options) {
  if (!options.mega.extra_expert) return options.placement;
  const std::span<const int> given = options.placement.rank_map();
  std::vector<int> rank_of(given.begin(), given.end());
  for (int rank = 0; rank < options.placement.ranks(); ++rank) rank_of.push_back(rank);
  return Placement::from_map(std::move(rank_of), options.placement.ranks());
}

ExchangeMemory memory_of(const MegaLayout& layout) {
  ExchangeMemory memory;
  memory.dispatch = layout.dispatch_bytes();
  memory.combine = layout.combine_bytes();
  memory.mega_words = layout.word_bytes();
  memory.mega_sums = layout.sum_bytes();
  return memory;
}

}  // namespace heddle
