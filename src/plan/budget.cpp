// The token budget: what bounds the tokens of a call, and whether a cap covers it.
#include "heddle/budget.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "heddle/error.hpp"
#include "plan/budget.hpp"
#include "plan/text.hpp"
#include "plan/ways.hpp"

namespace heddle {

namespace {

std::string count_of(std::int64_t count, const char* one) {
  return fmt::format("{} {}{}", plan::with_commas(fmt::format("{}", count)), one, count == 1 ? "" : "s");
}

int largest_graph(const TokenBudget& budget) { return *std::max_element(budget.decode_graphs.begin(), budget.decode_graphs.end()); }

/// Each factor by itself, so that their product cannot leave 64 bits.
void check_factor(const char* what, int value) {
  if (value < 1 || value > largest_cap) {
    throw InputError(fmt::format("{} is {}; it must be between 1 and {}", what, value, largest_cap));
  }
}

void check_budget(const TokenBudget& budget) {
  if (budget.decode_graphs.empty() && !budget.prefill_chunk) {
    throw InputError("a token budget without decode graphs and without a prefill chunk bounds nothing; give at least one of them");
  }
  for (const int requests : budget.decode_graphs) check_factor("size of a decode graph", requests);
  check_factor("number of tokens a request", budget.request_tokens);
  check_factor("number of speculative rows", budget.speculative_rows);
  check_factor("number of data-parallel groups", budget.data_parallel_groups);
  if (budget.prefill_chunk && *budget.prefill_chunk < 1) {
    constexpr std::int64_t usual = 8192;
    throw InputError(fmt::format(
        "a prefill chunk of {} is no bound: a prompt of any length would go through in one call, above any cap; give the most "
        "prompt tokens of a step over {}, such as {}",
        *budget.prefill_chunk, count_of(budget.data_parallel_groups, "data-parallel group"), usual * budget.data_parallel_groups));
  }
}

int in_range(std::int64_t tokens, const char* step, const std::string& formula) {
  if (tokens <= largest_cap) return static_cast<int>(tokens);
  throw InputError(
      fmt::format("a rank could bring {} tokens to a {} step ({}); the largest cap is {}", tokens, step, formula, largest_cap));
}

/// A kind of step that brings more than the cap, and the most that would fit.
struct Excess {
  std::string step;
  std::string change;
  std::int64_t most = 0;
};

[[noreturn]] void refuse_cap(const std::vector<Excess>& excesses, int cap, int needed) {
  std::string steps, changes;
  for (const Excess& excess : excesses) {
    steps += (steps.empty() ? "" : " and ") + excess.step;
    changes += fmt::format("{}{} of at most {}", changes.empty() ? ", or " : " and ", excess.change, excess.most);
  }
  // Where not even one request or prompt token would fit, a larger cap is all that helps.
  const bool possible = std::all_of(excesses.begin(), excesses.end(), [](const Excess& excess) { return excess.most > 0; });
  throw InputError(fmt::format("a rank can bring {}, but the cap is {}; take a cap of at least {}{}", steps, cap, needed,
                               possible ? changes : std::string()));
}

}  // namespace

namespace plan {

std::string decode_formula(const TokenBudget& budget) {
  std::string formula = fmt::format("{} in the largest graph x {}", count_of(largest_graph(budget), "request"),
                                    count_of(budget.request_tokens, "token"));
  if (budget.speculative_rows > 1) formula += fmt::format(" x {}", count_of(budget.speculative_rows, "speculative row"));
  return formula;
}

std::string prefill_formula(const TokenBudget& budget) {
  const bool even = *budget.prefill_chunk % budget.data_parallel_groups == 0;
  return fmt::format("{} / {}{}", count_of(*budget.prefill_chunk, "token"),
                     count_of(budget.data_parallel_groups, "data-parallel group"), even ? "" : ", rounded up");
}

}  // namespace plan

TokenBound token_bound(const TokenBudget& budget) {
  check_budget(budget);
  TokenBound bound;
  if (!budget.decode_graphs.empty()) {
    const std::int64_t tokens = std::int64_t{largest_graph(budget)} * budget.request_tokens;
    bound.decode = in_range(tokens * budget.speculative_rows, "decode", plan::decode_formula(budget));
  }
  if (budget.prefill_chunk) {
    const std::int64_t tokens = plan::divide_up<std::int64_t>(*budget.prefill_chunk, budget.data_parallel_groups);
    bound.prefill = in_range(tokens, "prefill", plan::prefill_formula(budget));
  }
  return bound;
}

void check_cap(const TokenBudget& budget, int cap) {
  const TokenBound bound = token_bound(budget);
  if (bound.cap() <= cap) return;
  std::vector<Excess> excesses;
  if (bound.decode > cap) {
    const std::int64_t rows = std::int64_t{budget.request_tokens} * budget.speculative_rows;
    excesses.push_back({fmt::format("{} tokens to a decode step ({})", bound.decode, plan::decode_formula(budget)),
                        "capture decode graphs", cap / rows});
  }
  if (bound.prefill > cap) {
    excesses.push_back({fmt::format("{} tokens to a prefill step ({})", bound.prefill, plan::prefill_formula(budget)),
                        "prefill in chunks", std::int64_t{cap} * budget.data_parallel_groups});
  }
  refuse_cap(excesses, cap, bound.cap());
}

}  // namespace heddle
