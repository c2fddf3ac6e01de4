#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"

namespace heddle {

namespace {

double max_over_mean(const std::vector<std::int64_t>& loads) {
  const auto sum = std::accumulate(loads.begin(), loads.end(), std::int64_t{0});
  if (sum == 0) return 0.0;
  return static_cast<double>(*std::ranges::max_element(loads)) * static_cast<double>(loads.size()) / static_cast<double>(sum);
}

/// C(n - m, k) / C(n, k): the chance that k distinct of n avoid m given ones.
double chance_to_avoid(int n, int m, int k) {
  double chance = 1.0;
  for (int i = 0; i < k; ++i) chance *= static_cast<double>(std::max(n - m - i, 0)) / (n - i);
  return chance;
}

}  // namespace

RoutingLoad measure_load(const Routing& routing, const Placement& placement) {
  check_choices(routing.ids, routing.tokens, routing.topk, placement.experts());
  const auto ranks = static_cast<std::size_t>(placement.ranks()), k = static_cast<std::size_t>(routing.topk);
  RoutingLoad load;
  load.pairs_of_expert.assign(static_cast<std::size_t>(placement.experts()), 0);
  load.pairs_of_rank.assign(ranks, 0);
  load.copies_of_rank.assign(ranks, 0);
  std::vector<int> last_token(ranks, -1);  // that a copy to this rank was counted for
  for (std::size_t at = 0; at < routing.ids.size(); ++at) {
    const std::int32_t expert = routing.ids[at];
    if (expert < 0) continue;
    const int token = static_cast<int>(at / k);
    const auto rank = static_cast<std::size_t>(placement.rank_of(expert));
    ++load.pairs_of_expert[static_cast<std::size_t>(expert)];
    ++load.pairs_of_rank[rank];
    if (std::exchange(last_token[rank], token) != token) ++load.copies_of_rank[rank];
  }
  load.pairs = std::accumulate(load.pairs_of_rank.begin(), load.pairs_of_rank.end(), std::int64_t{0});
  load.copies = std::accumulate(load.copies_of_rank.begin(), load.copies_of_rank.end(), std::int64_t{0});
  const double tokens = std::max(routing.tokens, 1);
  load.pairs_a_token = static_cast<double>(load.pairs) / tokens;
  load.copies_a_token = static_cast<double>(load.copies) / tokens;
  load.expert_max_over_mean = max_over_mean(load.pairs_of_expert);
  load.rank_max_over_mean = max_over_mean(load.pairs_of_rank);
  load.copies_max_over_mean = max_over_mean(load.copies_of_rank);
  return load;
}

double expected_copies(const Placement& placement, int topk) {
  const int experts = placement.experts();
  if (topk < 0 || topk > experts)
    throw InputError(fmt::format("copies a token: {} distinct choices among {} experts", topk, experts));
  double copies = 0.0;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    copies += 1.0 - chance_to_avoid(experts, static_cast<int>(placement.experts_of(rank).size()), topk);
  }
  return copies;
}

double expected_copies_independent(int topk, int ranks) {
  if (topk < 0 || ranks < 1) throw InputError(fmt::format("copies a token: {} choices on {} ranks", topk, ranks));
  return ranks * (1.0 - std::pow(1.0 - 1.0 / ranks, topk));
}

}  // namespace heddle
