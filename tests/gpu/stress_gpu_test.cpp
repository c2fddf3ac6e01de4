// A thousand whole round trips a way with random sleeps before verbs, every output compared. Rounds are queued in bursts, so
// that GPUs run ahead of each other; the seed of the sleeps, the tokens, the routing and the counts change all the time.
#include <gtest/gtest.h>

#include "gpu/trips.hpp"

namespace heddle {
namespace {

/// Small batches meet in one cluster, larger ones count arrivals; with few CTAs a rank has one.
constexpr int small_step = 9;
constexpr int large_step = 20;

struct Sizes {
  int rounds = 0;
  int burst = 0;  ///< most rounds between two looks of the host
};

/// Trips of one way by two sizes, in one piece and in halves, in random order under delays.
void stress(const ExchangeOptions& options, const DeviceExchangeOptions& device, const Sizes& sizes, std::uint64_t seed) {
  SCOPED_TRACE(testing::Message() << title(options) << ", " << device.sms << " CTAs a GPU (0: all), HEDDLE_SEED=" << seed);
  Case c;
  c.options = options;
  DeviceRun run({c, c}, gpus_here(), std::chrono::seconds(20), device);
  const Pool small(run, c, small_step, 8, Shared::rows, seed), large(run, c, large_step, 8, Shared::rows, seed);
  const bool captured = options.way != Way::normal;
  std::vector<std::unique_ptr<Trip>> trips;
  for (const int step : {small_step, large_step}) {
    for (const bool halves : {false, true}) {
      trips.push_back(std::make_unique<Trip>(run, TripPlan{halves ? 1u : 0u, step, halves, captured}, Shared::rows));
    }
  }
  Rounds play(run, sizes.burst, seed);
  std::mt19937_64 random(seed);
  for (int done = 0; done < sizes.rounds && !testing::Test::HasFailure();) {
    const auto longest = std::chrono::microseconds(random() % 4 == 0 ? 60 : 15);
    run.workspace().set_delays(longest, static_cast<std::uint32_t>(random()));
    const int burst = 1 + static_cast<int>(random() % static_cast<std::uint64_t>(sizes.burst));
    for (int i = 0; i < burst; ++i) {
      Trip& trip = *trips[random() % trips.size()];
      play.play(trip, trip.plan().step == small_step ? small : large);
    }
    play.settle();
    done += burst;
  }
}

/// One way and mode, by number among every_way_on_gpus.
class StressGpu : public testing::TestWithParam<int> {};

ExchangeOptions options_of(int number, int ranks) {
  return every_way_on_gpus(128, 12, ranks, 3, large_step)[static_cast<std::size_t>(number)];
}

std::string name_of(const testing::TestParamInfo<int>& info) {
  std::string text = title(options_of(info.param, 4));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == ' ' || c == '='; }, '_');
  return text;
}

TEST_P(StressGpu, AThousandRoundsWithDelays) {
  SKIP_WITHOUT_GPU();
  stress(options_of(GetParam(), 2 * std::max(2, gpus_here())), {}, {longer(1000), 8}, test_seed());
}

// Fewer CTAs than SMs, one a rank and an odd number: other shapes of a rank's barrier.
TEST_P(StressGpu, FewCtas) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  const int ranks = 2 * std::max(2, gpus_here());
  for (const int ctas_a_rank : {1, 3}) {
    stress(options_of(GetParam(), ranks), {ctas_a_rank * ranks / gpus_here()}, {longer(100), 8}, seed);
  }
}

// Rows in narrow formats, other layouts, more ranks than a warp has to wait for alone.
TEST_P(StressGpu, ManyRanksAndNarrowRows) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  ExchangeOptions options = options_of(GetParam(), 16);
  options.wire = seed % 2 == 0 ? Wire::fp8 : Wire::nvfp4;
  options.combine_wire = seed % 3 == 0 ? Wire::bf16 : Wire::fp8;
  for (const auto layout : {ArrivedLayout::masked, ArrivedLayout::routed}) {
    if (allows_layout(options.way, layout)) options.arrived = layout;
  }
  stress(options, {}, {longer(60), 4}, seed);
}

INSTANTIATE_TEST_SUITE_P(Ways, StressGpu, testing::Range(0, static_cast<int>(every_way_on_gpus(128, 12, 4, 3, large_step).size())),
                         name_of);

}  // namespace
}  // namespace heddle
