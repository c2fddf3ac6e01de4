// heddle plan --explain: which way auto goes at which size, and why.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "heddle/plan.hpp"
#include "heddle/tuning.hpp"

namespace heddle::tool {

/// Choices for steps of 1, 2, 4 ... tokens a rank up to the request's cap. `machine`: what times are looked up by. Throws
/// InputError for a request that makes no layer.
std::vector<WayChoice> explain_sizes(const PlanRequest& request, const TuningTable& table, const std::string& machine);

void print_choices(const PlanRequest& request, const std::vector<WayChoice>& choices);
nlohmann::ordered_json choices_json(const std::vector<WayChoice>& choices);

}  // namespace heddle::tool
