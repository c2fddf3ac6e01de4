// How a bound of the token budget comes about, for people.
#pragma once

#include <string>

#include "heddle/budget.hpp"

namespace heddle::plan {

/// "64 requests in the largest graph x 1 token x 4 speculative rows"
std::string decode_formula(const TokenBudget& budget);

/// "65,536 tokens / 8 data-parallel groups"
std::string prefill_formula(const TokenBudget& budget);

}  // namespace heddle::plan
