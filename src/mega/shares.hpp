// Many pairs numbered by squads that wait for each other nowhere, so that not all of them need be there at once: a squad numbers
// those of its own share of the tokens, and counts by itself what comes before them.
#pragma once

#include "exchange/numbering.hpp"

namespace heddle {

/// Pairs that a squad numbers at a time, and counts of all its chunks together: what its memory has room for.
constexpr int share_pairs = 4096;
constexpr int share_counts = 12288;
/// Values of a squad's memory that shares of pairs for so many experts want.
constexpr int share_values(int experts) { return 2 * experts + share_pairs + share_counts; }

struct TokenShare {
  int begin = 0;
  int end = 0;
};
/// The last squad's share ends with the last token.
HEDDLE_HOST_DEVICE constexpr TokenShare share_of(int tokens, int squad, int squads) {
  const auto all = static_cast<long long>(tokens);
  return {static_cast<int>(all * squad / squads), static_cast<int>(all * (squad + 1) / squads)};
}

/// The numbers of a squad's pairs, a batch at a time. All warps of the squad make the same calls. Pair i is for expert_of(i), below
/// 0 for none.
template <Worker W, class ExpertOf>
class ShareNumbers {
 public:
  HEDDLE_PROTOCOL ShareNumbers(W& w, int experts, ExpertOf expert_of)
      : w_(w), experts_(experts), expert_of_(expert_of), before_(w.squad_array(experts)) {
    own_.totals = w.squad_array(experts);
    own_.numbers = w.squad_array(share_pairs);
    own_.before = w.squad_array(share_counts);
    most_chunks_ = share_counts / experts < w.squad_count() ? share_counts / experts : w.squad_count();
  }

  /// The share begins with pair `first`.
  HEDDLE_PROTOCOL void begin(int first) {
    if (w_.squad_index() == 0) w_.lanes(experts_, [&](int e) { before_[e] = 0; });
    w_.squad_barrier();
    w_.add_kinds(first, expert_of_, before_);
    w_.squad_barrier();
  }
  /// The next n pairs, from `first` on; n is at most share_pairs.
  HEDDLE_PROTOCOL void number(int first, int n) {
    first_ = first;
    const int chunk = (n + most_chunks_ * set_chunk - 1) / (most_chunks_ * set_chunk) * set_chunk;
    number_kinds(
        w_, Crew::squad, chunk, n, experts_, [&](int i) { return expert_of_(first + i); }, own_);
  }
  /// Among all of the rank's pairs for that expert.
  HEDDLE_PROTOCOL int of(int pair) const { return before_[expert_of_(pair)] + own_.numbers[pair - first_]; }
  /// Nobody asks for the batch's numbers any more.
  HEDDLE_PROTOCOL void finish() {
    w_.squad_barrier();
    if (w_.squad_index() == 0) w_.lanes(experts_, [&](int e) { before_[e] += own_.totals[e]; });
    w_.squad_barrier();
  }
  /// [experts]: pairs for each up to the end of the share.
  HEDDLE_PROTOCOL const std::int32_t* counts() const { return before_; }

 private:
  W& w_;
  int experts_;
  ExpertOf expert_of_;
  std::int32_t* before_;
  Numbering own_;
  int most_chunks_ = 1;
  int first_ = 0;
};

}  // namespace heddle
