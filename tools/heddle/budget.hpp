// What was typed behind `heddle plan --budget`.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "heddle/budget.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace heddle::tool {

struct BudgetOptions {
  bool wanted = false;
  std::vector<std::string> decode_graphs;  ///< numbers, or none
  std::string prefill_chunk;               ///< a number, or none
  int request_tokens = 1, speculative_rows = 1, groups = 1;
};

/// Adds --budget, which it returns, and the options that need it.
CLI::Option* add_budget_options(CLI::App& plan, BudgetOptions& options);

/// Throws InputError where decode graphs or the prefill chunk were left out, and not by `none`.
TokenBudget token_budget(const BudgetOptions& options);

nlohmann::ordered_json budget_json(const TokenBudget& budget);

}  // namespace heddle::tool
