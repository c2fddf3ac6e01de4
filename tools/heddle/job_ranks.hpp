// What the engines share of a job: what a rank is given, what it leaves, and its one call.
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "heddle/layer.hpp"
#include "inputs.hpp"
#include "job.hpp"

namespace heddle::tool {

/// What a rank leaves for the command, in memory that processes share.
struct RankOutcome {
  enum class State : int { silent, done, bad_input, fault };
  State state = State::silent;
  bool own_fault = false;  ///< this rank itself gave up, it does not only repeat another's
  double seconds = 0;
  std::size_t heap_bytes = 0;
  std::uint64_t kernels = 0;  ///< launched by this rank's process, noted by its first rank
  LayerReport report;
  char message[1000] = {};
  char choice[3000] = {};  ///< way auto: what rank 0's layer says of its choice
};
static_assert(std::is_trivially_copyable_v<RankOutcome>);

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

/// Runs a rank's part and notes how it ended.
void attempt(const Job& job, int rank, const std::function<void()>& part);
/// The one call of a rank's layer, its outputs in the job's; those before it, where it is traced. `start`: meets all ranks; the
/// time counts from there.
void call_layer(const Job& job, int rank, MoeLayer& layer, const std::function<void()>& start);
/// Notes what a layer says of its choice.
void note_choice(RankOutcome& outcome, const WayChoice& choice);
/// A thread a rank of [first, first + count), none before all are there; waits for them.
void run_in_threads(int first, int count, const std::function<void(int)>& body);

}  // namespace heddle::tool
