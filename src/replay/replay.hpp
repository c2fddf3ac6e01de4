// A recording replayed over a placement of experts: loads, imbalance, copies, rows and predicted times, a layer and a step.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/balancing.hpp"
#include "heddle/plan.hpp"
#include "replay/rows.hpp"
#include "routing/recorded_file.hpp"

namespace heddle::replay {

/// A recording cut into steps. What it is made of must outlive it.
struct Source {
  int layers = 0;
  int steps = 0;
  int experts = 0;
  int topk = 0;    ///< 0: not known
  int tokens = 0;  ///< of a step, over all ranks; 0: not the same in all steps
  bool has_copies = true;
  std::function<StepRows(int layer, int step, const ReplicaMap& map, CopyRule rule)> rows;
  std::function<std::vector<double>(int layer, int step)> loads;  ///< [experts]
};

/// How a recording is cut. Steps follow each other: of prompt tokens `tokens` in a row; of decode steps a token of each prompt, or
/// as many steps' tokens as it takes.
struct Cut {
  int ranks = 1;
  int experts = 0;            ///< of the layer; at least those that the recording names, expanded
  std::optional<int> tokens;  ///< of a step; default: all prompts of one decode step, or up to 4,096 prompt tokens
  std::optional<int> steps;   ///< at most so many; default: all that there are
  int expand = 1;             ///< see heddle::expand
};
/// Throws InputError where the recording is shorter than one step or names more experts.
Source source_of(const Recording& recording, const Cut& cut);
/// Tokens of one layer and step, for those who run them.
Routing take_step(const Recording& recording, const Cut& cut, int tokens, int layer, int step);
/// Of counts: a step is a step of the file. `topk` 0: not known.
Source source_of(const ExpertLoads& loads, int topk, std::optional<int> steps);

/// One layer over the replayed steps.
struct LayerSummary {
  int layer = 0;
  std::vector<double> expert_load;  ///< pairs of each expert, all steps
  std::vector<RankRows> ranks;      ///< sums over steps; touched: the most in a step
  std::int64_t most_pairs = 0;      ///< that a rank received in a step
  std::int64_t most_copies = 0;     ///< likewise
  double expert_max_over_mean = 0;  ///< of expert_load
  double rank_max_over_mean = 0;    ///< of pairs by rank, all steps together
  double step_max_over_mean = 0;    ///< of pairs by rank in a step, mean over steps
  double worst_max_over_mean = 0;   ///< of the worst step
  std::optional<double> copies_a_token;
  std::map<Way, double> seconds;  ///< predicted for the slowest rank, mean over steps; only ways that can be predicted
};

/// All layers under one placement.
struct PlacementReplay {
  std::string name;  ///< contiguous, greedy
  int replicas = 0;
  std::vector<LayerSummary> layers;
  std::vector<ReplicaMap> maps;  ///< a layer of `layers`

  double step_max_over_mean() const;   ///< mean over layers
  double worst_max_over_mean() const;  ///< of all layers and steps
  std::optional<double> copies_a_token() const;
  std::map<Way, double> step_seconds() const;  ///< sums over layers
};

struct ReplayOptions {
  int ranks = 1;
  int replicas = 0;                    ///< 0: no placement with replicas
  std::vector<int> layers;             ///< of the recording
  std::vector<Way> ways;               ///< to predict
  std::optional<PlanRequest> request;  ///< the layer and machine to predict for; empty: no times
  int nodes = 1;                       ///< as BalanceOptions, of the greedy placements
  std::optional<int> groups = {};      ///< likewise
  CopyRule rule = CopyRule::levelled;  ///< where there are replicas; of counts alone copies share evenly
};

struct ReplayResult {
  /// contiguous; greedy, from the loads of these steps; the same with replicas, where asked for.
  std::vector<PlacementReplay> placements;
  /// The same placements over every second step, the greedy ones from the loads of the steps between: what holds for steps that
  /// have not been seen. Empty where there is one step.
  std::vector<PlacementReplay> unseen;
};

ReplayResult replay(const Source& source, const ReplayOptions& options);

}  // namespace heddle::replay
