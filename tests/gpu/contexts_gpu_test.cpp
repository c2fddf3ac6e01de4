// Two contexts in flight: two workspaces, an exchange of half of the SMs in each, a stream a GPU for each, and nothing that
// orders one context's kernels and the other's. They must fit side by side, or GPUs that begin with different ones
// wait for each other until a deadline ends it.
#include <gtest/gtest.h>

#include <thread>

#include "gpu/trips.hpp"

namespace heddle {
namespace {

int ranks_here() { return 2 * std::max(2, gpus_here()); }

int sms_of_gpu() {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "number of SMs");
  return sms;
}

/// One context: a way, two graphs of it, rounds to play.
struct Context {
  DeviceRun run;
  Pool small, large;
  std::vector<std::unique_ptr<Trip>> trips;
  Rounds rounds;
  std::mt19937_64 random;

  Context(const Case& c, int sms, std::uint64_t seed)
      : run({c}, gpus_here(), std::chrono::seconds(10), {sms}),
        small(run, c, 9, 6, Shared::rows, seed),
        large(run, c, c.options.cap, 6, Shared::rows, seed),
        rounds(run, 8, seed),
        random(seed) {
    for (const int step : {9, c.options.cap})
      trips.push_back(std::make_unique<Trip>(run, TripPlan{0, step, false, c.options.way != Way::normal}, Shared::rows));
  }
  const Pool& pool(std::size_t trip) const { return trip == 0 ? small : large; }

  void play(int count) {
    for (int i = 0; i < count; ++i) {
      const std::size_t which = random() % trips.size();
      rounds.play(*trips[which], pool(which));
      if (random() % 4 == 0) rounds.settle();
    }
    rounds.settle();
  }
};

Case case_of(ExchangeOptions options) {
  Case c;
  c.options = std::move(options);
  return c;
}

/// Pairs of ways: each with itself, and each with the next one.
std::vector<std::pair<ExchangeOptions, ExchangeOptions>> pairs_of_ways(int hidden, int cap) {
  std::vector<ExchangeOptions> all = every_way_on_gpus(hidden, 12, ranks_here(), 3, cap);
  std::erase_if(all, [](const ExchangeOptions& options) { return options.way == Way::normal; });
  std::vector<std::pair<ExchangeOptions, ExchangeOptions>> pairs;
  for (std::size_t i = 0; i < all.size(); ++i) {
    pairs.emplace_back(all[i], all[i]);
    pairs.emplace_back(all[i], all[(i + 1) % all.size()]);
  }
  return pairs;
}

/// Both contexts fly, each driven by a thread of its own.
void fly(Context& one, Context& other, int rounds) {
  std::string error;
  std::thread thread([&] {
    try {
      other.play(rounds);
    } catch (const std::exception& e) {
      error = e.what();
    }
  });
  std::string own_error;
  try {
    one.play(rounds);
  } catch (const std::exception& e) {
    own_error = e.what();
  }
  thread.join();
  EXPECT_EQ(own_error, "") << "the first context";
  EXPECT_EQ(error, "") << "the second context";
}

TEST(ContextsGpu, TwoFlyFreely) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  // Half of the SMs each, or a little less: ranks of 16 CTAs can be clusters, ranks of 15 count arrivals.
  const int local_ranks = ranks_here() / gpus_here();
  for (const int sms : {sms_of_gpu() / 2, 16 * local_ranks, 15 * local_ranks}) {
    for (const auto& [first, second] : pairs_of_ways(256, 40)) {
      SCOPED_TRACE(testing::Message() << title(first) << " beside " << title(second) << ", " << sms << " CTAs a GPU each");
      Context one(case_of(first), sms, seed), other(case_of(second), sms, seed + 1);
      fly(one, other, longer(60));
      if (HasFailure()) return;
    }
  }
}

TEST(ContextsGpu, TwoFlyFreelyWithDelays) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (const auto& [first, second] : pairs_of_ways(128, 20)) {
    SCOPED_TRACE(testing::Message() << title(first) << " beside " << title(second));
    Context one(case_of(first), sms_of_gpu() / 2, seed), other(case_of(second), sms_of_gpu() / 2, seed + 1);
    one.run.workspace().set_delays(std::chrono::microseconds(40), static_cast<std::uint32_t>(seed));
    other.run.workspace().set_delays(std::chrono::microseconds(10), static_cast<std::uint32_t>(seed) + 1);
    fly(one, other, longer(40));
    if (HasFailure()) return;
  }
}

// The order that a lucky schedule avoids: GPU 0 is given the first context's kernels first, GPU 1 the second's.
TEST(ContextsGpu, GpusThatBeginWithDifferentOnes) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  const std::uint64_t seed = test_seed();
  for (const auto& [first, second] : pairs_of_ways(256, 40)) {
    SCOPED_TRACE(testing::Message() << title(first) << " beside " << title(second));
    Context one(case_of(first), sms_of_gpu() / 2, seed), other(case_of(second), sms_of_gpu() / 2, seed + 1);
    Context* const both[] = {&one, &other};
    for (int round = 0; round < longer(30) && !HasFailure(); ++round) {
      const std::size_t trip = static_cast<std::size_t>(round) % 2;
      for (Context* context : both) context->rounds.choose(*context->trips[trip], context->pool(trip));
      for (std::size_t gpu = 0; gpu < one.run.workspace().gpus(); ++gpu) {
        Context& early = *both[gpu % 2];
        early.rounds.play_on(gpu, *early.trips[trip], early.pool(trip));
      }
      // Time for the early ones to fill the GPUs, if they can.
      std::this_thread::sleep_for(std::chrono::milliseconds(round % 5 == 0 ? 2 : 0));
      for (std::size_t gpu = 0; gpu < one.run.workspace().gpus(); ++gpu) {
        Context& late = *both[1 - gpu % 2];
        late.rounds.play_on(gpu, *late.trips[trip], late.pool(trip));
      }
      for (Context* context : both) context->rounds.settle();
    }
    if (HasFailure()) return;
  }
}

// normal beside a graph of another way; its host frees and makes memory between its kernels, which waits for the whole GPU.
// With several GPUs that is only allowed while nothing there waits for another GPU, so one GPU is used.
TEST(ContextsGpu, NormalFliesBesideAGraph) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() > 1) GTEST_SKIP() << "normal makes memory between its kernels: one GPU (HEDDLE_GPUS=1)";
  const std::uint64_t seed = test_seed();
  for (const Way way : {Way::low_latency, Way::one_sided}) {
    Context one(case_of(options_for(Way::normal, 256, 12, ranks_here(), 3, 40)), sms_of_gpu() / 2, seed);
    Context other(case_of(options_for(way, 256, 12, ranks_here(), 3, 40)), sms_of_gpu() / 2, seed + 1);
    fly(one, other, longer(60));
    if (HasFailure()) return;
  }
}

// A context that ends in a fault and is reset again and again leaves the other one alone.
TEST(ContextsGpu, FaultsOfOneLeaveTheOtherAlone) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  const int sms = sms_of_gpu() / 2;
  const Case c = case_of(options_for(Way::low_latency, 256, 12, ranks_here(), 3, 40));
  Context flying(case_of(options_for(Way::one_sided, 256, 12, ranks_here(), 3, 40)), sms, seed), faulty(c, sms, seed + 1);
  const Pool too_large(faulty.run, c, 10, 1, Shared::rows, seed);
  std::string error;
  {
    std::jthread thread([&](const std::stop_token& stop) {
      try {
        while (!stop.stop_requested()) flying.play(10);
      } catch (const std::exception& e) {
        error = e.what();
      }
    });
    for (int i = 0; i < longer(20); ++i) {
      faulty.rounds.play(*faulty.trips[0], too_large);
      EXPECT_THROW(faulty.rounds.settle(), FaultError) << "10 tokens passed through a graph captured for 9";
      faulty.rounds.forget();
      faulty.run.workspace().reset();
      faulty.play(3);
    }
  }
  EXPECT_EQ(error, "") << "the context without faults";
}

}  // namespace
}  // namespace heddle
