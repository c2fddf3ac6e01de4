#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"

namespace heddle {

namespace {
void check_counts(std::size_t experts, int ranks) {
  if (experts < 1 || ranks < 1) {
    throw InputError(fmt::format("placement: {} experts on {} ranks, at least 1 of each is needed", experts, ranks));
  }
}
}  // namespace

Placement Placement::contiguous(int experts, int ranks) {
  check_counts(static_cast<std::size_t>(std::max(experts, 0)), ranks);
  std::vector<int> rank_of(static_cast<std::size_t>(experts));
  for (std::int64_t e = 0; e < experts; ++e) rank_of[static_cast<std::size_t>(e)] = static_cast<int>(e * ranks / experts);
  return from_map(std::move(rank_of), ranks);
}

Placement Placement::from_map(std::vector<int> rank_of, int ranks) {
  check_counts(rank_of.size(), ranks);
  Placement placement;
  placement.offsets_.assign(static_cast<std::size_t>(ranks) + 1, 0);
  placement.local_index_.reserve(rank_of.size());
  for (std::size_t expert = 0; expert < rank_of.size(); ++expert) {
    const int rank = rank_of[expert];
    if (rank < 0 || rank >= ranks) {
      throw InputError(fmt::format("placement: expert {} is on rank {}, ranks are 0 to {}", expert, rank, ranks - 1));
    }
    placement.local_index_.push_back(placement.offsets_[static_cast<std::size_t>(rank) + 1]++);
  }
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank) {
    placement.offsets_[rank + 1] += placement.offsets_[rank];
  }
  placement.experts_.resize(rank_of.size());
  for (std::size_t expert = 0; expert < rank_of.size(); ++expert) {
    const int slot = placement.offsets_[static_cast<std::size_t>(rank_of[expert])] + placement.local_index_[expert];
    placement.experts_[static_cast<std::size_t>(slot)] = static_cast<int>(expert);
  }
  placement.rank_of_ = std::move(rank_of);
  return placement;
}

Placement Placement::everywhere(int experts, int ranks) {
  check_counts(static_cast<std::size_t>(std::max(experts, 0)), ranks);
  Placement placement;
  placement.rank_of_.assign(static_cast<std::size_t>(experts), every_rank);
  for (int expert = 0; expert < experts; ++expert) placement.local_index_.push_back(expert);
  placement.offsets_.push_back(0);
  for (int rank = 0; rank < ranks; ++rank) {
    placement.experts_.insert(placement.experts_.end(), placement.local_index_.begin(), placement.local_index_.end());
    placement.offsets_.push_back(static_cast<int>(placement.experts_.size()));
  }
  return placement;
}

std::span<const int> Placement::experts_of(int rank) const {
  const auto begin = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(rank)]);
  const auto end = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(rank) + 1]);
  return std::span(experts_).subspan(begin, end - begin);
}

int Placement::max_local_experts() const {
  int most = 0;
  for (int rank = 0; rank < ranks(); ++rank) most = std::max(most, static_cast<int>(experts_of(rank).size()));
  return most;
}

namespace {
[[noreturn]] void throw_repeated(std::span<const std::int32_t> chosen, std::size_t choice, int token) {
  const auto first = std::find(chosen.begin(), chosen.end(), chosen[choice]) - chosen.begin();
  throw InputError(
      fmt::format("routing: token {}, choice {}: expert {} was chosen already, as choice {}; a token's ids have to differ", token,
                  choice, chosen[choice], first));
}
}  // namespace

void check_choices(std::span<const std::int32_t> ids, int tokens, int topk, int experts) {
  if (tokens < 0 || topk < 0 || ids.size() != static_cast<std::size_t>(tokens) * static_cast<std::size_t>(topk)) {
    throw InputError(fmt::format("routing: {} ids for {} tokens of {} choices", ids.size(), tokens, topk));
  }
  std::vector<int> seen_at(static_cast<std::size_t>(std::max(experts, 0)), -1);  // the last token that chose an expert
  for (int token = 0; token < tokens; ++token) {
    const auto k = static_cast<std::size_t>(topk);
    const auto chosen = ids.subspan(static_cast<std::size_t>(token) * k, k);
    for (std::size_t choice = 0; choice < k; ++choice) {
      const std::int32_t id = chosen[choice];
      if (id < -1 || id >= experts) {
        throw InputError(fmt::format("routing: token {}, choice {}: expert id {} is outside [-1, {})", token, choice, id, experts));
      }
      if (id < 0) continue;
      int& seen = seen_at[static_cast<std::size_t>(id)];
      if (seen == token) throw_repeated(chosen, choice, token);
      seen = token;
    }
  }
}

}  // namespace heddle
