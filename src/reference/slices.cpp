#include "reference/slices.hpp"

#include <algorithm>
#include <utility>

namespace heddle {

SlicesAsExperts::SlicesAsExperts(std::function<ExpertWeights(int)> expert, std::vector<int> ends, std::span<const std::int32_t> ids,
                                 std::span<const float> weights, int experts)
    : whole_(std::move(expert)), ends_(std::move(ends)) {
  const auto ranks = static_cast<std::int32_t>(ends_.size());
  for (std::size_t pair = 0; pair < ids.size(); ++pair) {
    for (std::int32_t rank = 0; rank < ranks; ++rank) {
      ids_.push_back(ids[pair] < 0 ? -1 : ids[pair] * ranks + rank);
      weights_.push_back(weights[pair]);
    }
  }
  for (int id = 0; id < experts * ranks; ++id) rank_of_.push_back(id % ranks);
}

ExpertWeights SlicesAsExperts::expert(int id) {
  const auto ranks = static_cast<int>(ends_.size());
  ExpertWeights expert = whole_(id / ranks);
  const auto [found, is_new] = down_.try_emplace(id);
  std::vector<std::byte>& values = found->second;
  if (is_new) {
    // A zero has a code of zeros in every kind.
    const int rank = id % ranks;
    const std::size_t row_bytes = expert.down.values.size() / static_cast<std::size_t>(expert.down.rows);
    const auto byte_at = [&](int column) {
      return row_bytes * static_cast<std::size_t>(column) / static_cast<std::size_t>(expert.down.cols);
    };
    const std::size_t begin = byte_at(rank == 0 ? 0 : ends_[static_cast<std::size_t>(rank) - 1]);
    const std::size_t end = byte_at(ends_[static_cast<std::size_t>(rank)]);
    values.assign(expert.down.values.size(), std::byte{0});
    for (std::size_t row = 0; row < values.size(); row += row_bytes) {
      std::copy_n(expert.down.values.data() + row + begin, end - begin, values.data() + row + begin);
    }
  }
  expert.down.values = values;
  return expert;
}

}  // namespace heddle
