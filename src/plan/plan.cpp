// The whole plan: sections of named numbers, each with its formula and source.
#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "plan/sections.hpp"
#include "plan/ways.hpp"

namespace heddle {

namespace {

void check_range(std::string_view what, int value, int low, int high) {
  if (value < low || value > high) {
    throw InputError(fmt::format("{} is {}; it must be between {} and {}", what, value, low, high));
  }
}

void check_width(std::string_view what, int value) {
  check_range(what, value, 64, 65536);
  if (value % 64 != 0) {
    throw InputError(fmt::format("{} is {}; it must be a multiple of 64, such as {}", what, value, plan::round_up(value, 64)));
  }
}

}  // namespace

void check_request(const PlanRequest& request) {
  const LayerShape& shape = request.shape;
  check_width("hidden size", shape.hidden);
  check_width("intermediate size", shape.intermediate);
  check_range("number of experts", shape.experts, 1, 16384);
  check_range("top-k", shape.topk, 1, std::min(shape.experts, 64));
  check_range("number of shared experts", request.shared_experts, 0, 16);
  check_range("number of ranks", request.ranks, 1, 1024);
  check_range("number of nodes", request.nodes, 1, request.ranks);
  if (request.ranks % request.nodes != 0) {
    throw InputError(fmt::format("{} ranks cannot be shared equally by {} nodes; take a number of nodes that divides the ranks",
                                 request.ranks, request.nodes));
  }
  check_range("cap", request.cap, 1, largest_cap);
  if (request.tokens < 1 || request.tokens > request.cap) {
    throw InputError(fmt::format("a rank brings {} tokens but the cap is {}; it may bring 1 to {}, or the cap must be raised",
                                 request.tokens, request.cap, request.cap));
  }
  if (request.quantisation.group != 32 && request.quantisation.group != 128) {
    throw InputError(fmt::format("quantisation group is {}; it must be 32 or 128", request.quantisation.group));
  }
  if (request.combine == Combine::add && request.combine_wire != Wire::bf16)
    throw InputError("combine = add: results are added as bf16 where they arrive; take combine_wire = bf16, or combine = slots");
  check_range("number of SMs", request.machine.sms, 2, 4096);
}

Plan make_plan(const PlanRequest& request, const std::map<Way, LayoutBytes>& layouts) {
  check_request(request);
  Plan result{request, {}};
  for (Section& section : plan::all_sections(request, layouts)) {
    if (!section.quantities.empty()) {
      result.sections.push_back(std::move(section));
    }
  }
  return result;
}

}  // namespace heddle
