// How many copies of a token travel, and how many pairs there are.
#include <cmath>

#include "heddle/plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

int experts_on_rank(int experts, int ranks, int rank) {
  const auto first = [&](std::int64_t r) { return plan::divide_up(r * experts, std::int64_t{ranks}); };
  return static_cast<int>(first(rank + 1) - first(rank));
}

int most_local_experts(int experts, int ranks) { return plan::divide_up(experts, ranks); }

namespace {

/// C(experts - local, topk) / C(experts, topk), as a product so that nothing overflows.
double none_chosen(int local, int experts, int topk) {
  double chance = 1;
  for (int i = 0; i < topk; ++i) {
    chance *= std::max(0.0, static_cast<double>(experts - local - i)) / static_cast<double>(experts - i);
  }
  return chance;
}

template <typename NoneChosen>
double needed_ranks(int experts, int ranks, NoneChosen none) {
  double sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    sum += 1 - none(experts_on_rank(experts, ranks, rank));
  }
  return sum;
}

}  // namespace

double expected_copies(int experts, int topk, int ranks) {
  return needed_ranks(experts, ranks, [&](int local) { return none_chosen(local, experts, topk); });
}

double expected_copies_with_replacement(int experts, int topk, int ranks) {
  return needed_ranks(experts, ranks, [&](int local) { return std::pow(1 - static_cast<double>(local) / experts, topk); });
}

double copies_of_a_token(Way way, const LayerShape& shape, int ranks) {
  switch (plan::traits(way).copies) {
    case plan::Copies::every_rank:
      return ranks;
    case plan::Copies::needed_ranks:
      return expected_copies(shape.experts, shape.topk, ranks);
    case plan::Copies::every_choice:
      break;
  }
  return shape.topk;
}

double expected_touched_experts(int local, int experts, int topk, std::uint64_t tokens) {
  const double missed_by_one = 1 - static_cast<double>(topk) / experts;
  return local * (1 - std::pow(missed_by_one, static_cast<double>(tokens)));
}

PairCounts pair_counts(const LayerShape& shape, int ranks, int tokens) {
  PairCounts counts;
  counts.pairs = static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(ranks) * static_cast<std::uint64_t>(shape.topk);
  counts.per_expert = static_cast<double>(counts.pairs) / shape.experts;
  counts.per_rank = static_cast<double>(counts.pairs) / ranks;
  return counts;
}

}  // namespace heddle
