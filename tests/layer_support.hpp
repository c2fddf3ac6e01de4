// Random layers, batches and placements for the tests of the layer, and calls of a layer on all ranks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "heddle/layer.hpp"
#include "layer/options.hpp"
#include "layer/synthetic.hpp"
#include "ranks.hpp"
#include "reference/reference.hpp"
#include "routing/random.hpp"

namespace heddle::layer_test {

#ifdef HEDDLE_SANITIZED
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif

/// Rounds of a property test: fewer where a sanitizer makes each some twenty times slower.
constexpr int rounds(int plain) { return is_sanitized ? std::max(1, plain / 8) : plain; }

/// Where a test's random cases begin. Case n of a test has the seed announced_seed() + n, so HEDDLE_SEED=s begins with
/// the case that printed s.
inline std::uint64_t announced_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

class Chance {
 public:
  explicit Chance(std::uint64_t seed) : random_(splitmix64(seed)) {}
  int between(int low, int high) { return low + static_cast<int>(random_.below(static_cast<std::uint64_t>(high - low + 1))); }
  bool one_in(int n) { return between(1, n) == 1; }
  std::uint64_t seed() { return random_.next(); }
  template <class Value>
  Value one_of(std::initializer_list<Value> values) {
    return *(values.begin() + between(0, static_cast<int>(values.size()) - 1));
  }

 private:
  Random random_;
};

/// A way, and what makes it a way of its own.
struct Route {
  Way way = Way::gather;
  Reduce reduce = Reduce::rank;
};
/// The ways whose outputs are summed over slots, and those that sum in two stages.
inline constexpr Route slot_routes[] = {{Way::low_latency, Reduce::rank}, {Way::elastic, Reduce::home}, {Way::mega, Reduce::rank}};
inline constexpr Route two_stage_routes[] = {
    {Way::gather, Reduce::rank}, {Way::normal, Reduce::rank}, {Way::elastic, Reduce::rank}, {Way::one_sided, Reduce::rank}};
inline constexpr Route all_routes[] = {{Way::gather, Reduce::rank},  {Way::normal, Reduce::rank},  {Way::low_latency, Reduce::rank},
                                       {Way::elastic, Reduce::rank}, {Way::elastic, Reduce::home}, {Way::one_sided, Reduce::rank}};
/// On the host engine the fused layer, too.
inline constexpr Route host_routes[] = {
    {Way::gather, Reduce::rank},  {Way::normal, Reduce::rank},    {Way::low_latency, Reduce::rank}, {Way::elastic, Reduce::rank},
    {Way::elastic, Reduce::home}, {Way::one_sided, Reduce::rank}, {Way::mega, Reduce::rank}};
inline constexpr WeightKind all_kinds[] = {WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4, WeightKind::nvfp4,
                                           WeightKind::mxfp8};

inline bool sums_slots(const LayerOptions& options) {
  return options.way == Way::low_latency || options.way == Way::mega ||
         (options.way == Way::elastic && options.reduce == Reduce::home);
}

/// Does mega do what these ask for? What it does not, it refuses.
inline bool fits_mega(const LayerOptions& options) { return options.weight_at == WeightAt::activation; }

/// A layer and how it is called; `tokens` a rank.
struct Case {
  SyntheticOptions layer;
  LayerOptions options;
  Placement placement;
  std::vector<int> tokens;
  double missing = 0.1;  ///< share of choices that are -1
  bool gated_shared = false;
  int hot_rank = -1;  ///< all choices go to this rank's experts as long as it has some left; -1: uniform
  HiddenStates hidden_states = HiddenStates::gaussian;
  std::uint64_t seed = 0;

  int ranks() const { return placement.ranks(); }
  int all_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), 0); }
  int most_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }
  int first(int rank) const { return std::accumulate(tokens.begin(), tokens.begin() + rank, 0); }
  void take(const Route& route) {
    options.way = route.way;
    options.reduce = route.reduce;
    if (route.way != Way::mega) return;
    options.weight_at = WeightAt::activation;  // see fits_mega
  }
};

/// Valid while `layer` lives.
inline LayerSource source_of(SyntheticLayer& layer, const Case& c) {
  LayerSource source = layer.source();
  if (source.shared && c.gated_shared) {
    Random random(c.layer.seed);
    for (int i = 0; i < c.layer.shape.hidden; ++i) {
      const float value = (random.positive_unit() - 0.5f) * 2.0f / std::sqrt(static_cast<float>(c.layer.shape.hidden));
      source.shared->gate.push_back(to_float(to_bf16(value)));
    }
  }
  return source;
}

inline std::string text_of(const Case& c) {
  LayerWeights weights;
  weights.shape = c.layer.shape;
  weights.kind = c.layer.kind;
  weights.placement = c.placement;
  std::string text = "HEDDLE_SEED=" + std::to_string(c.seed) + " begins with this case: ranks=" + std::to_string(c.ranks());
  text += " intermediate=" + std::to_string(c.layer.shape.intermediate) + " kind=" + std::to_string(static_cast<int>(c.layer.kind));
  text +=
      " activation=" + (c.options.activation ? std::to_string(static_cast<int>(*c.options.activation)) : std::string("default"));
  text += " shared=" + (c.layer.shared_kind ? std::to_string(static_cast<int>(*c.layer.shared_kind)) : std::string("none"));
  constexpr const char* modes[] = {" alone", " fused", " extra"};
  text += std::string(modes[static_cast<int>(c.options.shared)]) + " tensor_parallel=" + (c.options.tensor_parallel ? "1" : "0");
  text += " clamp=" + (c.options.clamp ? std::to_string(*c.options.clamp) : std::string("none")) + " tokens=";
  for (const int tokens : c.tokens) text += std::to_string(tokens) + ",";
  text += "\n" + describe(weights, c.options);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// The batch of all ranks, rank by rank.
struct Tokens {
  std::vector<bf16> hidden;
  Routing routing;
};

/// Choices of -1 get the weight NaN: nobody may read it.
inline Tokens draw_tokens(const Case& c, std::uint64_t seed) {
  Tokens tokens;
  tokens.hidden = draw_hidden_states(c.all_tokens(), c.layer.shape.hidden, c.hidden_states, seed);
  const Popularity popularity =
      c.hot_rank < 0 ? uniform_popularity(c.layer.shape.experts) : hot_rank_popularity(c.placement, c.hot_rank);
  tokens.routing = draw_routing(popularity, {c.all_tokens(), c.layer.shape.topk, seed, c.missing, 1.5f});
  for (std::size_t i = 0; i < tokens.routing.ids.size(); ++i) {
    if (tokens.routing.ids[i] < 0) tokens.routing.weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return tokens;
}

/// Rank `rank`'s part of the batch, or all of it under tensor-parallel attention.
inline LayerInput input_of(const Case& c, const Tokens& tokens, int rank) {
  const auto hidden = static_cast<std::size_t>(c.layer.shape.hidden);
  const auto topk = static_cast<std::size_t>(c.layer.shape.topk);
  const bool all = c.options.tensor_parallel;
  const auto first = all ? std::size_t{0} : static_cast<std::size_t>(c.first(rank));
  LayerInput input;
  input.tokens = all ? c.all_tokens() : c.tokens[static_cast<std::size_t>(rank)];
  if (input.tokens == 0) return input;  // null pointers: who has no tokens has no arrays
  input.hidden = tokens.hidden.data() + first * hidden;
  input.ids = tokens.routing.ids.data() + first * topk;
  input.weights = tokens.routing.weights.data() + first * topk;
  return input;
}

inline Step step_of(const Case& c) { return {c.options.tensor_parallel ? c.all_tokens() : c.most_tokens(), Phase::decode}; }

constexpr bf16 untouched{0x7FC1};  ///< a NaN that no computation gives

inline std::size_t different_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  if (a.size() != b.size()) return std::max(a.size(), b.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += a[i].bits != b[i].bits ? 1 : 0;
  return count;
}

/// Where a rank's output lies within that of all tokens; everything under tensor-parallel attention.
inline std::vector<bf16> part_of(const Case& c, const std::vector<bf16>& all, int rank) {
  if (c.options.tensor_parallel) return all;
  const auto hidden = static_cast<std::ptrdiff_t>(c.layer.shape.hidden);
  const auto begin = all.begin() + c.first(rank) * hidden;
  return {begin, begin + c.tokens[static_cast<std::size_t>(rank)] * hidden};
}

/// Calls this rank's layer once. Checks that nothing is written behind the outputs.
inline std::vector<bf16> call(const Case& c, MoeLayer& layer, const Tokens& tokens, int rank) {
  const LayerInput input = input_of(c, tokens, rank);
  std::vector<bf16> out(static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(c.layer.shape.hidden) + 1, untouched);
  layer.forward(input, step_of(c), out.data());
  EXPECT_EQ(out.back().bits, untouched.bits) << "written behind the outputs of rank " << rank;
  out.pop_back();
  return out;
}

struct Outcome {
  std::vector<bf16> outputs;  ///< [T, H], in the batch's order
  std::vector<LayerReport> reports;
};

/// The layer on all ranks as threads, called `calls` times; all calls must give the same bits, and under
/// tensor-parallel attention all ranks.
inline Outcome run_layer(const LayerSource& source, const Case& c, const Tokens& tokens, int calls = 1) {
  Outcome outcome;
  outcome.reports.resize(static_cast<std::size_t>(c.ranks()));
  std::vector<std::vector<bf16>> outs(outcome.reports.size());
  run_ranks(c.ranks(), {}, [&](Group& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    const ExchangeMemory memory = layer_memory(weights, c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(weights, c.options));
    MoeLayer layer(workspace, memory, std::move(weights), c.options);
    outs[rank] = call(c, layer, tokens, group.rank());
    for (int i = 1; i < calls; ++i) {
      EXPECT_EQ(different_bits(call(c, layer, tokens, group.rank()), outs[rank]), 0u) << "call " << i << " on rank " << rank;
    }
    outcome.reports[rank] = layer.report();
    workspace.close();
  });
  if (c.options.tensor_parallel) {
    for (const auto& out : outs) EXPECT_EQ(different_bits(out, outs.front()), 0u) << "ranks have different outputs";
    outcome.outputs = outs.front();
  } else {
    for (const auto& out : outs) outcome.outputs.insert(outcome.outputs.end(), out.begin(), out.end());
  }
  return outcome;
}

inline Activation activation_of(const Case& c) { return heddle::activation_of(c.layer.kind, c.options); }

/// The float64 reference of a call: rounded at the same points.
inline std::vector<bf16> reference_of(const LayerSource& source, const Case& c, const Tokens& tokens) {
  ReferenceInput input;
  input.hidden = source.shape.hidden;
  input.intermediate = source.shape.intermediate;
  input.experts = source.shape.experts;
  input.topk = source.shape.topk;
  input.tokens = tokens.routing.tokens;
  input.hidden_states = tokens.hidden;
  input.ids = tokens.routing.ids;
  input.weights = tokens.routing.weights;
  input.expert = source.expert;
  input.shared = source.shared ? &*source.shared : nullptr;
  input.rank_of = c.placement.rank_map();
  ReferenceOptions options;
  options.activation = activation_of(c);
  options.quantisation = c.options.quantisation;
  options.clamp = c.options.clamp;
  options.weight_at = c.options.weight_at;
  options.sum = sums_slots(c.options) ? Sum::slots : Sum::two_stage;
  options.wire = c.options.wire.value_or(options.activation == Activation::fp8 ? Wire::fp8 : Wire::bf16);
  options.combine_wire = c.options.combine_wire;
  return reference_layer(input, options);
}

/// Any map of experts to ranks, some ranks often without any.
inline Placement random_placement(Chance& chance, int experts, int ranks) {
  if (chance.one_in(2)) return Placement::contiguous(experts, ranks);
  std::vector<int> map(static_cast<std::size_t>(experts));
  for (int& rank : map) rank = chance.between(0, ranks - 1);
  return Placement::from_map(map, ranks);
}

inline std::vector<int> random_split(Chance& chance, int ranks, int cap) {
  std::vector<int> tokens(static_cast<std::size_t>(ranks));
  for (int& own : tokens) own = chance.one_in(4) ? 0 : (chance.one_in(3) ? cap : chance.between(0, cap));
  return tokens;
}

inline RunnerKind random_runner(Chance& chance, Way way) {
  if (way != Way::normal && way != Way::elastic) return RunnerKind::automatic;
  return chance.one_of({RunnerKind::automatic, RunnerKind::contiguous, RunnerKind::masked, RunnerKind::routed});
}

/// A small layer of any shape and options on `ranks` ranks; the way is left to the caller.
inline Case random_case(std::uint64_t seed, int ranks) {
  Chance chance(seed);
  Case c;
  c.seed = seed;
  LayerShape& shape = c.layer.shape;
  shape.hidden = 64 * chance.between(1, 6);
  shape.intermediate = 64 * chance.between(1, 4);
  shape.experts = chance.one_in(4) ? chance.between(1, ranks) : chance.between(1, 24);
  shape.topk = chance.between(1, std::min(16, shape.experts));
  c.layer.kind = all_kinds[chance.between(0, 4)];
  if (chance.one_in(2)) {
    c.layer.shared_kind = all_kinds[chance.between(0, 4)];
    c.gated_shared = chance.one_in(2);
    c.layer.shared_intermediate = chance.one_in(2) ? shape.intermediate : 64 * chance.between(1, 4);
  }
  c.layer.seed = chance.seed();
  c.placement = random_placement(chance, shape.experts, ranks);
  c.options.cap = chance.one_of({1, 4, 9, 17});
  c.tokens = random_split(chance, ranks, c.options.cap);
  c.missing = chance.one_of({0.0, 0.1, 0.6});
  if (chance.one_in(5)) c.hot_rank = chance.between(0, ranks - 1);
  c.hidden_states = chance.one_in(3) ? HiddenStates::heavy_tailed : HiddenStates::gaussian;
  if (chance.one_in(3)) c.options.activation = chance.one_of({Activation::fp8, Activation::bf16});
  c.options.quantisation = {chance.one_in(3) ? 32 : 128, chance.one_of({ScaleFormat::ue8m0, ScaleFormat::f32})};
  if (chance.one_in(2)) c.options.wire = chance.one_of({Wire::bf16, Wire::fp8, Wire::nvfp4});
  c.options.combine_wire = chance.one_of({Wire::bf16, Wire::bf16, Wire::fp8, Wire::nvfp4});
  c.options.weight_at = chance.one_of({WeightAt::activation, WeightAt::combine});
  if (chance.one_in(2)) c.options.clamp = chance.one_of({0.5f, 1.5f, 10.0f});
  c.options.workers = chance.one_in(4) ? chance.between(2, 3) : 1;
  c.options.cpu_sync = chance.one_in(2);
  c.options.gather = chance.one_of({GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled});
  return c;
}

/// Under tensor-parallel attention each rank's slice of the batch must fit the cap.
inline void make_tensor_parallel(Case& c) {
  c.options.tensor_parallel = true;
  c.options.cap = std::max(c.options.cap, (c.all_tokens() + c.ranks() - 1) / c.ranks());
}

/// The bounds of docs/numerics.md against the reference. A value that two computations round apart weighs much in a small
/// case, and a quantised combine wire amplifies it: such cases have a bound of their own and meet the page's together.
class Bounds {
 public:
  void expect(const Case& c, const std::vector<bf16>& outputs, const std::vector<bf16>& reference) {
    const Activation activation = activation_of(c);
    const Comparison comparison = compare(outputs, reference);
    EXPECT_FALSE(comparison.has_nan_mismatch);
    EXPECT_LE(comparison.relative_error, is_small(c) ? small_bound : bound(activation)) << text_of(c);
    ++cases_;
    unequal_ += comparison.relative_error > 1e-3 ? 1 : 0;
    Pool& pool = pools_[activation == Activation::fp8 ? 0 : 1];
    pool.outputs.insert(pool.outputs.end(), outputs.begin(), outputs.end());
    pool.reference.insert(pool.reference.end(), reference.begin(), reference.end());
  }
  ~Bounds() {
    for (const Activation activation : {Activation::fp8, Activation::bf16}) {
      const Pool& pool = pools_[activation == Activation::fp8 ? 0 : 1];
      EXPECT_LE(compare(pool.outputs, pool.reference).relative_error, bound(activation)) << "over all cases";
    }
    // Both round at the same points, so most cases agree far better; a rounding too many shows in all of them.
    EXPECT_LE(unequal_, 1 + cases_ / 4) << "of " << cases_ << " cases";
  }
  Bounds() = default;
  Bounds(const Bounds&) = delete;
  Bounds& operator=(const Bounds&) = delete;

 private:
  struct Pool {
    std::vector<bf16> outputs, reference;
  };
  static constexpr double small_bound = 3e-2;
  static bool is_small(const Case& c) {
    const int work = c.all_tokens() * c.layer.shape.topk * c.layer.shape.intermediate;
    if (c.options.combine_wire == Wire::bf16) return work < 1 << 13;
    return work < 1 << 17 || c.all_tokens() * c.layer.shape.hidden < 1 << 15;
  }
  static double bound(Activation activation) { return activation == Activation::fp8 ? 6e-3 : 4e-3; }

  Pool pools_[2];
  int cases_ = 0;
  int unequal_ = 0;
};

}  // namespace heddle::layer_test
