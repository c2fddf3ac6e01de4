// Overflow::split: a call of more tokens than the cap in passes, bit for bit the call of a layer with a larger cap.
#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

/// The same call with a smaller cap, in passes.
Case split_case(const Case& c, Chance& chance) {
  Case split = c;
  split.options.overflow = Overflow::split;
  split.options.cap = chance.between(1, std::max(1, c.options.cap - 1));
  return split;
}

int passes_of(const Case& c) {
  const int a_pass = c.options.tensor_parallel ? c.options.cap * c.ranks() : c.options.cap;
  return std::max(1, (step_of(c).max_tokens + a_pass - 1) / a_pass);
}

TEST(LayerSplit, EqualsTheCallWithALargerCap) {
  const std::uint64_t seed = announced_seed();
  int several = 0;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(84)) && !::testing::Test::HasFailure(); ++i) {
    Chance chance(seed + i + 5);
    Case c = random_case(seed + i, chance.one_of({1, 2, 3, 5, 8}));
    c.take(host_routes[(seed + i) % std::size(host_routes)]);
    c.options.runner = random_runner(chance, c.options.way);
    if (chance.one_in(4)) make_tensor_parallel(c);
    const Case split = split_case(c, chance);
    SCOPED_TRACE(text_of(split));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const Outcome whole = run_layer(source, c, tokens), parts = run_layer(source, split, tokens, 2);
    EXPECT_EQ(different_bits(parts.outputs, whole.outputs), 0u);
    several += passes_of(split) > 1 ? 1 : 0;
    std::uint64_t real[2] = {0, 0};
    for (int rank = 0; rank < c.ranks(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_EQ(parts.reports[r].passes, passes_of(split)) << "on rank " << rank;
      real[0] += whole.reports[r].rows_real;
      real[1] += parts.reports[r].rows_real;
    }
    EXPECT_EQ(real[1], real[0]) << "pairs of all passes";
  }
  EXPECT_GT(several, 0) << "no call had more than one pass";
}

TEST(LayerSplit, WayAutoChoosesOnceACall) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(16)); ++i) {
    Chance chance(seed + i + 5);
    Case c = split_case(random_case(seed + i, chance.between(1, 4)), chance);
    c.options.way = Way::automatic;
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const Outcome parts = run_layer(source, c, tokens);
    Case whole = c;
    whole.options.overflow = Overflow::error;
    whole.options.cap = std::max(1, c.most_tokens());
    whole.options.way = parts.reports.front().way;
    EXPECT_EQ(different_bits(parts.outputs, run_layer(source, whole, tokens).outputs), 0u) << name(whole.options.way);
  }
}

/// Without it more tokens are refused before anything is written, on every rank alike.
TEST(LayerSplit, WithoutItMoreTokensThanTheCapAreRefused) {
  Case c = random_case(11, 3);
  c.take(host_routes[0]);
  c.tokens = {5, 2, 0};
  c.options.cap = 4;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, 1);
  run_ranks(3, {}, [&](Group& group) {
    LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    const ExchangeMemory memory = layer_memory(weights, c.options);
    Workspace workspace(group, memory.heap_bytes(3), describe(weights, c.options));
    MoeLayer mine(workspace, memory, std::move(weights), c.options);
    const LayerInput input = input_of(c, tokens, group.rank());
    std::vector<bf16> out(static_cast<std::size_t>(input.tokens * c.layer.shape.hidden), untouched);
    EXPECT_THROW(mine.forward(input, step_of(c), out.data()), InputError);
    for (const bf16 value : out) EXPECT_EQ(value.bits, untouched.bits);
    workspace.close();
  });
}

/// A rank that brings more than the step says is named before the first pass, and the next call works.
TEST(LayerSplit, MoreTokensThanTheStepSaysOnOneRank) {
  const std::uint64_t seed = announced_seed();
  for (const Route& route : host_routes) {
    Case c = random_case(seed, 3);
    c.take(route);
    c.tokens = {7, 0, 5};
    c.options.cap = 2;
    c.options.overflow = Overflow::split;
    c.hot_rank = -1;
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, 1);
    const std::vector<bf16> good = run_layer(source, c, tokens).outputs;
    run_ranks(3, {std::chrono::milliseconds(60000)}, [&](Group& group) {
      LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
      const ExchangeMemory memory = layer_memory(weights, c.options);
      Workspace workspace(group, memory.heap_bytes(3), describe(weights, c.options));
      MoeLayer mine(workspace, memory, std::move(weights), c.options);
      const LayerInput input = input_of(c, tokens, group.rank());
      std::vector<bf16> out(static_cast<std::size_t>(input.tokens * c.layer.shape.hidden), untouched);
      try {
        mine.forward(input, {6, Phase::decode}, out.data());
        ADD_FAILURE() << "nothing was thrown on rank " << group.rank();
      } catch (const InputError& error) {
        EXPECT_EQ(group.rank(), 0) << error.what();
        EXPECT_NE(std::string(error.what()).find("7 tokens"), std::string::npos) << error.what();
        for (const bf16 value : out) EXPECT_EQ(value.bits, untouched.bits);
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().rank, 0) << error.what();
      }
      workspace.reset();
      EXPECT_EQ(different_bits(call(c, mine, tokens, group.rank()), part_of(c, good, group.rank())), 0u) << "after it";
      workspace.close();
    });
  }
}

}  // namespace
}  // namespace heddle::layer_test
