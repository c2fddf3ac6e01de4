#include "exchange/counters.hpp"

#include <algorithm>

namespace heddle {

ExchangeCounters counters_of(std::span<const Tally> all, const TallyPlan& plan, const Placement& placement, int local_experts) {
  const auto at = [&](int i) {
    const Tally& tally = all[static_cast<std::size_t>(i)];
    return ExchangeCounters::Count{Tally::value(tally.last), Tally::value(tally.sum)};
  };
  ExchangeCounters counters;
  counters.dispatches = at(0).sum;
  counters.dispatch_wait = at(1);
  counters.combines = at(plan.combine_at()).sum;
  counters.combine_wait = at(plan.combine_at() + 1);
  counters.sent.resize(static_cast<std::size_t>(plan.ranks));
  for (int i = 0; i < plan.sent; ++i) {
    const int rank = plan.sent_to_experts ? placement.rank_of(i) : i;
    ExchangeCounters::Count& to = counters.sent[static_cast<std::size_t>(rank)];
    to.last += at(2 + i).last;
    to.sum += at(2 + i).sum;
  }
  for (int s = 0; s < plan.ranks; ++s) counters.arrived.push_back(at(plan.arrived_at() + s));
  for (int e = 0; e < std::min(plan.experts, local_experts); ++e) counters.experts.push_back(at(plan.experts_at() + e));
  return counters;
}

Imbalance imbalance(std::span<const ExchangeCounters::Count> rows) {
  const auto max_over_mean = [&](auto part) {
    std::uint64_t most = 0, sum = 0;
    for (const ExchangeCounters::Count& count : rows) {
      most = std::max(most, count.*part);
      sum += count.*part;
    }
    return sum == 0 ? 0.0 : static_cast<double>(most) * static_cast<double>(rows.size()) / static_cast<double>(sum);
  };
  return {max_over_mean(&ExchangeCounters::Count::last), max_over_mean(&ExchangeCounters::Count::sum)};
}

}  // namespace heddle
