#include "replay/rows.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/ways.hpp"

namespace heddle::replay {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

void add_row(StepRows& step, Rows RankRows::*kind, int from, int to) {
  Rows& there = step.ranks[index(to)].*kind;
  ++there.received;
  if (from == to) return;
  ++there.received_remote;
  ++(step.ranks[index(from)].*kind).sent_remote;
}

}  // namespace

std::vector<int> homes_of(int tokens, int ranks) {
  std::vector<int> homes(index(ranks), tokens / ranks);
  for (int rank = 0; rank < tokens % ranks; ++rank) ++homes[index(rank)];
  return homes;
}

StepRows count_rows(const Routing& routing, const ReplicaMap& map, CopyRule rule) {
  check_choices(routing.ids, routing.tokens, routing.topk, map.experts());
  const int ranks = map.ranks();
  const std::vector<int> homes = homes_of(routing.tokens, ranks);
  const Routing physical = choose_copies(map, rule, routing, homes);
  StepRows step{routing.tokens, true, std::vector<RankRows>(index(ranks))};
  std::vector<int> last_token(index(ranks), -1);
  std::vector<char> touched(index(map.physical()), 0);
  for (int home = 0, token = 0; home < ranks; ++home) {
    step.ranks[index(home)].tokens = homes[index(home)];
    for (const int end = token + homes[index(home)]; token < end; ++token) {
      for (int choice = 0; choice < routing.topk; ++choice) {
        const int id = physical.ids[index(token) * index(routing.topk) + index(choice)];
        if (id < 0) continue;
        const int rank = map.placement().rank_of(id);
        add_row(step, &RankRows::pairs, home, rank);
        if (std::exchange(last_token[index(rank)], token) != token) add_row(step, &RankRows::copies, home, rank);
        if (std::exchange(touched[index(id)], 1) == 0) ++step.ranks[index(rank)].touched;
      }
    }
  }
  return step;
}

StepRows count_rows(std::span<const std::int64_t> counts, int topk, const ReplicaMap& map) {
  const auto ranks = static_cast<std::int64_t>(map.ranks());
  StepRows step;
  step.has_copies = false;
  step.ranks.resize(index(map.ranks()));
  const std::int64_t pairs = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  step.tokens = topk > 0 ? pairs / topk : 0;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    const auto copies = map.copies_of(static_cast<int>(expert));
    const auto count = static_cast<std::int64_t>(copies.size());
    for (std::int64_t copy = 0; copy < count; ++copy) {
      const std::int64_t rows = counts[expert] / count + (copy < counts[expert] % count ? 1 : 0);
      RankRows& rank = step.ranks[index(map.placement().rank_of(copies[static_cast<std::size_t>(copy)]))];
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

}  // namespace heddle::replay
