// One rank's part of a change of placement: which experts come to it, from where, and their bytes until they are put in place.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "heddle/balancing.hpp"

namespace heddle {

/// An expert that comes to a rank.
struct Move {
  int place = 0;       ///< which of the rank's experts it replaces
  int from_rank = 0;   ///< who has it
  int from_place = 0;  ///< as which of its experts
  bool operator==(const Move&) const = default;
};

/// What `rank` has to fetch. From itself where it has the expert, else from ranks of its own node if any has it; ranks take
/// different ones of several. Only live ranks are asked; each expert has a copy on one.
std::vector<Move> moves_of(const ReplicaMap& from, const ReplicaMap& to, int rank, int nodes, const std::vector<bool>& live);

class Migration {
 public:
  /// read: `bytes` of the cell at a rank's place, from `offset` on, to `to`.
  using Read = std::function<void(const Move& move, std::size_t offset, std::size_t bytes, std::byte* to)>;
  Migration(ReplicaMap to, std::vector<Move> moves, std::size_t cell_bytes, Read read);

  const ReplicaMap& to() const { return to_; }
  const std::vector<Move>& moves() const { return moves_; }
  bool is_complete() const { return done_ == moves_.size() * cell_bytes_; }
  /// Copies up to so many bytes more; returns how many.
  std::size_t advance(std::size_t bytes);
  /// The bytes of moves()[i], once complete.
  const std::byte* fetched(std::size_t i) const { return staged_.data() + i * cell_bytes_; }

 private:
  ReplicaMap to_;
  std::vector<Move> moves_;
  std::size_t cell_bytes_;
  Read read_;
  std::vector<std::byte> staged_;  ///< a cell a move
  std::size_t done_ = 0;
};

}  // namespace heddle
