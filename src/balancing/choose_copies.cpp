#include <fmt/format.h>

#include <algorithm>

#include "balancing/shares.hpp"
#include "heddle/balancing.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

void check_counts(const ReplicaMap& map, std::size_t counts) {
  if (counts == index(map.experts())) return;
  throw InputError(fmt::format("choice of copies: {} counts of {} experts", counts, map.experts()));
}

/// A source's rows by rank, while they are dealt.
class Levels {
 public:
  Levels(const ReplicaMap& map, int source) : map_(map), source_(source), rows_(index(map.ranks()), 0) {}

  void add(int physical, int rows) { rows_[rank_of(physical)] += rows; }

  /// Deals an expert's rows to its copies.
  void deal(int expert, int rows, std::vector<int>& shares) {
    const auto copies = map_.copies_of(expert);
    Dealt dealt;
    dealt.rows = rows;
    std::vector<bool> reached;
    for (const int copy : copies) {
      std::int64_t fill = 0;
      for (const int other : copies) fill += std::max(0, level(copy) - level(other));
      reached.push_back(fill <= rows);
      if (fill <= rows) dealt.add(level(copy));
    }
    for (std::size_t i = 0; i < copies.size(); ++i) {
      int before = 0;
      for (std::size_t j = 0; j < copies.size(); ++j) before += reached[j] && comes_before(copies[j], copies[i]) ? 1 : 0;
      shares[index(copies[i])] = reached[i] ? dealt.share(level(copies[i]), before) : 0;
    }
    for (const int copy : copies) add(copy, shares[index(copy)]);
  }

 private:
  std::size_t rank_of(int physical) const { return index(map_.placement().rank_of(physical)); }
  int level(int physical) const { return rows_[rank_of(physical)]; }
  /// Of two copies on one rank the lower one.
  bool comes_before(int a, int b) const {
    const auto place = [&](int copy) { return places_behind(map_.placement().rank_of(copy), source_, map_.ranks()); };
    return place(a) != place(b) ? place(a) < place(b) : a < b;
  }

  const ReplicaMap& map_;
  int source_;
  std::vector<int> rows_;
};

std::vector<int> level_rows(const ReplicaMap& map, int source, std::span<const int> counts) {
  std::vector<int> shares(index(map.physical()), 0);
  Levels levels(map, source);
  for (int expert = 0; expert < map.experts(); ++expert) {
    const auto copies = map.copies_of(expert);
    if (copies.size() > 1) continue;
    shares[index(copies.front())] = counts[index(expert)];
    levels.add(copies.front(), counts[index(expert)]);
  }
  for (int round = 0; round < levelling_rounds; ++round) {
    for (int expert = 0; expert < map.experts(); ++expert) {
      const auto copies = map.copies_of(expert);
      if (copies.size() == 1) continue;
      for (const int copy : copies) levels.add(copy, -shares[index(copy)]);
      levels.deal(expert, counts[index(expert)], shares);
    }
  }
  return shares;
}

std::vector<int> take_turns(const ReplicaMap& map, int source, std::span<const int> counts) {
  std::vector<int> shares(index(map.physical()), 0);
  for (int expert = 0; expert < map.experts(); ++expert) {
    const auto copies = map.copies_of(expert);
    const auto count = static_cast<int>(copies.size());
    for (int i = 0; i < count; ++i)
      shares[index(copies[index(i)])] = turns_of_copy(counts[index(expert)], i, count, source, expert);
  }
  return shares;
}

}  // namespace

std::vector<int> share_rows(const ReplicaMap& map, CopyRule rule, int source, std::span<const int> counts) {
  check_counts(map, counts.size());
  return rule == CopyRule::levelled ? level_rows(map, source, counts) : take_turns(map, source, counts);
}

void choose_copies(const ReplicaMap& map, CopyRule rule, int source, std::span<const std::int32_t> ids,
                   std::span<std::int32_t> physical, std::span<std::int64_t> counts) {
  check_counts(map, counts.size());
  if (ids.size() != physical.size())
    throw InputError(fmt::format("choice of copies: {} ids, places for {}", ids.size(), physical.size()));
  std::vector<int> pairs(counts.size(), 0);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < -1 || ids[i] >= map.experts()) {
      throw InputError(
          fmt::format("choice of copies: pair {} has expert id {}, which is outside [-1, {})", i, ids[i], map.experts()));
    }
    if (ids[i] >= 0) ++pairs[index(ids[i])];
  }
  std::vector<int> left = share_rows(map, rule, source, pairs);
  std::vector<int> next(map.begins().begin(), map.begins().end() - 1);  // where an expert's pairs go at present, within copies()
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) {
      physical[i] = -1;
      continue;
    }
    int& at = next[index(ids[i])];
    while (left[index(map.copies()[index(at)])] == 0) ++at;
    physical[i] = map.copies()[index(at)];
    --left[index(physical[i])];
  }
  for (std::size_t expert = 0; expert < counts.size(); ++expert) counts[expert] += pairs[expert];
}

Routing choose_copies(const ReplicaMap& map, CopyRule rule, const Routing& routing, std::span<const int> tokens_of_rank) {
  Routing physical = routing;
  std::vector<std::int64_t> counts(index(map.experts()));
  std::size_t first = 0;
  for (std::size_t rank = 0; rank < tokens_of_rank.size(); ++rank) {
    const std::size_t pairs = index(tokens_of_rank[rank]) * index(routing.topk);
    if (first + pairs > routing.ids.size()) break;
    choose_copies(map, rule, static_cast<int>(rank), std::span(routing.ids).subspan(first, pairs),
                  std::span(physical.ids).subspan(first, pairs), counts);
    first += pairs;
  }
  if (first != routing.ids.size() || tokens_of_rank.size() != index(map.ranks())) {
    throw InputError(fmt::format("choice of copies: {} tokens on {} ranks, but the ranks of {} have another number of them",
                                 routing.tokens, map.ranks(), tokens_of_rank.size()));
  }
  return physical;
}

}  // namespace heddle
