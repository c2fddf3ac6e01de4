#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "heddle/balancing.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

}  // namespace

ReplicaMap ReplicaMap::single(const Placement& placement) {
  std::vector<std::vector<int>> experts_of(index(placement.ranks()));
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    const auto own = placement.experts_of(rank);
    experts_of[index(rank)].assign(own.begin(), own.end());
  }
  return from_ranks(experts_of, placement.experts());
}

ReplicaMap ReplicaMap::from_ranks(const std::vector<std::vector<int>>& experts_of, int experts) {
  if (experts < 1 || experts_of.empty())
    throw InputError(fmt::format("copies of {} experts on {} ranks: at least 1 of each is needed", experts, experts_of.size()));
  ReplicaMap map;
  std::vector<int> rank_of;
  map.begins_.assign(index(experts) + 1, 0);
  for (std::size_t rank = 0; rank < experts_of.size(); ++rank) {
    for (const int expert : experts_of[rank]) {
      if (expert < 0 || expert >= experts)
        throw InputError(fmt::format("rank {} is to hold a copy of expert {}; experts are 0 to {}", rank, expert, experts - 1));
      rank_of.push_back(static_cast<int>(rank));
      map.logical_of_.push_back(expert);
      ++map.begins_[index(expert) + 1];
    }
  }
  const auto bare = std::find(map.begins_.begin() + 1, map.begins_.end(), 0);
  if (bare != map.begins_.end()) throw InputError(fmt::format("expert {} is on no rank", bare - map.begins_.begin() - 1));
  for (std::size_t expert = 0; expert < index(experts); ++expert) map.begins_[expert + 1] += map.begins_[expert];
  map.copies_.resize(map.logical_of_.size());
  std::vector<int> next(map.begins_.begin(), map.begins_.end() - 1);
  for (int physical = 0; physical < map.physical(); ++physical)
    map.copies_[index(next[index(map.logical_of(physical))]++)] = physical;
  map.placement_ = Placement::from_map(std::move(rank_of), static_cast<int>(experts_of.size()));
  return map;
}

std::span<const int> ReplicaMap::copies_of(int expert) const {
  const auto begin = index(begins_[index(expert)]);
  return std::span(copies_).subspan(begin, index(begins_[index(expert) + 1]) - begin);
}

std::span<const int> ReplicaMap::experts_of(int rank) const {
  const auto own = placement_.experts_of(rank);  // a range of physical ids
  return own.empty() ? std::span<const int>() : std::span(logical_of_).subspan(index(own.front()), own.size());
}

bool ReplicaMap::is_even() const { return physical() == ranks() * placement_.max_local_experts(); }

bool ReplicaMap::operator==(const ReplicaMap& other) const {
  return logical_of_ == other.logical_of_ && std::ranges::equal(placement_.rank_map(), other.placement_.rank_map()) &&
         ranks() == other.ranks() && begins_.size() == other.begins_.size();
}

LayerSource physical_source(const LayerSource& source, const ReplicaMap& map) {
  LayerSource physical = source;
  physical.shape.experts = map.physical();
  physical.expert = [expert = source.expert, map](int id) { return expert(map.logical_of(id)); };
  return physical;
}

}  // namespace heddle
