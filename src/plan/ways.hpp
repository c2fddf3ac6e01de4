// What tells the ways apart, for the planner: one row a way (exchange-ways article, sections 2 to 6).
#pragma once

#include <array>
#include <string_view>

#include "heddle/exchange.hpp"

namespace heddle::plan {

/// Which copies of a token travel.
enum class Copies : std::uint8_t { every_rank, needed_ranks, every_choice };

struct WayTraits {
  Way way;
  std::string_view name;
  Copies copies;
  std::string_view source;         ///< where the articles describe its copies
  std::string_view buffer_source;  ///< and its buffers
  int kernels;                     ///< a round trip launches, in this library's design
  int rendezvous;                  ///< times that a rank waits for words of the others
  int local_passes;                ///< times that arrived rows are copied again before the experts
};

inline constexpr std::array<WayTraits, 6> ways{{
    {Way::gather, "gather", Copies::every_rank, "exchange-ways article, 2.4", "exchange-ways article, 2.2", 2, 2, 0},
    {Way::normal, "normal", Copies::needed_ranks, "exchange-ways article, 3.5", "exchange-ways article, 3.2", 4, 3, 1},
    {Way::low_latency, "low_latency", Copies::every_choice, "exchange-ways article, 4.4", "exchange-ways article, 4.1", 2, 2, 1},
    {Way::elastic, "elastic", Copies::needed_ranks, "exchange-ways article, 5.4", "exchange-ways article, 5.1", 3, 2, 1},
    {Way::one_sided, "one_sided", Copies::needed_ranks, "exchange-ways article, 6.4", "exchange-ways article, 6.1", 2, 2, 0},
    {Way::mega, "mega", Copies::every_choice, "fused-kernel article, 3.2", "fused-kernel article, 5.1", 1, 2, 0},
}};

inline const WayTraits& traits(Way way) { return ways[static_cast<std::size_t>(way)]; }

inline std::string_view wire_name(Wire wire) {
  constexpr std::array<std::string_view, 3> names{"bf16", "fp8", "nvfp4"};
  return names[static_cast<std::size_t>(wire)];
}

/// The quotient, rounded up.
template <typename Integer>
constexpr Integer divide_up(Integer value, Integer divisor) {
  return (value + divisor - 1) / divisor;
}
template <typename Integer>
constexpr Integer round_up(Integer value, Integer multiple) {
  return divide_up(value, multiple) * multiple;
}

}  // namespace heddle::plan
