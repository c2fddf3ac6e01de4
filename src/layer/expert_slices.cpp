#include "layer/expert_slices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "experts/sm90/host_weights.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

using sm90::Range;

constexpr int unit = 128;

std::vector<std::byte> copy_rows(const std::byte* from, std::size_t pitch, int rows, std::size_t bytes) {
  std::vector<std::byte> to(static_cast<std::size_t>(rows) * bytes);
  for (std::size_t row = 0; row < static_cast<std::size_t>(rows) && bytes > 0; ++row) {
    std::memcpy(to.data() + row * bytes, from + row * pitch, bytes);
  }
  return to;
}

}  // namespace

SliceRange slice_of_rank(int intermediate, int rank, int ranks) {
  const long long parts = (intermediate + unit - 1) / unit;
  if (parts < ranks) {
    throw InputError(fmt::format(
        "an intermediate size of {} cannot be sliced over {} ranks: slices are multiples of {}, so at most {} ranks are possible",
        intermediate, ranks, unit, parts));
  }
  const int first = static_cast<int>(parts * rank / ranks) * unit;
  const int end = std::min(static_cast<int>(parts * (rank + 1) / ranks) * unit, intermediate);
  return {first, end - first};
}

ExpertSlices::ExpertSlices(const std::vector<ExpertWeights>& experts, const SliceRange& slice) {
  const auto cut = [this](const WeightMatrix& matrix, const Range& rows, const Range& cols, const char* name) {
    const sm90::StoredMatrix part = sm90::stored_part(matrix, rows, cols, name);
    const sm90::StoredShape shape{matrix.kind, rows.count, cols.count, matrix.block_scale};
    WeightMatrix view = matrix;
    view.rows = rows.count;
    view.cols = cols.count;
    memory_.push_back(copy_rows(part.values, part.value_pitch, rows.count, shape.value_pitch()));
    view.values = memory_.back();
    memory_.push_back(copy_rows(part.scales, part.scale_pitch, shape.scale_rows(), shape.scale_pitch()));
    view.scales = memory_.back();
    return view;
  };
  const Range part{slice.first, slice.count};
  for (const ExpertWeights& expert : experts) {
    views_.push_back({cut(expert.gate, part, {0, expert.gate.cols}, "gate"), cut(expert.up, part, {0, expert.up.cols}, "up"),
                      cut(expert.down, {0, expert.down.rows}, part, "down")});
  }
}

}  // namespace heddle
