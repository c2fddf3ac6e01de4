// What a token budget asks of a rank: the bounds, and the memory of the cap that covers them.
#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "plan/budget.hpp"
#include "plan/sections.hpp"

namespace heddle {

namespace {

using plan::Adder;

Section bound_section(const TokenBudget& budget, const TokenBound& bound) {
  Section section{"budget", "Tokens that a rank can bring to one call, at most", {}};
  const Adder count(section, Unit::count);
  const std::string source = plan::fused_article("5.2");
  if (bound.decode > 0) {
    count("decode", "decode step", bound.decode, plan::decode_formula(budget), source);
  }
  if (bound.prefill > 0) count("prefill", "prefill step", bound.prefill, plan::prefill_formula(budget), source);
  count("cap", "cap to take", bound.cap(), "the greatest of these; more is memory that no step uses", "every way takes any cap");
  return section;
}

/// Of buffers that are listed by region only the sums.
Section totals_of(Section section) {
  std::erase_if(section.quantities, [](const Quantity& quantity) { return !quantity.name.ends_with("total"); });
  return section;
}

}  // namespace

Plan make_budget_plan(const TokenBudget& budget, PlanRequest request, std::optional<int> cap,
                      const std::map<Way, LayoutBytes>& layouts) {
  const TokenBound bound = token_bound(budget);
  if (cap) check_cap(budget, *cap);
  request.tokens = bound.cap();
  request.cap = cap.value_or(bound.cap());
  check_request(request);
  if (request.ranks % budget.data_parallel_groups != 0) {
    throw InputError(fmt::format("{} data-parallel groups cannot be of the same size on {} ranks; their number must divide {}",
                                 budget.data_parallel_groups, request.ranks, request.ranks));
  }
  Plan result{request, {bound_section(budget, bound), plan::layouts_section("own_layouts", request, layouts)}};
  if (bound.decode > 0 && bound.decode < request.cap) {
    PlanRequest decode = request;
    decode.tokens = decode.cap = bound.decode;
    result.sections.push_back(plan::layouts_section("decode_layouts", decode, layouts));
    result.sections.back().title += ", if only decode steps go this way";
  }
  result.sections.push_back(totals_of(plan::mega_section(request)));
  result.sections.push_back(totals_of(plan::buffer_section(request)));
  std::erase_if(result.sections, [](const Section& section) { return section.quantities.empty(); });
  return result;
}

}  // namespace heddle
