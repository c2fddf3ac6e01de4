#include "experts/activation/activation.hpp"

#include <cstring>
#include <numeric>
#include <vector>

#include <fmt/format.h>

#include "experts/activation/swiglu.hpp"
#include "experts/host/kernels.hpp"
#include "experts/host/scratch.hpp"
#include "formats/rows.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

void check_rows(std::span<const int> masked_m, int most_rows) {
  std::int64_t rows = 0;
  for (std::size_t expert = 0; expert < masked_m.size(); ++expert) {
    if (masked_m[expert] < 0) {
      throw InputError(fmt::format("activation: expert {} has {} rows; counts are at least 0", expert, masked_m[expert]));
    }
    rows += masked_m[expert];
  }
  if (rows > most_rows) {
    throw InputError(
        fmt::format("activation: the experts have {} rows, but there can be {} (tokens of all ranks x top-k)", rows, most_rows));
  }
}

/// Runs the blocks one after another, each with a scan of its own, as a GPU's blocks have.
template <class Block>
GridCounts run_grid(std::span<const int> masked_m, int blocks, const Block& block) {
  thread_local std::vector<int> row_end;
  row_end.resize(masked_m.size());
  const int experts = static_cast<int>(masked_m.size());
  GridCounts counts;
  for (int index = 0; index < blocks; ++index) {
    const int rows = prefix_sum(masked_m.data(), experts, row_end.data());
    const int done = block(index, row_end.data(), experts, rows);
    counts.blocks += 1;
    counts.scans += 1;
    counts.empty += done == 0 ? 1 : 0;
    counts.rows += done;
  }
  return counts;
}

}  // namespace

std::size_t ActivationStep::value_bytes() const {
  return static_cast<std::size_t>(intermediate) * (format == Activation::fp8 ? 1 : 2);
}

std::size_t ActivationStep::scale_bytes() const {
  const int groups = (intermediate + quantisation.group - 1) / quantisation.group;
  return format == Activation::bf16
             ? 0
             : static_cast<std::size_t>(groups) * (quantisation.scale == ScaleFormat::f32 ? sizeof(float) : 1);
}

RowView ActivationStep::view() const { return {format, values, value_bytes(), scales, scale_bytes()}; }

void activate_row(const ActivationStep& step, const FlatRow& row) {
  thread_local Scratch<float> scratch;
  const std::size_t place = row.place(step.block_rows);
  const auto width = static_cast<std::size_t>(step.intermediate);
  const bf16* gate = step.gate_up + place * 2 * width;
  const bf16* up = gate + width;
  const float weight = step.weights == nullptr ? 1.0f : step.weights[place];
  const SwigluClamp clamp{step.clamp.has_value(), step.clamp.value_or(0.0f)};
  float* v = scratch.resize(width);
  for (std::size_t i = 0; i < width; ++i) {
    v[i] = swiglu(gate[i], up[i], clamp) * weight;
  }
  std::byte* values = step.values + place * step.value_bytes();
  if (step.format == Activation::fp8) {
    quantise_fp8(v, step.intermediate, step.quantisation, reinterpret_cast<std::uint8_t*>(values),
                 step.scales + place * step.scale_bytes());
  } else {
    tile_kernels().round(v, step.intermediate, reinterpret_cast<bf16*>(values));
  }
}

GridCounts run_padded(const ActivationStep& step, std::span<const int> masked_m, int most_rows) {
  check_rows(masked_m, most_rows);
  return run_grid(masked_m, most_rows, [&](int block, const int* row_end, int experts, int rows) {
    return padded_block(block, row_end, experts, rows, [&](const FlatRow& row) { activate_row(step, row); });
  });
}

GridCounts run_persistent(const ActivationStep& step, std::span<const int> masked_m, int slots, int most_rows) {
  check_rows(masked_m, most_rows);
  if (slots < 1) {
    throw InputError(fmt::format("activation: a persistent grid of {} slots; it needs at least 1", slots));
  }
  const int blocks = persistent_blocks(slots, most_rows, 1);
  return run_grid(masked_m, blocks, [&](int block, const int* row_end, int experts, int rows) {
    return persistent_block(block, blocks, row_end, experts, rows, [&](const FlatRow& row) { activate_row(step, row); });
  });
}

}  // namespace heddle
