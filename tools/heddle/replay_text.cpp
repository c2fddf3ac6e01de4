// The tables of heddle replay.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "provenance.hpp"
#include "replay.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using replay::LayerSummary;
using replay::PlacementReplay;

void print_head(const ReplayReport& report) {
  const replay::Source& source = report.source;
  fmt::print("{}: {}, {} of {}", report.arguments.recording, report.kind,
             count_of(static_cast<std::int64_t>(report.options.layers.size()), "layer"), source.layers);
  if (source.topk > 0) fmt::print(", top-{}", source.topk);
  fmt::print(" of {} experts\n", source.experts);
  fmt::print("  {}{} on {}\n", count_of(source.steps, "step"), source.tokens > 0 ? fmt::format(" of {} tokens", source.tokens) : "",
             count_of(report.options.ranks, "rank"));
  for (const std::string& note : report.notes) fmt::print("  {}\n", note);
}

/// Pairs of each rank over the mean; of many ranks the least and the most.
std::string ranks_text(const LayerSummary& layer) {
  constexpr std::size_t most_shown = 8;
  std::vector<double> pairs;
  double sum = 0;
  for (const replay::RankRows& rank : layer.ranks) {
    pairs.push_back(static_cast<double>(rank.pairs.received));
    sum += pairs.back();
  }
  for (double& value : pairs) value *= sum == 0 ? 0 : static_cast<double>(layer.ranks.size()) / sum;
  if (pairs.size() <= most_shown) return fmt::format("{:.2f}", fmt::join(pairs, " "));
  const auto [least, most] = std::ranges::minmax(pairs);
  return fmt::format("{:.2f} to {:.2f}", least, most);
}

void print_layers(const ReplayReport& report) {
  fmt::print("\nContiguous placement: max/mean of rows, by expert and by rank; rank load as parts of the mean\n\n");
  fmt::print("{:>5}  {:>7}  {:>5}  {:>6}  {:>6}  {:>12}  {:>14}  {}\n", "layer", "experts", "ranks", "a step", "worst",
             "copies/token", "rows, busiest", "load of ranks");
  for (const LayerSummary& layer : report.result.placements.front().layers) {
    fmt::print("{:>5}  {:>7.2f}  {:>5.2f}  {:>6.2f}  {:>6.2f}  {:>12}  {:>14}  {}\n", layer.layer, layer.expert_max_over_mean,
               layer.rank_max_over_mean, layer.step_max_over_mean, layer.worst_max_over_mean,
               layer.copies_a_token ? fmt::format("{:.2f}", *layer.copies_a_token) : "-",
               report.source.has_copies ? fmt::format("{} / {}", layer.most_copies, layer.most_pairs)
                                        : fmt::format("{}", layer.most_pairs),
               ranks_text(layer));
  }
  fmt::print("  experts, ranks: over all steps; a step: mean of the steps' max/mean by rank; worst: of one step\n");
  fmt::print("  rows, busiest: most that a rank receives in a step, {}\n",
             report.source.has_copies ? "one a rank that needs the token / one an expert" : "one an expert");
}

std::string title_of(const PlacementReplay& placement) {
  return placement.replicas > 0 ? fmt::format("{} + {} replicas", placement.name, placement.replicas) : placement.name;
}

void print_placement(const PlacementReplay& placement) {
  const auto copies = placement.copies_a_token();
  fmt::print("{:<24}  {:>6.3f}  {:>6.3f}  {:>12}\n", title_of(placement), placement.step_max_over_mean(),
             placement.worst_max_over_mean(), copies ? fmt::format("{:.2f}", *copies) : "-");
}

void print_placements(const ReplayReport& report) {
  fmt::print("\nPlacements (predicted, not run): max/mean of rows by rank, mean over layers\n\n");
  fmt::print("{:<24}  {:>6}  {:>6}  {:>12}\n", "placement", "a step", "worst", "copies/token");
  for (const PlacementReplay& placement : report.result.placements) print_placement(placement);
  if (report.result.unseen.empty()) {
    fmt::print(
        "  the greedy ones know the loads of the step that they are judged by; with more steps half of them would be kept "
        "unseen\n");
    return;
  }
  fmt::print("  on steps that the greedy ones have not seen (every second one):\n");
  for (const PlacementReplay& placement : report.result.unseen) print_placement(placement);
}

std::string saving(double before, double after) {
  return fmt::format("{:.1f} us ({:+.1f} %)", after * 1e6, (after / before - 1) * 100);
}

void print_times(const ReplayReport& report) {
  const auto& placements = report.result.unseen.empty() ? report.result.placements : report.result.unseen;
  if (!report.options.request) {
    fmt::print("\nTimes need a layer: --preset NAME, or --hidden and --intermediate\n");
    return;
  }
  const PlanRequest& request = *report.options.request;
  const auto now = report.result.placements.front().step_seconds();
  if (now.empty()) {
    fmt::print("\nTimes: {} lacks rates for a prediction (heddle plan --list)\n", request.machine.title);
    return;
  }
  fmt::print(
      "\nTimes of a step's {}, hidden {}, intermediate {}, {} weights: predicted for {} by the planner's model, the slowest "
      "rank's\n\n",
      count_of(static_cast<std::int64_t>(report.options.layers.size()), "layer"), request.shape.hidden, request.shape.intermediate,
      word_of(kinds, request.weights), request.machine.title);
  fmt::print("{:<12}  {:>10}  {:>11}", "way", "a layer", "a step");
  for (std::size_t i = 1; i < placements.size(); ++i) fmt::print("  {:>26}", title_of(placements[i]));
  fmt::print("\n");
  const auto before = placements.front().step_seconds();
  for (const auto& [way, seconds] : now) {
    fmt::print("{:<12}  {:>7.1f} us  {:>8.1f} us", name(way), seconds * 1e6 / static_cast<double>(report.options.layers.size()),
               seconds * 1e6);
    for (std::size_t i = 1; i < placements.size(); ++i)
      fmt::print("  {:>26}", saving(before.at(way), placements[i].step_seconds().at(way)));
    fmt::print("\n");
  }
  if (!report.result.unseen.empty()) fmt::print("  placements: of a step that they have not seen, against the contiguous one's\n");
}

void print_measured(const ReplayReport& report) {
  if (report.measured.empty()) return;
  const bool host = report.arguments.engine == "host";
  const MeasuredPlacement& contiguous = report.measured.front();
  const MeasuredPlacement* copies = report.measured.size() > 1 ? &report.measured[1] : nullptr;
  fmt::print("\nMeasured on {}\n\n",
             host ? "the host engine of this machine, ranks as threads: it tells nothing of a GPU" : "this machine's GPUs");
  fmt::print("{:<12}  {:>10}  {:>11}  {:>8}", "contiguous", "a layer", "a step", "max/mean");
  if (copies != nullptr) fmt::print("  {:>24}  {:>8}", fmt::format("a step, {} replicas", copies->replicas), "max/mean");
  fmt::print("\n");
  for (const auto& [way, times] : contiguous.ways) {
    fmt::print("{:<12}  {:>7.1f} ms  {:>8.1f} ms  {:>8.3f}", name(way), times.step * 1e3 / static_cast<double>(times.layers.size()),
               times.step * 1e3, times.max_over_mean);
    if (copies != nullptr) {
      const MeasuredWay& with = copies->ways.at(way);
      fmt::print("  {:>24}  {:>8.3f}", fmt::format("{:.1f} ms ({:+.1f} %)", with.step * 1e3, (with.step / times.step - 1) * 100),
                 with.max_over_mean);
    }
    fmt::print("\n");
  }
  fmt::print("  max/mean: of the pairs that ranks computed, by rank in a step\n");
}

}  // namespace

void print_replay(const ReplayReport& report) {
  print_head(report);
  print_layers(report);
  print_placements(report);
  print_times(report);
  print_measured(report);
}

}  // namespace heddle::tool
