// Where the members of a group write what the others read between calls: counts of pairs, and from which call on they have the
// weights of a change. Members are ranks on the host engine, processes on GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/group.hpp"
#include "signal/words.hpp"

namespace heddle {

/// Words and counts are there twice, in turn: who has gone on to the next change or look may write while another still reads those
/// of the one before, but not those of the one after (docs/balancing.md).
class BalancingBoard {
 public:
  /// Collective over the live members, which `members` must outlive.
  BalancingBoard(Group& members, int experts);

  /// counts [experts] of look number `look`.
  void tell_counts(std::int64_t look, std::span<const std::int64_t> counts);
  /// The sum over all members, each of which has told.
  std::vector<std::int64_t> all_counts(std::int64_t look) const;
  /// This member has all that change number `change` wants of it before call number `call` begins.
  void say_ready(std::int64_t change, std::int64_t call);
  /// Did every live member say a call in (began, seen]? Of words that are written meanwhile some members see the new one and some
  /// the old one; where neither is in that range, all come to the same answer.
  bool all_ready(std::int64_t change, std::int64_t began, std::int64_t seen) const;
  /// Collective end.
  void close();

 private:
  Word& ready(int member, std::int64_t change) const;
  std::int64_t* counts_of(int member, std::int64_t look) const;

  Group& members_;
  std::size_t experts_;
  std::size_t counts_stride_;
  HeapMapping heap_;
};

}  // namespace heddle
