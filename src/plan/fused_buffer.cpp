// The symmetric buffer of the fused kernel that the fused-kernel article describes (section 5.1).
// What the article leaves open (the ring's rows, the counters' room) follows that kernel's published layout.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "heddle/plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

namespace {

using plan::divide_up;
using plan::round_up;

constexpr std::array<std::uint64_t, 8> block_rows{8, 16, 32, 64, 96, 128, 192, 240};
constexpr int block_multiple = 1920;  ///< the least common multiple of block_rows
constexpr int largest_ring_cap = 5760;
constexpr std::uint64_t scale_block = 128;  ///< each row block's scales are padded to so many rows
constexpr std::uint64_t task_columns = 256;
constexpr std::uint64_t values_a_scale = 32;
/// 20 bytes of counters and masks for each of at most 2^20 row blocks, whatever the cap.
constexpr std::uint64_t counter_bytes = std::uint64_t{20} << 20;

/// The most rows that can arrive, with room for a part block of each local expert.
std::uint64_t padded_worst_rows(const LayerShape& shape, int ranks, int cap) {
  const auto local = static_cast<std::uint64_t>(most_local_experts(shape.experts, ranks));
  return round_up(fused_worst_rows(shape, ranks, cap) + local * (block_rows.back() - 1), std::uint64_t{block_multiple});
}

/// Row blocks, of `blocks` in all, that are filled and not yet read by GEMM 2 at any moment, at most.
/// A pair of SMs runs a task; GEMM 1 starts with warm-up waves, then its tasks alternate with GEMM 2's.
std::uint64_t live_blocks(std::uint64_t blocks, std::uint64_t gemm1_tasks, std::uint64_t gemm2_tasks, std::uint64_t pairs) {
  const std::uint64_t first_wave_blocks = divide_up(pairs, gemm2_tasks);
  const std::uint64_t surplus = gemm1_tasks > gemm2_tasks ? gemm1_tasks - gemm2_tasks : 0;
  const std::uint64_t waves =
      std::max(divide_up(first_wave_blocks * gemm1_tasks, pairs), divide_up(gemm1_tasks + (blocks - 1) * surplus, pairs) + 1);
  const std::uint64_t warm_up = divide_up(std::min(waves * pairs, blocks * gemm1_tasks), gemm1_tasks);
  const std::uint64_t growth = gemm2_tasks > gemm1_tasks ? divide_up(blocks * (gemm2_tasks - gemm1_tasks), gemm2_tasks) : 0;
  const std::uint64_t margin = divide_up(pairs, std::min(gemm1_tasks, gemm2_tasks));
  return std::min(blocks, warm_up + growth + margin);
}

Region rows_of(std::string name, std::uint64_t rows, std::uint64_t row_bytes) {
  return {std::move(name), rows, rows * row_bytes, fmt::format("{} rows x {} bytes", rows, row_bytes)};
}

}  // namespace

int fused_cap(int cap) { return round_up(cap, block_multiple); }

ArrivedRegion fused_arrived(int cap) {
  return fused_cap(cap) <= largest_ring_cap ? ArrivedRegion::ring : ArrivedRegion::worst_case;
}

std::uint64_t fused_worst_rows(const LayerShape& shape, int ranks, int cap) {
  const auto choices = static_cast<std::uint64_t>(std::min(shape.topk, most_local_experts(shape.experts, ranks)));
  return static_cast<std::uint64_t>(ranks) * static_cast<std::uint64_t>(fused_cap(cap)) * choices;
}

std::uint64_t fused_ring_rows(const LayerShape& shape, int ranks, int cap, int sms) {
  const auto local = static_cast<std::uint64_t>(most_local_experts(shape.experts, ranks));
  const auto gemm1_tasks = divide_up(2 * static_cast<std::uint64_t>(shape.intermediate), task_columns);
  const auto gemm2_tasks = divide_up(static_cast<std::uint64_t>(shape.hidden), task_columns);
  std::uint64_t rows = 0;
  for (const std::uint64_t block : block_rows) {
    const std::uint64_t blocks = divide_up(fused_worst_rows(shape, ranks, cap), block) + local;
    rows = std::max(rows, block * live_blocks(blocks, gemm1_tasks, gemm2_tasks, static_cast<std::uint64_t>(sms) / 2));
  }
  return round_up(rows, std::uint64_t{block_multiple});
}

Buffer fused_buffer(const LayerShape& shape, int ranks, int cap, ArrivedRegion arrived, int shared_experts, int sms) {
  const auto hidden = static_cast<std::uint64_t>(shape.hidden);
  const auto intermediate = static_cast<std::uint64_t>(shape.intermediate);
  const auto topk = static_cast<std::uint64_t>(shape.topk);
  const auto own = static_cast<std::uint64_t>(fused_cap(cap));
  const auto shared = static_cast<std::uint64_t>(shared_experts);
  const std::uint64_t hidden_scales = divide_up(hidden, values_a_scale);
  const std::uint64_t intermediate_scales = divide_up(intermediate, values_a_scale);
  const std::uint64_t worst = padded_worst_rows(shape, ranks, cap);
  const std::uint64_t rows = arrived == ArrivedRegion::ring ? fused_ring_rows(shape, ranks, cap, sms) : worst;
  const std::uint64_t padding = scale_block / block_rows.front();

  Buffer buffer;
  buffer.regions = {
      rows_of("input", own, hidden + hidden_scales + topk * (sizeof(std::int64_t) + sizeof(float))),
      rows_of("index_table", static_cast<std::uint64_t>(shape.experts) * own, sizeof(std::uint32_t)),
      rows_of("origins", worst, 3 * sizeof(std::uint32_t)),
      {"counters", 0, counter_bytes, "20 bytes x 2^20 row blocks"},
      rows_of("arrived", rows, hidden),
      rows_of("intermediate", rows, intermediate),
      rows_of("scales", rows * padding, hidden_scales + intermediate_scales),
      rows_of("weights", rows, sizeof(float)),
      rows_of("result_slots", own * (topk + (shared > 0 ? 1 : 0)), hidden * sizeof(bf16)),
  };
  if (shared > 0) {
    buffer.regions.push_back(rows_of("shared_intermediate", own, shared * intermediate));
    buffer.regions.push_back(rows_of("shared_scales", own * padding, hidden_scales + shared * intermediate_scales));
  }
  return buffer;
}

}  // namespace heddle
