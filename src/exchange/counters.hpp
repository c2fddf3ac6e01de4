// What a copy of a rank's counters says.
#pragma once

#include <span>

#include "heddle/device.hpp"
#include "signal/tally.hpp"

namespace heddle {

/// `all` [plan.size()], both sets whole. The rank's experts are the first `local_experts` of the plan's.
ExchangeCounters counters_of(std::span<const Tally> all, const TallyPlan& plan, const Placement& placement, int local_experts);

}  // namespace heddle
