// The token budget: the most tokens that a rank can bring to one call, from what the engine around the layer is
// told to run (fused-kernel article, section 5.2). It is what a layer's cap has to cover (docs/planning.md, "The token budget").
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

namespace heddle {

/// The largest cap that the planner takes, in tokens a rank.
inline constexpr int largest_cap = 1 << 20;

/// What an engine may run in one call. The ranks of a data-parallel group work on the same tokens, so each is counted with all of
/// them.
struct TokenBudget {
  std::vector<int> decode_graphs;  ///< requests of a group in each captured decode step; empty: these ranks never decode
  int request_tokens = 1;          ///< tokens that a request brings to a decode step
  int speculative_rows = 1;        ///< rows for each of these with speculative decoding: the draft tokens of a step
  /// Prompt tokens of one step, of all groups together; nullopt: these ranks never prefill. Zero and less, with which
  /// engines turn chunking off, are refused: a prompt of any length would go through in one call.
  std::optional<int> prefill_chunk;
  int data_parallel_groups = 1;  ///< that share the chunk
};

/// The most tokens that a rank can bring to a call; 0 where it makes no such calls.
struct TokenBound {
  int decode = 0;   ///< largest graph x request_tokens x speculative_rows
  int prefill = 0;  ///< chunk / groups, rounded up
  /// The smallest cap that covers both.
  int cap() const { return std::max(decode, prefill); }
};

/// Throws InputError (numbers in the message) where the budget bounds nothing, or by more than largest_cap.
TokenBound token_bound(const TokenBudget& budget);

/// Throws InputError where a rank could bring more than `cap` tokens: which step, and what would fit.
void check_cap(const TokenBudget& budget, int cap);

}  // namespace heddle
