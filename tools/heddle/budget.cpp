// heddle plan --budget: which cap an engine needs, from its own settings.
#include "budget.hpp"

#include <nlohmann/json.hpp>

#include "command.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

const CLI::Validator number_or_none(
    [](std::string& typed) {
      int value = 0;
      const bool good = typed == "none" || CLI::detail::lexical_cast(typed, value);
      return good ? std::string() : "'" + typed + "' is neither a whole number (of 32 bits) nor none";
    },
    "");

int number_of(const std::string& typed) {
  int value = 0;
  if (!CLI::detail::lexical_cast(typed, value)) throw InputError("'" + typed + "' stands among numbers; give none by itself");
  return value;
}

}  // namespace

CLI::Option* add_budget_options(CLI::App& plan, BudgetOptions& options) {
  const char* group = "Token budget";
  CLI::Option* wanted =
      plan.add_flag("--budget", options.wanted, "the cap that an engine's settings need, and the memory of every way at it")
          ->group(group);
  const auto with_budget = [&](CLI::Option* option, const char* type) {
    option->group(group)->type_name(type)->needs(wanted);
    return option;
  };
  with_budget(plan.add_option("--decode-graphs", options.decode_graphs, "requests of each captured decode step, or none"), "N,N..")
      ->delimiter(',')
      ->check(number_or_none);
  with_budget(plan.add_option("--request-tokens", options.request_tokens, "tokens that a request brings to a decode step"), "N")
      ->check(whole_number)
      ->capture_default_str();
  with_budget(plan.add_option("--speculative-rows", options.speculative_rows,
                              "rows for each of these with speculative decoding: the draft tokens of a step"),
              "N")
      ->check(whole_number)
      ->capture_default_str();
  with_budget(plan.add_option("--prefill-chunk", options.prefill_chunk, "prompt tokens of a step, over all groups, or none"), "N")
      ->check(number_or_none);
  with_budget(plan.add_option("--dp-groups", options.groups, "data-parallel attention groups, which share the chunk"), "N")
      ->check(whole_number)
      ->capture_default_str();
  return wanted;
}

TokenBudget token_budget(const BudgetOptions& options) {
  if (options.decode_graphs.empty()) {
    throw InputError(
        "--budget needs --decode-graphs N,N.. (batch sizes of the captured decode steps), or none if these ranks never decode");
  }
  if (options.prefill_chunk.empty()) {
    throw InputError("--budget needs --prefill-chunk N (most prompt tokens of a step), or none if these ranks never see a prompt");
  }
  TokenBudget budget;
  if (options.decode_graphs != std::vector<std::string>{"none"}) {
    for (const std::string& requests : options.decode_graphs) budget.decode_graphs.push_back(number_of(requests));
  }
  if (options.prefill_chunk != "none") budget.prefill_chunk = number_of(options.prefill_chunk);
  budget.request_tokens = options.request_tokens;
  budget.speculative_rows = options.speculative_rows;
  budget.data_parallel_groups = options.groups;
  return budget;
}

nlohmann::ordered_json budget_json(const TokenBudget& budget) {
  using Json = nlohmann::ordered_json;
  return {{"decode_graphs", budget.decode_graphs},
          {"request_tokens", budget.request_tokens},
          {"speculative_rows", budget.speculative_rows},
          {"prefill_chunk", budget.prefill_chunk ? Json(*budget.prefill_chunk) : Json(nullptr)},
          {"dp_groups", budget.data_parallel_groups}};
}

}  // namespace heddle::tool
