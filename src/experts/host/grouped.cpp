#include "experts/host/grouped.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "experts/host/tile.hpp"
#include "experts/host/workspace.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

std::size_t size(int value) { return static_cast<std::size_t>(value); }

void check(std::span<const WeightMatrix> weights, const RowView& rows, Activation activation, const Quantisation& quantisation) {
  for (std::size_t group = 0; group < weights.size(); ++group) {
    check_weights(weights[group], weights[0].rows, weights[0].cols, fmt::format("group {}", group));
  }
  if (!weights.empty() && weights[0].cols % 16 != 0) {
    throw InputError(fmt::format("grouped product: K is {}; it must be a multiple of 16", weights[0].cols));
  }
  if (rows.format == Activation::fp8 && activation == Activation::bf16) {
    throw InputError("grouped product: rows are fp8, but the activations are bf16");
  }
  if (quantisation.group != 128 && quantisation.group != 32) {
    throw InputError(fmt::format("grouped product: groups of {}; 128 and 32 are supported", quantisation.group));
  }
}

/// The rows of each group, in their order.
std::vector<std::vector<int>> rows_by_group(std::span<const int> group_of, int groups) {
  std::vector<std::vector<int>> rows(size(groups));
  for (std::size_t row = 0; row < group_of.size(); ++row) {
    const int group = group_of[row];
    if (group < -1 || group >= groups) {
      throw InputError(fmt::format("grouped product: row {} is of group {}; it must be -1 to {}", row, group, groups - 1));
    }
    if (group >= 0) rows[size(group)].push_back(static_cast<int>(row));
  }
  return rows;
}

}  // namespace

void grouped_product(const RowView& rows, std::span<const int> group_of, std::span<const WeightMatrix> weights,
                     Activation activation, const Quantisation& quantisation, ResultRows out) {
  check(weights, rows, activation, quantisation);
  const auto by_group = rows_by_group(group_of, static_cast<int>(weights.size()));
  use_one_blas_thread();
  ExpertWorkspace& workspace = expert_workspace();
  for (std::size_t group = 0; group < weights.size(); ++group) {
    const WeightMatrix& matrix = weights[group];
    const int count = static_cast<int>(by_group[group].size());
    const int piece = count == 0 ? 0 : tile::piece_rows(0, count);
    for (int done = 0; done < count; done += piece) {
      const int* these = by_group[group].data() + done;
      workspace.operand.pack(rows, these, std::min(piece, count - done), matrix.cols, activation, quantisation);
      workspace.engine.multiply(workspace.operand, matrix, 0,
                                {out.values, out.stride == 0 ? size(matrix.rows) : out.stride, these});
    }
  }
}

}  // namespace heddle
