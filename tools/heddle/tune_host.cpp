// heddle tune on the host engine: a layer a way, calls between barriers, the slowest rank's time.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "heddle/error.hpp"
#include "job_ranks.hpp"
#include "layer/candidates.hpp"
#include "layer/options.hpp"
#include "tune.hpp"

namespace heddle::tool {

namespace {

constexpr long long most_tokens = 1 << 24;  // of all ranks together

using Clock = std::chrono::steady_clock;

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// All ways are measured on the same tokens: the first ones of each rank.
class HostTuning {
 public:
  HostTuning(const Inputs& inputs, const std::vector<int>& sizes, int calls)
      : inputs_(inputs),
        placement_(default_placement(inputs.source.shape, inputs.ranks, inputs.options)),
        sizes_(sizes),
        calls_(calls) {}

  /// Microseconds by size.
  std::vector<double> measure(const LayerOptions& options) {
    seconds_.assign(sizes_.size() * index(calls_), std::vector<double>(index(inputs_.ranks)));
    std::vector<std::string> failures(index(inputs_.ranks));
    auto groups = create_thread_group(inputs_.ranks, {std::chrono::milliseconds(inputs_.deadline_ms)});
    run_in_threads(0, inputs_.ranks, [&](int rank) {
      try {
        run(*groups[index(rank)], options);
      } catch (const std::exception& error) {
        failures[index(rank)] = error.what();
      }
    });
    for (const std::string& failure : failures) {
      if (!failure.empty()) throw Error(ErrorKind::fault, fmt::format("{}: {}", name(options.way), failure));
    }
    std::vector<double> times;
    for (std::size_t size = 0; size < sizes_.size(); ++size) times.push_back(median_of(size));
    return times;
  }

 private:
  void run(Group& group, const LayerOptions& options) {
    LayerWeights weights = LayerWeights::load(inputs_.source, placement_, group.rank());
    const ExchangeMemory memory = layer_memory(weights, options);
    Workspace workspace(group, memory.heap_bytes(group.ranks()), describe(weights, options));
    MoeLayer layer(workspace, memory, std::move(weights), options);
    const std::size_t hidden = index(inputs_.source.shape.hidden), topk = index(inputs_.routing.topk);
    const std::size_t first = index(group.rank()) * index(*std::max_element(sizes_.begin(), sizes_.end()));
    std::vector<bf16> out(index(*std::max_element(sizes_.begin(), sizes_.end())) * hidden);
    for (std::size_t size = 0; size < sizes_.size(); ++size) {
      const LayerInput input{sizes_[size], inputs_.hidden_states.data() + first * hidden, inputs_.routing.ids.data() + first * topk,
                             inputs_.routing.weights.data() + first * topk};
      for (int call = -1; call < calls_; ++call) {  // the first one warms up
        group.barrier("start of a call");
        const auto begin = Clock::now();
        layer.forward(input, {sizes_[size], Phase::decode}, out.data());
        if (call < 0) continue;
        seconds_[size * index(calls_) + index(call)][index(group.rank())] =
            std::chrono::duration<double>(Clock::now() - begin).count();
      }
    }
    workspace.close();
  }

  double median_of(std::size_t size) const {
    std::vector<double> slowest;
    for (int call = 0; call < calls_; ++call) {
      const std::vector<double>& ranks = seconds_[size * index(calls_) + index(call)];
      slowest.push_back(*std::max_element(ranks.begin(), ranks.end()));
    }
    std::nth_element(slowest.begin(), slowest.begin() + calls_ / 2, slowest.end());
    return 1e6 * slowest[index(calls_ / 2)];
  }

  const Inputs& inputs_;
  Placement placement_;
  std::vector<int> sizes_;
  int calls_;
  std::vector<std::vector<double>> seconds_;  ///< [size and call][rank]
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
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
  entry.source = fmt::format("heddle tune, {}, {} routing", today(), layer.trace.empty() ? layer.routing : "recorded");
  for (const int size : sizes) entry.rows.push_back({size, {}});
  HostTuning tuning(inputs, sizes, a.calls);
  for (const LayerOptions& one : candidates.options) {
    const std::vector<double> times = tuning.measure(one);
    for (std::size_t i = 0; i < sizes.size(); ++i) entry.rows[i].us[one.way] = times[i];
  }
  for (const TuningRow& row : entry.rows) print_row(row);
  for (const RefusedWay& one : candidates.refused) fmt::print("left out: {}: {}\n", name(one.way), one.reason);
  return entry;
}

}  // namespace heddle::tool
