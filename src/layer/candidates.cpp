#include "layer/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "layer/options.hpp"
#include "mega/kernel_limits.hpp"

namespace heddle {

namespace {

/// With bits that are the same each time: results that mega adds as they arrive have neither order.
bool sums_slots(const LayerOptions& options) {
  return options.way == Way::low_latency || (options.way == Way::mega && options.combine == Combine::slots) ||
         (options.way == Way::elastic && options.reduce == Reduce::home);
}

bool host_waits(const LayerOptions& options) {
  return options.way == Way::normal || (options.way == Way::elastic && options.cpu_sync);
}

/// As of a layer of that way alone: what only another way has is left out.
LayerOptions options_for(const LayerOptions& options, Way way) {
  LayerOptions one = options;
  one.way = way;
  if (way != Way::elastic) one.reduce = Reduce::rank;
  if (way != Way::mega) one.combine = Combine::slots;
  one.automatic = {};
  return one;
}

/// Why a way is no candidate; empty: it is one.
std::string refusal(const LayerWeights& weights, const LayerOptions& one, const AutoOptions& automatic, Engine engine,
                    const CandidateCheck& check) {
  const std::vector<Way>& named = automatic.ways;
  const bool is_named = std::find(named.begin(), named.end(), one.way) != named.end();
  if (!named.empty() && !is_named) return "not among the candidates that were named";
  if (automatic.sums != SumOrder::any && one.combine == Combine::add) return "it adds results in any order, one order is asked for";
  if (automatic.sums == SumOrder::slots && !sums_slots(one)) return "it sums in two stages, slots are asked for";
  if (automatic.sums == SumOrder::two_stages && sums_slots(one)) return "it sums over slots, two stages are asked for";
  if (engine == Engine::gpus && !is_named && host_waits(one)) return "its host waits for counts, so it cannot be captured";
  try {
    const ExchangeOptions exchange = exchange_options(weights, one);
    if (engine == Engine::gpus && one.way == Way::mega) return refused_by_kernel(exchange, weights.kind);
    return check ? check(exchange) : "";
  } catch (const InputError& error) {
    return error.what();
  }
}

}  // namespace

Candidates candidates_of(const LayerWeights& weights, const LayerOptions& options, Engine engine, const CandidateCheck& check) {
  Candidates candidates;
  if (options.way != Way::automatic) {
    candidates.options.push_back(options);
    return candidates;
  }
  for (const Way way : real_ways) {
    const LayerOptions one = options_for(options, way);
    std::string reason = refusal(weights, one, options.automatic, engine, check);
    if (reason.empty()) {
      candidates.options.push_back(one);
    } else {
      candidates.refused.push_back({way, std::move(reason)});
    }
  }
  if (!candidates.options.empty()) return candidates;
  std::string reasons;
  for (const RefusedWay& one : candidates.refused) reasons += fmt::format("; {}: {}", name(one.way), one.reason);
  throw InputError("way auto: no way does what the options ask for" + reasons);
}

std::string describe_choice(const LayerOptions& options) {
  const AutoOptions& automatic = options.automatic;
  constexpr const char* orders[] = {"any", "slots", "two_stages"};
  std::string named;
  for (const Way way : automatic.ways) named += fmt::format("{}{}", named.empty() ? "" : ",", name(way));
  const auto table = automatic.table != nullptr ? automatic.table : TuningTable::shipped();
  return fmt::format("choice=auto\ntuning_table={}\ntuning_machine={}\ncandidates={}\nsums={}\n", table->fingerprint(),
                     automatic.machine.empty() ? "own" : automatic.machine, named.empty() ? "all" : named,
                     orders[static_cast<int>(automatic.sums)]);
}

PlanRequest plan_request(const LayerWeights& weights, const LayerOptions& options) {
  PlanRequest request;
  request.shape = weights.shape;
  request.weights = weights.kind;
  request.shared_experts = weights.shared ? 1 : 0;
  request.ranks = weights.placement.ranks();
  request.wire = options.wire.value_or(activation_of(weights.kind, options) == Activation::fp8 ? Wire::fp8 : Wire::bf16);
  request.combine_wire = options.combine_wire;
  request.combine = options.combine;
  request.quantisation = options.quantisation;
  return request;
}

WayChooser::WayChooser(const LayerWeights& weights, const LayerOptions& options, Candidates candidates, const std::string& machine)
    : candidates_(std::move(candidates)),
      asked_(options.way != Way::automatic),
      tensor_parallel_(options.tensor_parallel),
      table_(options.automatic.table != nullptr ? options.automatic.table : TuningTable::shipped()),
      request_(plan_request(weights, options)) {
  for (const LayerOptions& one : candidates_.options) ways_.push_back(one.way);
  const LayerShape& shape = weights.shape;
  key_ = {options.automatic.machine.empty() ? machine : options.automatic.machine,
          shape.hidden,
          shape.intermediate,
          shape.experts,
          shape.topk,
          request_.ranks,
          weights.kind,
          activation_of(weights.kind, options)};
}

/// Of a rank: under tensor-parallel attention a step is the whole batch.
int WayChooser::tokens_of(const Step& step) const {
  if (!tensor_parallel_) return step.max_tokens;
  return static_cast<int>((static_cast<long long>(step.max_tokens) + request_.ranks - 1) / request_.ranks);
}

std::vector<Way> WayChooser::usable(std::span<const RefusedWay> not_now) const {
  std::vector<Way> ways = ways_;
  for (const RefusedWay& one : not_now) std::erase(ways, one.way);
  return ways.empty() ? ways_ : ways;
}

std::size_t WayChooser::pick(const Step& step, std::span<const RefusedWay> not_now) {
  if (ways_.size() == 1) return 0;
  const std::pair key(tokens_of(step), usable(not_now));
  const auto known = picked_.find(key);
  if (known != picked_.end()) return known->second;
  const Way way = choose_way(*table_, key_, request_, key.second, key.first).way;
  return picked_[key] = static_cast<std::size_t>(std::find(ways_.begin(), ways_.end(), way) - ways_.begin());
}

WayChoice WayChooser::explain(const Step& step, std::span<const RefusedWay> not_now) const {
  const std::vector<Way> ways = usable(not_now);
  WayChoice choice = choose_way(*table_, key_, request_, ways, tokens_of(step));
  if (asked_) choice.source = fmt::format("the layer was made with this way; {}", choice.source);
  choice.refused = candidates_.refused;
  if (ways.size() < ways_.size()) choice.refused.insert(choice.refused.end(), not_now.begin(), not_now.end());
  return choice;
}

}  // namespace heddle
