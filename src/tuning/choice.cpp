// The choice of way `auto`: by measured times, else by the planner's model.
#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "heddle/tuning.hpp"
#include "tuning/around.hpp"

namespace heddle {

namespace {

std::string where(const TuningEntry& entry, Way way, int max_tokens) {
  const auto [below, above] = measured_around(entry, way, max_tokens);
  if (below == nullptr && above == nullptr) return "not measured";
  if (above == nullptr) return fmt::format("measured at {}, times {} / {}", below->max_tokens, max_tokens, below->max_tokens);
  if (above->max_tokens == max_tokens) return "measured";
  if (below == nullptr) return fmt::format("as measured at {}", above->max_tokens);
  return fmt::format("between {} and {}", below->max_tokens, above->max_tokens);
}

/// Empty where the table knows none of them.
WayChoice by_table(const TuningTable& table, const TuningKey& key, std::span<const Way> candidates, int max_tokens) {
  WayChoice choice;
  const TuningEntry* entry = table.find(key);
  if (entry == nullptr) return choice;
  for (const Way way : candidates) choice.times.push_back({way, entry->us(way, max_tokens), where(*entry, way, max_tokens)});
  const bool any = std::any_of(choice.times.begin(), choice.times.end(), [](const WayTime& time) { return time.us.has_value(); });
  if (!any) return {};
  choice.source = fmt::format("measured on {}", key.machine);
  if (entry->key != key) {
    choice.source += fmt::format(" for the nearest shape: {} x {}, {} experts, top-{}", entry->key.hidden, entry->key.intermediate,
                                 entry->key.experts, entry->key.topk);
  }
  if (!entry->source.empty()) choice.source += fmt::format(" ({})", entry->source);
  return choice;
}

bool has_rates(const PlanRequest& request) { return estimate_time(Way::gather, request).has_value(); }

WayChoice by_model(const TuningKey& key, PlanRequest request, std::span<const Way> candidates, int max_tokens) {
  request.tokens = request.cap = max_tokens;
  request.machine = find_machine("h200");
  for (const Machine& machine : machines()) {
    PlanRequest there = request;
    there.machine = machine;
    if (machine.title == key.machine && has_rates(there)) request = there;
  }
  WayChoice choice;
  choice.source = fmt::format("the planner's model with the rates of {}: no times of {} fit this shape and number of ranks",
                              request.machine.name, key.machine);
  for (const Way way : candidates) {
    const auto estimate = estimate_time(way, request);
    WayTime time{way, std::nullopt, "no model"};
    if (estimate) {
      time.us = estimate->total * 1e6;
      time.terms = fmt::format("{} of exchange {:.1f} us and experts {:.1f} us", way == Way::mega ? "the longer" : "the sum",
                               estimate->exchange * 1e6, estimate->experts * 1e6);
    }
    choice.times.push_back(time);
  }
  return choice;
}

}  // namespace

WayChoice choose_way(const TuningTable& table, const TuningKey& key, const PlanRequest& request, std::span<const Way> candidates,
                     int max_tokens) {
  if (candidates.empty()) throw InputError("way auto has nothing to choose from");
  const int tokens = std::max(1, max_tokens);
  WayChoice choice = by_table(table, key, candidates, tokens);
  if (choice.times.empty()) choice = by_model(key, request, candidates, tokens);
  choice.max_tokens = max_tokens;
  const WayTime* best = nullptr;
  for (const WayTime& time : choice.times) {
    if (time.us && (best == nullptr || *time.us < *best->us)) best = &time;
  }
  choice.way = best != nullptr ? best->way : candidates.front();
  return choice;
}

std::string WayChoice::text() const {
  std::string text = fmt::format("up to {} tokens a rank: {}; {}\n", max_tokens, name(way), source);
  for (const WayTime& time : times) {
    text += time.us ? fmt::format("  {:<12}{:>10.1f} us  {}\n", name(time.way), *time.us, time.terms)
                    : fmt::format("  {:<12}{:>13}  {}\n", name(time.way), "", time.terms);
  }
  for (const RefusedWay& one : refused) text += fmt::format("  {:<12}{:>13}  left out: {}\n", name(one.way), "", one.reason);
  return text;
}

}  // namespace heddle
