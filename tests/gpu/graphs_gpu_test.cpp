// Whole round trips captured in graphs, experts included: graphs of different sizes, of several exchanges and of several
// ways in one workspace, replayed in any order with other tokens, other routing and other numbers of tokens.
#include <gtest/gtest.h>

#include "gpu/trips.hpp"

namespace heddle {
namespace {

int ranks_here() { return 2 * std::max(2, gpus_here()); }

std::vector<ArrivedLayout> layouts_of(Way way) {
  std::vector<ArrivedLayout> layouts;
  for (const auto layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
    if (allows_layout(way, layout)) layouts.push_back(layout);
  }
  return layouts;
}

/// Every way and layout that can be captured.
std::vector<Case> cases_for_graphs(int hidden, int experts, int topk, int cap) {
  std::vector<Case> cases;
  for (const ExchangeOptions& options : every_way_on_gpus(hidden, experts, ranks_here(), topk, cap)) {
    if (options.way == Way::normal) continue;
    for (const ArrivedLayout layout : layouts_of(options.way)) {
      Case c;
      c.options = options;
      c.options.arrived = layout;
      cases.push_back(c);
    }
  }
  return cases;
}

/// A trip and the pool it draws from.
struct Captured {
  std::unique_ptr<Trip> trip;
  const Pool* pool = nullptr;
};

void replay_in_any_order(DeviceRun& run, const std::vector<Captured>& all, int rounds, std::uint64_t seed) {
  Rounds play(run, 8, seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
    const Captured& next = all[random() % all.size()];
    play.play(*next.trip, *next.pool);
    if (random() % 4 == 0) play.settle();  // now and then the host looks; else rounds follow each other on the stream
  }
  play.settle();
}

// One exchange captured several times, a second one of the same way beside it, in halves and in one piece. What a graph
// was captured with (rows that are handed over, where blocks begin) must not leak into another one.
TEST(GraphsGpu, SizesInAnyOrder) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (Case c : cases_for_graphs(256, 19, 4, 64)) {
    SCOPED_TRACE(title(c.options) + " " + std::string(name(c.options.arrived)));
    c.options.weight_at = seed % 2 == 0 ? WeightAt::activation : WeightAt::combine;
    DeviceRun run({c, c}, gpus_here());
    std::vector<std::unique_ptr<Pool>> pools;
    std::vector<Captured> all;
    for (const int step : {1, 8, 24, 64}) {
      pools.push_back(std::make_unique<Pool>(run, c, step, 5, Shared::gated, seed));
      for (const std::size_t exchange : {0, 1}) {
        const TripPlan plan{exchange, step, (static_cast<std::size_t>(step) / 8 + exchange) % 2 == 1, true};
        all.push_back({std::make_unique<Trip>(run, plan, Shared::gated), pools.back().get()});
      }
    }
    replay_in_any_order(run, all, longer(60), seed);
    if (HasFailure()) return;
  }
}

// Ways follow each other in one workspace, each with sizes, wires and experts of its own; normal runs between the graphs.
TEST(GraphsGpu, WaysMixedInOneWorkspace) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  std::vector<Case> cases = cases_for_graphs(256, 19, 4, 40);
  Case normal;
  normal.options = options_for(Way::normal, 256, 19, ranks_here(), 4, 40);
  normal.options.queue_rows = 5;
  normal.options.chunk_rows = 2;
  cases.push_back(normal);
  for (Case& c : cases) {
    c.options.hidden = pick(64, 192, 512);
    c.options.cap = pick(24, 33, 40);
    c.options.placement = Placement::contiguous(pick(3, 8, 19, 33), ranks_here());
    c.options.topk = std::min(c.options.topk, c.options.placement.experts());
    c.options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.combine_wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.quantisation = {pick(128, 32), pick(ScaleFormat::ue8m0, ScaleFormat::f32)};
    c.options.weight_at = pick(WeightAt::activation, WeightAt::combine);
  }
  DeviceRun run(cases, gpus_here());
  std::vector<std::unique_ptr<Pool>> pools;
  std::vector<Captured> all;
  for (std::size_t way = 0; way < cases.size(); ++way) {
    for (const int step : {7, cases[way].options.cap}) {
      pools.push_back(std::make_unique<Pool>(run, cases[way], step, 5, Shared::rows, seed + way));
      const bool captured = cases[way].options.way != Way::normal;
      all.push_back(
          {std::make_unique<Trip>(run, TripPlan{way, step, pick(true, false), captured}, Shared::rows), pools.back().get()});
    }
  }
  replay_in_any_order(run, all, longer(300), seed);
}

// A replay that brings more tokens than its capture allows is a named fault; after a reset all graphs are as good as before.
TEST(GraphsGpu, SurviveAFaultAndAReset) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (const Case& c : cases_for_graphs(128, 12, 3, 32)) {
    SCOPED_TRACE(title(c.options) + " " + std::string(name(c.options.arrived)));
    DeviceRun run(c, gpus_here());
    const Pool fits(run, c, 12, 4, Shared::none, seed), too_large(run, c, 13, 1, Shared::none, seed);
    Trip trip(run, {0, 12, false, true}, Shared::none);
    Trip halves(run, {0, 12, true, true}, Shared::none);
    Rounds play(run, 4, seed);
    for (int round = 0; round < 3; ++round) {
      play.play(trip, fits);
      play.play(halves, fits);
      play.settle();
      play.play(round == 0 ? halves : trip, too_large);
      try {
        play.settle();
        ADD_FAILURE() << "13 tokens passed through a graph captured for 12";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().phase, "input check") << error.what();
        EXPECT_EQ(error.fault().expected, 12u) << error.what();
        EXPECT_EQ(error.fault().seen, 13u) << error.what();
      }
      play.forget();
      run.workspace().reset();
    }
    play.play(trip, fits);
    play.play(halves, fits);
    play.settle();
    if (HasFailure()) return;
  }
}

// normal says by name that it cannot be captured, and goes on.
TEST(GraphsGpu, NormalRefusesACapture) {
  SKIP_WITHOUT_GPU();
  Case c;
  c.options = options_for(Way::normal, 128, 12, ranks_here(), 3, 9);
  c.tokens.assign(static_cast<std::size_t>(ranks_here()), 9);
  DeviceRun run(c, gpus_here());
  {
    const cuda::DeviceScope scope(run.workspace().device(0));
    check(cudaStreamBeginCapture(run.stream(0), cudaStreamCaptureModeRelaxed), "capture");
    try {
      run.exchange(0, 0).dispatch_send(run.inputs(0), {9, Phase::decode}, run.stream(0));
      ADD_FAILURE() << "normal was captured";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("normal cannot be captured"), std::string::npos) << error.what();
    }
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(run.stream(0), &graph), "end of capture");
    check(cudaGraphDestroy(graph), "graph");
  }
  for (int round = 0; round < 3; ++round) round_trip(c, run, round, false, false, false);
}

}  // namespace
}  // namespace heddle
