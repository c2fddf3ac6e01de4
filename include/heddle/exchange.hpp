// The ways of the round trip behind one interface (DESIGN, "Each way in a line").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "heddle/experts.hpp"
#include "heddle/formats.hpp"
#include "heddle/routing.hpp"
#include "heddle/shape.hpp"

namespace heddle {

enum class Way : std::uint8_t { gather, normal, low_latency, elastic, one_sided, mega };

/// Where a token's results are first summed (elastic): on the expert's rank, or at home from one row a choice.
enum class Reduce : std::uint8_t { rank, home };

std::string_view name(Way way);

}  // namespace heddle
