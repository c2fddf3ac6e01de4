// Every way with bulk copies: the bits are those of the host engine and of ordinary copies, whatever part of a row goes by them,
// however few CTAs there are, with sleeps before verbs and in captured round trips.
#include <gtest/gtest.h>

#include "gpu/modes.hpp"
#include "gpu/trips.hpp"

namespace heddle {
namespace {

constexpr std::chrono::seconds deadline(20);

DeviceExchangeOptions bulk_from(int bytes, int sms = 0) {
  DeviceExchangeOptions device;
  device.bulk_bytes = bytes;
  device.sms = sms;
  return device;
}

std::string how(const DeviceExchangeOptions& device) {
  return "bulk copies from " + std::to_string(device.bulk_bytes) + " bytes on, " + std::to_string(device.sms) +
         " CTAs a GPU (0: all)";
}

/// Every mode of every way, also those that other programs have apart, in every layout.
std::vector<ExchangeOptions> everything(int hidden, int experts, int ranks, int topk, int cap) {
  std::vector<ExchangeOptions> all;
  for (const ExchangeOptions& base : every_way(hidden, experts, ranks, topk, cap)) {
    for (const auto layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
      if (!allows_layout(base.way, layout)) continue;
      all.push_back(base);
      all.back().arrived = layout;
      if (base.way != Way::elastic || base.reduce != Reduce::rank) continue;
      all.push_back(all.back());
      all.back().cpu_sync = true;
    }
  }
  return all;
}

/// Halves and whole, every kind of shared expert, outputs of all ranks in the end; arrivals against the host engine.
void play_rounds(const Case& c, const DeviceExchangeOptions& device) {
  SCOPED_TRACE(testing::Message() << how(device) << "\n" << describe(c.options));
  Modes modes(c, deadline, device);
  for (int round = 0; round < 3; ++round) {
    const Shared shared = round == 0 ? Shared::none : round == 1 ? Shared::gated : Shared::rows;
    modes.round_trip(round, {round % 2 == 1, round == 2, shared, {}});
    if (testing::Test::HasFatalFailure()) return;
  }
}

Case case_of(const ExchangeOptions& options, const std::vector<int>& tokens) {
  Case c;
  c.options = options;
  for (int rank = 0; rank < c.ranks(); ++rank) c.tokens.push_back(tokens[static_cast<std::size_t>(rank) % tokens.size()]);
  return c;
}

// From 16 bytes on everything goes by bulk copies; hidden 192 is a piece cut short, 4160 fills slots of the ring and begins
// another, 7168 goes round it. Ranks, of which one has no tokens, are more than one pulls of at a time.
TEST(BulkGpu, EveryWayGivesTheHostEnginesBits) {
  SKIP_WITHOUT_GPU();
  for (const int hidden : {192, 4160, 7168}) {
    for (const int ranks : {1, 2, 6}) {
      if (ranks < gpus_here()) continue;
      for (const ExchangeOptions& options : everything(hidden, 13, ranks, 5, 14)) {
        play_rounds(case_of(options, {14, 0, 9}), bulk_from(16));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Long rows are divided for many warps, and only the larger parts go by bulk copies; with few CTAs whole rows do.
TEST(BulkGpu, PartsOfRowsAndFewCtas) {
  SKIP_WITHOUT_GPU();
  const int ranks = std::max(2, gpus_here());
  for (const ExchangeOptions& options : everything(2880, 9, ranks, 3, 100)) {
    for (const DeviceExchangeOptions& device : {bulk_from(2048), bulk_from(1024, ranks), bulk_from(1024, 8 * ranks)}) {
      play_rounds(case_of(options, {100, 45}), device);
      if (HasFatalFailure()) return;
    }
  }
}

// One of the two directions, or neither, is quantised: its rows are moved by lanes.
TEST(BulkGpu, BesideQuantisedRows) {
  SKIP_WITHOUT_GPU();
  const int ranks = std::max(2, gpus_here());
  for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
    for (const Wire back : {Wire::bf16, Wire::fp8}) {
      for (ExchangeOptions options : everything(640, 9, ranks, 3, 20)) {
        options.wire = wire;
        options.combine_wire = back;
        play_rounds(case_of(options, {20, 11}), bulk_from(16));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// gather and one_sided: results where peers pull them.
TEST(BulkGpu, ResultsMadeInPlace) {
  SKIP_WITHOUT_GPU();
  int offered = 0;
  for (const int ranks : {2, 5}) {
    if (ranks < gpus_here()) continue;
    for (const ExchangeOptions& options : every_way_on_gpus(1024, 10, ranks, 3, 24)) {
      if (options.way != Way::gather && options.way != Way::one_sided) continue;
      SCOPED_TRACE(testing::Message() << title(options) << ", " << ranks << " ranks");
      const Case c = case_of(options, {24, 0, 22, 21});
      DeviceRun run({c}, gpus_here(), deadline, bulk_from(16));
      for (int round = 0; round < 4; ++round) {
        ASSERT_TRUE(round_trip_in_place(c, run, round));
        ++offered;
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(offered, 0);
}

TEST(BulkGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  const std::vector<bool> survivors{true, false, true, true};
  if (gpus_here() > 4) GTEST_SKIP() << "for four ranks";
  for (const ExchangeOptions& options : every_way_on_gpus(512, 10, 4, 3, 9)) {
    SCOPED_TRACE(title(options));
    Modes modes(case_of(options, {6, 4, 0, 9}), deadline, bulk_from(16));
    modes.round_trip(0, {false, true, Shared::none, {}});
    modes.run().workspace().reset(survivors);
    for (int round = 1; round < 3 && !HasFatalFailure(); ++round)
      modes.round_trip(round, {round == 2, true, Shared::rows, survivors});
    modes.run().workspace().reset(std::vector<bool>(survivors.size(), true));
    if (!HasFatalFailure()) modes.round_trip(3, {false, true, Shared::none, {}});
    if (HasFatalFailure()) return;
  }
}

// The same exchange without and with bulk copies in one workspace, in turn: what the one leaves to be overwritten the other
// overwrites by the other proxy.
TEST(BulkGpu, InTurnWithOrdinaryCopies) {
  SKIP_WITHOUT_GPU();
  const int ranks = std::max(2, gpus_here());
  for (const ExchangeOptions& options : every_way_on_gpus(2048, 12, ranks, 4, 40)) {
    SCOPED_TRACE(title(options));
    const Case c = case_of(options, {40, 17});
    DeviceRun run(c, gpus_here());
    for (int round = 0; round < 8; ++round) {
      for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) run.remake(gpu, bulk_from(round % 2 == 0 ? 16 : 0));
      round_trip(c, run, round, false, round % 4 == 1, round % 3 == 1);
      if (HasFatalFailure()) return;
    }
  }
}

/// Round trips of one way in bursts, in one piece and in halves, captured where the way allows it, with sleeps before verbs.
void stress(const ExchangeOptions& options, const DeviceExchangeOptions& device, int rounds, std::uint64_t seed) {
  SCOPED_TRACE(testing::Message() << title(options) << ", " << how(device) << ", HEDDLE_SEED=" << seed);
  Case c;
  c.options = options;
  DeviceRun run({c, c}, gpus_here(), deadline, device);
  const int step = options.cap;
  const Pool pool(run, c, step, 8, Shared::rows, seed);
  const bool captured = options.way != Way::normal;
  std::vector<std::unique_ptr<Trip>> trips;
  for (const bool halves : {false, true})
    trips.push_back(std::make_unique<Trip>(run, TripPlan{halves ? 1u : 0u, step, halves, captured}, Shared::rows));
  Rounds play(run, 8, seed);
  std::mt19937_64 random(seed);
  for (int done = 0; done < rounds && !testing::Test::HasFailure(); done += 4) {
    const auto longest = std::chrono::microseconds(random() % 4 == 0 ? 40 : 5);
    run.workspace().set_delays(longest, static_cast<std::uint32_t>(random()));
    for (int i = 0; i < 4; ++i) play.play(*trips[random() % trips.size()], pool);
    play.settle();
  }
}

TEST(BulkGpu, RoundsInBurstsWithDelays) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  const int ranks = 2 * std::max(2, gpus_here());
  for (const ExchangeOptions& options : every_way_on_gpus(1024, 12, ranks, 3, 150)) {
    stress(options, bulk_from(16), longer(60), seed);
    if (HasFailure()) return;
    stress(options, bulk_from(1024, 3 * ranks / gpus_here()), longer(40), seed + 1);
    if (HasFailure()) return;
  }
}

TEST(BulkGpu, RefusedByName) {
  SKIP_WITHOUT_GPU();
  Case c = case_of(options_for(Way::one_sided, 128, 12, std::max(2, gpus_here()), 3, 8), {8});
  DeviceRun run(c, gpus_here());
  for (const int bytes : {-1, 65536}) {
    try {
      run.remake(0, bulk_from(bytes));
      ADD_FAILURE() << bytes << " bytes were accepted";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("bulk_bytes is " + std::to_string(bytes)), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace heddle
