// What the ranks bring in a few consecutive calls, tagged so that every stale or misplaced byte shows,
// and what must come out. Values are small integers, so all sums are exact in any order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exchange/sending.hpp"
#include "formats/row_format.hpp"

namespace heddle::explorer {

struct Problem {
  int ranks = 2;
  int workers = 1;  ///< a rank
  int experts = 2;
  int topk = 1;
  int queue_rows = 2;  ///< normal only
  int hidden = 8;
  Wire wire = Wire::bf16;
  std::vector<std::vector<int>> tokens = {{2, 2}, {2, 2}};  ///< [call][rank]
  std::vector<bool> live = {};                              ///< empty: all
  int routing = 0;                                          ///< draws the choices; one in eight is -1

  std::string name() const;
};

class Batches {
 public:
  explicit Batches(const Problem& problem);

  const Problem& problem() const { return problem_; }
  int calls() const { return static_cast<int>(problem_.tokens.size()); }
  bool live(int rank) const { return problem_.live.empty() || problem_.live[static_cast<std::size_t>(rank)]; }
  ExchangeShape shape() const;
  RowFormat wire() const { return {problem_.wire, problem_.hidden, {}, 1.0f}; }
  RowFormat returned() const { return {Wire::bf16, problem_.hidden, {}, 1.0f}; }
  PlacementView placement() const {
    return {rank_of_.data(), local_index_.data(), experts_on_.data(), static_cast<int>(rank_of_.size())};
  }
  int local_experts(int rank) const { return experts_on_[static_cast<std::size_t>(rank)]; }
  int first_expert(int rank) const;
  SendInput input(int call, int rank) const;
  /// Largest batch of a call.
  int largest(int call) const;

  /// Tokens of `source` that have an expert on `rank`, in order.
  std::vector<int> tokens_to(int call, int source, int rank) const;
  /// Pairs of `source` that chose `expert`, in order.
  std::vector<int> pairs_of(int call, int source, int expert) const;
  /// The token's row as it travels.
  std::vector<std::byte> row(int call, int source, int token) const;
  /// What an expert makes of a row, without its weight.
  std::vector<float> expert_result(int call, int source, int token, int expert) const;
  /// Weighted results of a token's experts on one rank, summed.
  std::vector<bf16> partial_sum(int call, int source, int token, int rank) const;
  /// Tokens of all ranks in a call, and of those before `rank`.
  int all_tokens(int call) const { return tokens_before(call, problem_.ranks); }
  int tokens_before(int call, int rank) const;
  /// A rank's outputs [tokens, hidden].
  std::vector<bf16> outputs(int call, int rank) const;

 private:
  struct Batch {
    std::vector<bf16> hidden;
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
  };
  const Batch& batch(int call, int rank) const { return batches_[static_cast<std::size_t>(call * problem_.ranks + rank)]; }
  Batch draw(int call, int rank) const;

  Problem problem_;
  std::vector<int> rank_of_;
  std::vector<int> local_index_;
  std::vector<int> experts_on_;
  std::vector<Batch> batches_;
};

/// bf16 values of small integers.
std::vector<bf16> to_bf16s(const std::vector<float>& values);

}  // namespace heddle::explorer
