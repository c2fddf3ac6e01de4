#include "balancing/migration.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// The copy of an expert that `rank` reads.
int copy_to_read(const ReplicaMap& map, int expert, int rank, int nodes, const std::vector<bool>& live) {
  const auto rank_of = [&](int copy) { return map.placement().rank_of(copy); };
  const auto node_of = [&](int of_rank) { return of_rank * nodes / map.ranks(); };
  std::vector<int> near, all;
  for (const int copy : map.copies_of(expert)) {
    if (rank_of(copy) == rank) return copy;
    if (!live[index(rank_of(copy))]) continue;
    all.push_back(copy);
    if (node_of(rank_of(copy)) == node_of(rank)) near.push_back(copy);
  }
  const std::vector<int>& copies = near.empty() ? all : near;
  return copies[index(rank + expert) % copies.size()];
}

}  // namespace

std::vector<Move> moves_of(const ReplicaMap& from, const ReplicaMap& to, int rank, int nodes, const std::vector<bool>& live) {
  std::vector<Move> moves;
  const auto now = from.experts_of(rank), then = to.experts_of(rank);
  for (std::size_t place = 0; place < then.size(); ++place) {
    if (now[place] == then[place]) continue;
    const int copy = copy_to_read(from, then[place], rank, nodes, live);
    moves.push_back({static_cast<int>(place), from.placement().rank_of(copy), from.placement().local_index(copy)});
  }
  return moves;
}

void check_live_copies(const ReplicaMap& map, const std::vector<bool>& live) {
  for (int expert = 0; expert < map.experts(); ++expert) {
    const auto copies = map.copies_of(expert);
    if (std::ranges::none_of(copies, [&](int copy) { return live[index(map.placement().rank_of(copy))]; }))
      throw InputError(fmt::format("expert {} has no copy on a live rank", expert));
  }
}

std::size_t CellCopies::advance(std::size_t bytes, const Copy& copy) {
  const std::size_t begin = done_;
  while (!is_complete() && done_ - begin < bytes) {
    const std::size_t offset = done_ % cell_bytes_;
    const std::size_t part = std::min(cell_bytes_ - offset, bytes - (done_ - begin));
    copy(done_ / cell_bytes_, offset, part);
    done_ += part;
  }
  return done_ - begin;
}

}  // namespace heddle
