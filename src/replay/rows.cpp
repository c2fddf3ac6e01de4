#include "replay/rows.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/ways.hpp"

namespace heddle::replay {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// The rank where a token lives.
class Homes {
 public:
  Homes(int tokens, int ranks) : each_(tokens / ranks), more_(tokens % ranks) {}
  int of(int token) const {
    const int long_part = more_ * (each_ + 1);
    return token < long_part ? token / (each_ + 1) : more_ + (token - long_part) / each_;
  }
  int tokens_of(int rank) const { return each_ + (rank < more_ ? 1 : 0); }

 private:
  int each_, more_;
};

void add_row(StepRows& step, Rows RankRows::*kind, int from, int to) {
  Rows& there = step.ranks[index(to)].*kind;
  ++there.received;
  if (from == to) return;
  ++there.received_remote;
  ++(step.ranks[index(from)].*kind).sent_remote;
}

}  // namespace

StepRows count_rows(const Routing& routing, const Placed& placed) {
  check_choices(routing.ids, routing.tokens, routing.topk, placed.experts());
  const int ranks = placed.ranks();
  const Homes homes(routing.tokens, ranks);
  StepRows step{routing.tokens, true, std::vector<RankRows>(index(ranks))};
  for (int rank = 0; rank < ranks; ++rank) step.ranks[index(rank)].tokens = homes.tokens_of(rank);
  std::vector<int> last_token(index(ranks), -1);
  std::vector<char> touched(index(placed.experts()) * index(ranks), 0);
  for (int token = 0; token < routing.tokens; ++token) {
    const int home = homes.of(token);
    for (int choice = 0; choice < routing.topk; ++choice) {
      const int expert = routing.ids[index(token) * index(routing.topk) + index(choice)];
      if (expert < 0) continue;
      const int rank = placed.rank_of(expert, token);
      add_row(step, &RankRows::pairs, home, rank);
      if (std::exchange(last_token[index(rank)], token) != token) add_row(step, &RankRows::copies, home, rank);
      if (std::exchange(touched[index(expert) * index(ranks) + index(rank)], 1) == 0) ++step.ranks[index(rank)].touched;
    }
  }
  return step;
}

StepRows count_rows(std::span<const std::int64_t> counts, int topk, const Placed& placed) {
  const auto ranks = static_cast<std::int64_t>(placed.ranks());
  StepRows step;
  step.has_copies = false;
  step.ranks.resize(index(placed.ranks()));
  const std::int64_t pairs = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  step.tokens = topk > 0 ? pairs / topk : 0;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    const std::vector<int>& holders = placed.ranks_of(static_cast<int>(expert));
    const auto copies = static_cast<std::int64_t>(holders.size());
    for (std::int64_t copy = 0; copy < copies; ++copy) {
      const std::int64_t rows = counts[expert] / copies + (copy < counts[expert] % copies ? 1 : 0);
      RankRows& rank = step.ranks[index(holders[static_cast<std::size_t>(copy)])];
      rank.pairs.received += rows;
      rank.touched += rows > 0 ? 1 : 0;
    }
  }
  for (RankRows& rank : step.ranks) {
    rank.tokens = step.tokens / ranks;
    rank.pairs.received_remote = rank.pairs.received * (ranks - 1) / ranks;
    rank.pairs.sent_remote = pairs / ranks * (ranks - 1) / ranks;
  }
  return step;
}

std::optional<RankWork> work_of(Way way, const StepRows& step, int rank) {
  const RankRows& rows = step.ranks[index(rank)];
  RankWork work;
  work.pairs = static_cast<double>(rows.pairs.received);
  work.touched = rows.touched;
  const plan::Copies kind = plan::traits(way).copies;
  if (kind == plan::Copies::every_rank) {
    if (step.tokens == 0) return std::nullopt;
    const auto others = static_cast<std::int64_t>(step.ranks.size()) - 1;
    work.rows = static_cast<double>(step.tokens);
    work.link_rows = static_cast<double>(std::max(step.tokens - rows.tokens, rows.tokens * others));
    return work;
  }
  if (kind == plan::Copies::needed_ranks && !step.has_copies) return std::nullopt;
  const Rows& moved = kind == plan::Copies::needed_ranks ? rows.copies : rows.pairs;
  work.rows = static_cast<double>(moved.received);
  work.link_rows = static_cast<double>(std::max(moved.received_remote, moved.sent_remote));
  return work;
}

std::optional<TimeEstimate> slowest(Way way, const PlanRequest& request, const StepRows& step) {
  std::optional<TimeEstimate> most;
  for (int rank = 0; rank < static_cast<int>(step.ranks.size()); ++rank) {
    const std::optional<RankWork> work = work_of(way, step, rank);
    const std::optional<TimeEstimate> time = work ? estimate_time(way, request, *work) : std::nullopt;
    if (!time) return std::nullopt;
    if (!most || time->total > most->total) most = time;
  }
  return most;
}

double max_over_mean(std::span<const double> values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return sum == 0.0 ? 0.0 : std::ranges::max(values) * static_cast<double>(values.size()) / sum;
}

}  // namespace heddle::replay
