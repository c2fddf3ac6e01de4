// Seeds and maps for the tests of balancing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "heddle/balancing.hpp"

namespace heddle::balancing_test {

inline std::uint64_t announced_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

/// Any copies on any ranks, `places` on each, every expert somewhere; the same expert may be on a rank twice. Needs ranks * places
/// >= experts.
template <class Random>
ReplicaMap random_map(Random& random, int experts, int ranks, int places) {
  std::vector<int> copies(static_cast<std::size_t>(ranks * places));
  for (std::size_t i = 0; i < copies.size(); ++i)
    copies[i] = static_cast<int>(i < static_cast<std::size_t>(experts) ? i : random() % static_cast<unsigned>(experts));
  for (std::size_t i = copies.size() - 1; i > 0; --i) std::swap(copies[i], copies[random() % (i + 1)]);
  std::vector<std::vector<int>> experts_of(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < copies.size(); ++i) experts_of[i / static_cast<std::size_t>(places)].push_back(copies[i]);
  return ReplicaMap::from_ranks(experts_of, experts);
}

}  // namespace heddle::balancing_test
