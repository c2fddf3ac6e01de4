// What the tokens of one layer and step ask of each rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "heddle/balancing.hpp"
#include "heddle/plan.hpp"

namespace heddle::replay {

/// Rows of one kind that a rank receives and sends: pairs (one row a chosen expert) or copies (one row a rank that is needed).
struct Rows {
  std::int64_t received = 0;         ///< the rank's own included
  std::int64_t received_remote = 0;  ///< from other ranks
  std::int64_t sent_remote = 0;      ///< to other ranks
};

struct RankRows {
  std::int64_t tokens = 0;  ///< whose home this is
  Rows pairs;
  Rows copies;
  int touched = 0;  ///< its experts that have rows
};

struct StepRows {
  std::int64_t tokens = 0;
  bool has_copies = true;  ///< false where loads alone are known; then sources are taken to be even, too
  std::vector<RankRows> ranks;
};

/// How many tokens live on each rank: they do in order, split evenly, and the first ranks take the remainder.
std::vector<int> homes_of(int tokens, int ranks);

/// Tokens live as homes_of says, and pairs take copies as choose_copies says. Throws InputError as check_choices does.
StepRows count_rows(const Routing& routing, const ReplicaMap& map, CopyRule rule);
/// From selections of each expert. Copies of an expert share its load evenly, the first ones taking the remainder.
StepRows count_rows(std::span<const std::int64_t> counts, int topk, const ReplicaMap& map);

/// A rank's work by a way; empty where the way's rows are not known.
std::optional<RankWork> work_of(Way way, const StepRows& step, int rank);

/// The model's time of the slowest rank.
std::optional<TimeEstimate> slowest(Way way, const PlanRequest& request, const StepRows& step);

}  // namespace heddle::replay
