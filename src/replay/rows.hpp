// What the tokens of one layer and step ask of each rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "heddle/plan.hpp"
#include "replay/placed.hpp"

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

/// Tokens live on ranks in order, split evenly; the first ranks take the remainder. Throws InputError as check_choices does.
StepRows count_rows(const Routing& routing, const Placed& placed);
/// From selections of each expert. Copies of an expert share its load evenly, the first ones taking the remainder.
StepRows count_rows(std::span<const std::int64_t> counts, int topk, const Placed& placed);

/// A rank's work by a way; empty where the way's rows are not known.
std::optional<RankWork> work_of(Way way, const StepRows& step, int rank);

/// The model's time of the slowest rank.
std::optional<TimeEstimate> slowest(Way way, const PlanRequest& request, const StepRows& step);

/// The greatest over the mean: 1 where all are equal, 0 where all are 0.
double max_over_mean(std::span<const double> values);

}  // namespace heddle::replay
