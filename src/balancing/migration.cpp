#include "balancing/migration.hpp"

#include <algorithm>
#include <utility>

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

Migration::Migration(ReplicaMap to, std::vector<Move> moves, std::size_t cell_bytes, Read read)
    : to_(std::move(to)),
      moves_(std::move(moves)),
      cell_bytes_(cell_bytes),
      read_(std::move(read)),
      staged_(moves_.size() * cell_bytes) {}

std::size_t Migration::advance(std::size_t bytes) {
  const std::size_t begin = done_;
  while (!is_complete() && done_ - begin < bytes) {
    const std::size_t offset = done_ % cell_bytes_;
    const std::size_t part = std::min(cell_bytes_ - offset, bytes - (done_ - begin));
    read_(moves_[done_ / cell_bytes_], offset, part, staged_.data() + done_);
    done_ += part;
  }
  return done_ - begin;
}

}  // namespace heddle
