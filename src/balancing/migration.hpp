// A rank's part of a change of placement: which experts come to it and from where, and how they are copied in parts.
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

/// Throws InputError naming an expert without a copy on a live rank.
void check_live_copies(const ReplicaMap& map, const std::vector<bool>& live);

/// Cells that are copied one behind the other, a part at a time.
class CellCopies {
 public:
  /// copy: `bytes` of cell number `cell`, from `offset` on.
  using Copy = std::function<void(std::size_t cell, std::size_t offset, std::size_t bytes)>;
  CellCopies(std::size_t cells, std::size_t cell_bytes) : cell_bytes_(cell_bytes), end_(cells * cell_bytes) {}

  bool is_complete() const { return done_ == end_; }
  /// Copies up to so many bytes more; returns how many.
  std::size_t advance(std::size_t bytes, const Copy& copy);

 private:
  std::size_t cell_bytes_, end_;
  std::size_t done_ = 0;
};

}  // namespace heddle
