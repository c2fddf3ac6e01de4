#include "replay/replay.hpp"

#include <algorithm>
#include <numeric>

namespace heddle::replay {

namespace {

std::vector<double> loads_of(const Source& source, int layer, std::span<const int> steps) {
  std::vector<double> sums(static_cast<std::size_t>(source.experts), 0.0);
  for (const int step : steps) {
    const std::vector<double> loads = source.loads(layer, step);
    for (std::size_t expert = 0; expert < sums.size(); ++expert) sums[expert] += loads[expert];
  }
  return sums;
}

void add(Rows& sum, const Rows& rows) {
  sum.received += rows.received;
  sum.received_remote += rows.received_remote;
  sum.sent_remote += rows.sent_remote;
}

std::vector<double> pairs_by_rank(std::span<const RankRows> ranks) {
  std::vector<double> pairs;
  for (const RankRows& rank : ranks) pairs.push_back(static_cast<double>(rank.pairs.received));
  return pairs;
}

/// One layer, step by step.
class LayerReplay {
 public:
  LayerReplay(const Source& source, const ReplayOptions& options, int layer) : source_(source), options_(options) {
    summary_.layer = layer;
    summary_.ranks.resize(static_cast<std::size_t>(options.ranks));
  }

  void add_step(const StepRows& step) {
    for (std::size_t rank = 0; rank < step.ranks.size(); ++rank) {
      const RankRows& rows = step.ranks[rank];
      RankRows& sum = summary_.ranks[rank];
      sum.tokens += rows.tokens;
      add(sum.pairs, rows.pairs);
      add(sum.copies, rows.copies);
      sum.touched = std::max(sum.touched, rows.touched);
      summary_.most_pairs = std::max(summary_.most_pairs, rows.pairs.received);
      summary_.most_copies = std::max(summary_.most_copies, rows.copies.received);
    }
    const double imbalance = max_over_mean(pairs_by_rank(step.ranks));
    summary_.step_max_over_mean += imbalance;
    summary_.worst_max_over_mean = std::max(summary_.worst_max_over_mean, imbalance);
    if (options_.request) {
      for (const Way way : options_.ways) {
        if (const auto time = slowest(way, *options_.request, step)) summary_.seconds[way] += time->total;
      }
    }
    tokens_ += step.tokens;
    ++steps_;
  }

  LayerSummary finish(std::vector<double> expert_load) {
    summary_.expert_load = std::move(expert_load);
    summary_.expert_max_over_mean = max_over_mean(summary_.expert_load);
    summary_.rank_max_over_mean = max_over_mean(pairs_by_rank(summary_.ranks));
    summary_.step_max_over_mean /= steps_;
    for (auto& [way, seconds] : summary_.seconds) seconds /= steps_;
    if (source_.has_copies && tokens_ > 0) {
      std::int64_t copies = 0;
      for (const RankRows& rank : summary_.ranks) copies += rank.copies.received;
      summary_.copies_a_token = static_cast<double>(copies) / static_cast<double>(tokens_);
    }
    return std::move(summary_);
  }

 private:
  const Source& source_;
  const ReplayOptions& options_;
  LayerSummary summary_;
  std::int64_t tokens_ = 0;
  int steps_ = 0;
};

/// `from`: the steps whose loads a greedy placement knows; empty: the contiguous one.
PlacementReplay replay_placement(const Source& source, const ReplayOptions& options, std::span<const int> steps,
                                 std::span<const int> from, int replicas) {
  PlacementReplay result{from.empty() ? "contiguous" : "greedy", replicas, {}, {}};
  for (const int layer : options.layers) {
    const ReplicaMap map =
        from.empty() ? ReplicaMap::single(Placement::contiguous(source.experts, options.ranks))
                     : balance_experts(loads_of(source, layer, from), {options.ranks, replicas, options.nodes, options.groups});
    LayerReplay one(source, options, layer);
    for (const int step : steps) one.add_step(source.rows(layer, step, map, options.rule));
    result.layers.push_back(one.finish(loads_of(source, layer, steps)));
    result.maps.push_back(map);
  }
  return result;
}

std::vector<PlacementReplay> replay_all(const Source& source, const ReplayOptions& options, std::span<const int> steps,
                                        std::span<const int> from) {
  std::vector<PlacementReplay> all{replay_placement(source, options, steps, {}, 0),
                                   replay_placement(source, options, steps, from, 0)};
  if (options.replicas > 0) all.push_back(replay_placement(source, options, steps, from, options.replicas));
  return all;
}

}  // namespace

double PlacementReplay::step_max_over_mean() const {
  double sum = 0;
  for (const LayerSummary& layer : layers) sum += layer.step_max_over_mean;
  return sum / static_cast<double>(layers.size());
}

double PlacementReplay::worst_max_over_mean() const {
  double worst = 0;
  for (const LayerSummary& layer : layers) worst = std::max(worst, layer.worst_max_over_mean);
  return worst;
}

std::optional<double> PlacementReplay::copies_a_token() const {
  double sum = 0;
  for (const LayerSummary& layer : layers) {
    if (!layer.copies_a_token) return std::nullopt;
    sum += *layer.copies_a_token;
  }
  return sum / static_cast<double>(layers.size());
}

std::map<Way, double> PlacementReplay::step_seconds() const {
  std::map<Way, double> sums;
  for (const LayerSummary& layer : layers) {
    for (const auto& [way, seconds] : layer.seconds) sums[way] += seconds;
  }
  return sums;
}

ReplayResult replay(const Source& source, const ReplayOptions& options) {
  std::vector<int> all, seen, unseen;
  for (int step = 0; step < source.steps; ++step) {
    all.push_back(step);
    (step % 2 == 0 ? seen : unseen).push_back(step);
  }
  ReplayResult result;
  result.placements = replay_all(source, options, all, all);
  if (!unseen.empty()) result.unseen = replay_all(source, options, unseen, seen);
  return result;
}

}  // namespace heddle::replay
