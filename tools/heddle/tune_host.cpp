// heddle tune on the host engine: a layer a way, calls between barriers, the slowest rank's time.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>

#include "heddle/error.hpp"
#include "host_calls.hpp"
#include "layer/candidates.hpp"
#include "layer/options.hpp"
#include "provenance.hpp"
#include "tune.hpp"

namespace heddle::tool {

namespace {

constexpr long long most_tokens = 1 << 24;  // of all ranks together

using Clock = std::chrono::steady_clock;

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// Microseconds by size: the median over calls of the slowest rank. All ways are measured on the same tokens, the first ones of
/// each rank.
std::vector<double> measure(const Inputs& inputs, const LayerOptions& options, const std::vector<int>& sizes, int calls) {
  std::vector<std::vector<double>> slowest(sizes.size(), std::vector<double>(index(calls)));
  std::mutex mutex;
  on_host_ranks(inputs, options, 1, [&](HostRank& rank) {
    for (std::size_t size = 0; size < sizes.size(); ++size) {
      for (int call = -1; call < calls; ++call) {  // the first one warms up
        rank.meet();
        const auto begin = Clock::now();
        rank.call(0, sizes[size]);
        if (call < 0) continue;
        const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
        const std::lock_guard lock(mutex);
        slowest[size][index(call)] = std::max(slowest[size][index(call)], us);
      }
    }
  });
  std::vector<double> times;
  for (const std::vector<double>& samples : slowest) times.push_back(median(samples));
  return times;
}

void print_row(const TuningRow& row) {
  fmt::print("{:>6} tokens a rank:", row.max_tokens);
  for (const auto& [way, us] : row.us) fmt::print("  {} {:.1f} us", name(way), us);
  fmt::print("\n");
}

}  // namespace

TuningEntry tune_on_host(const TuneArguments& a) {
  std::vector<int> sizes = a.sizes.empty() ? std::vector{1, 8, 64, 256} : a.sizes;
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  LayerArguments layer = a.layer;
  if (layer.processes || layer.tensor_parallel)
    throw InputError(
        "heddle tune measures ranks as threads that each bring their own tokens; leave --processes and --tensor-parallel");
  if (!layer.ranks) throw InputError("give --ranks N");
  const long long tokens = static_cast<long long>(*layer.ranks) * sizes.back();
  if (tokens > most_tokens)
    throw InputError(
        fmt::format("--sizes {} on {} ranks: {} tokens in all, {} are taken", sizes.back(), *layer.ranks, tokens, most_tokens));
  layer.tokens = static_cast<int>(tokens);
  if (layer.trace.empty() && layer.routing.empty()) layer.routing = "uniform";
  Inputs inputs = load_inputs(layer);
  inputs.source.shared.reset();  // an entry says nothing of it
  LayerOptions options = inputs.options;
  options.way = Way::automatic;
  for (const std::string& word : a.ways) options.automatic.ways.push_back(real_way(word, "--way"));
  const LayerWeights common = LayerWeights::common(inputs.source, default_placement(inputs.source.shape, inputs.ranks, options));
  const Candidates candidates = candidates_of(common, options);

  const LayerShape& shape = inputs.source.shape;
  TuningEntry entry;
  entry.key = {host_machine(), shape.hidden, shape.intermediate, shape.experts,
               shape.topk,     inputs.ranks, inputs.source.kind, activation_of(inputs.source.kind, options)};
  entry.source =
      fmt::format("heddle tune, {}, {} routing", now_in_utc().substr(0, 10), layer.trace.empty() ? layer.routing : "recorded");
  for (const int size : sizes) entry.rows.push_back({size, {}});
  for (const LayerOptions& one : candidates.options) {
    const std::vector<double> times = measure(inputs, one, sizes, a.calls);
    for (std::size_t i = 0; i < sizes.size(); ++i) entry.rows[i].us[one.way] = times[i];
  }
  for (const TuningRow& row : entry.rows) print_row(row);
  for (const RefusedWay& one : candidates.refused) fmt::print("left out: {}: {}\n", name(one.way), one.reason);
  return entry;
}

}  // namespace heddle::tool
