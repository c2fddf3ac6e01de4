#include "experts/host/parts.hpp"

#include <algorithm>

#include "experts/activation/activation.hpp"

namespace heddle {
namespace {

constexpr int scale_block = 128;  // rows of a matrix that share a row of fp8_block scales

/// Rows [first, first + most) of a matrix, or what is left of them. `first` is a multiple of 128.
WeightMatrix some_rows(const WeightMatrix& whole, int first, int most) {
  const auto begin = static_cast<std::size_t>(first);
  const auto all = static_cast<std::size_t>(whole.rows);
  WeightMatrix part = whole;
  part.rows = std::min(most, whole.rows - first);
  const auto count = static_cast<std::size_t>(part.rows);
  const std::size_t pitch = whole.values.size() / all;
  part.values = whole.values.subspan(begin * pitch, count * pitch);
  const bool blocks = whole.kind == WeightKind::fp8_block;
  const auto scale_rows = [blocks](std::size_t rows) { return blocks ? (rows + scale_block - 1) / scale_block : rows; };
  const std::size_t scale_pitch = whole.scales.size() / scale_rows(all);
  part.scales = whole.scales.subspan(scale_rows(begin) * scale_pitch, scale_rows(count) * scale_pitch);
  return part;
}

}  // namespace

RowView run_activations(const ExpertSet& set, const RowView& rows, int count, const float* weights, int expert, int part,
                        ExpertWorkspace& workspace) {
  const ExpertWeights& whole = set.experts[static_cast<std::size_t>(expert)];
  const ExpertOptions& options = set.options;
  const WeightMatrix gate = some_rows(whole.gate, part * activation_part, activation_part);
  const WeightMatrix up = some_rows(whole.up, part * activation_part, activation_part);
  const auto width = static_cast<std::size_t>(gate.rows);
  const auto n = static_cast<std::size_t>(count);
  bf16* gate_up = workspace.gate_up.resize(n * 2 * width);
  workspace.operand.pack(rows, nullptr, count, set.hidden, options.activation, options.quantisation);
  workspace.engine.multiply(workspace.operand, gate, options.row_block, {gate_up, 2 * width, nullptr});
  workspace.engine.multiply(workspace.operand, up, options.row_block, {gate_up + width, 2 * width, nullptr});
  ActivationStep step;
  step.intermediate = gate.rows;
  step.gate_up = gate_up;
  step.weights = weights;
  step.clamp = options.clamp;
  step.format = options.activation;
  step.quantisation = options.quantisation;
  step.values = workspace.activated.resize(n * step.value_bytes());
  step.scales = workspace.scales.resize(n * step.scale_bytes());
  for (int row = 0; row < count; ++row) activate_row(step, {row, 0, row});
  return step.view();
}

void run_results(const ExpertSet& set, const RowView& activations, int count, int expert, int part, ExpertWorkspace& workspace,
                 const GemmOutput& out) {
  const WeightMatrix down = some_rows(set.experts[static_cast<std::size_t>(expert)].down, part * result_part, result_part);
  workspace.operand.pack(activations, nullptr, count, set.intermediate, set.options.activation, set.options.quantisation);
  workspace.engine.multiply(workspace.operand, down, set.options.row_block, out);
}

}  // namespace heddle
