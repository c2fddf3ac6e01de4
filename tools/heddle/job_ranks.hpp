// What the engines share of a job: what a rank is given, and its one call.
#pragma once

#include <functional>
#include <vector>

#include "heddle/layer.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "outcome.hpp"

namespace heddle::tool {

struct Job {
  const Inputs& inputs;
  LayerOptions options;
  Placement placement;
  std::vector<int> firsts;  ///< first token of each rank
  int most_tokens = 0;
  bf16* output = nullptr;  ///< [T, H]
  RankOutcome* outcomes = nullptr;
  JobTrace trace;
};

/// Runs a rank's part of a job and notes how it ended.
inline void attempt(const Job& job, int rank, const std::function<void()>& part) { attempt(job.outcomes[rank], rank, part); }
/// The one call of a rank's layer, its outputs in the job's; those before it, where it is traced. `start`: meets all ranks; the
/// time counts from there.
void call_layer(const Job& job, int rank, MoeLayer& layer, const std::function<void()>& start);
/// Notes what a layer says of its choice.
void note_choice(RankOutcome& outcome, const WayChoice& choice);
/// A thread a rank of [first, first + count), none before all are there; waits for them.
void run_in_threads(int first, int count, const std::function<void(int)>& body);

}  // namespace heddle::tool
