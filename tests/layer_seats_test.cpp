// What ranks that share GPUs need on the host: a meeting in which one works for all, and row counts that follow from ids.
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>

#include "exchange_support.hpp"
#include "layer/meeting.hpp"
#include "layer/row_counts.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

using std::chrono::milliseconds;

/// A thread a rank; rank r is numbered 10 + r.
void run_members(int members, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int rank = 10; rank < 10 + members; ++rank) threads.emplace_back([&body, rank] { body(rank); });
}

TEST(Meeting, OneWorksForAllAndEverybodySeesIt) {
  for (const int members : {1, 2, 5}) {
    Meeting meeting(10, members, milliseconds(20000));
    int works = 0;  // written by the last to come only, read by all afterwards
    run_members(members, [&](int rank) {
      for (int round = 0; round < 200; ++round) {
        meeting.meet(rank, "test", [&works] { ++works; });
        EXPECT_EQ(works, 2 * round + 1);
        meeting.meet(rank, "test", [&works] { ++works; });
      }
    });
    EXPECT_EQ(works, 400);
  }
}

TEST(Meeting, WhatTheWorkThrowsAllThrowFromThenOn) {
  Meeting meeting(10, 3, milliseconds(20000));
  std::atomic<int> thrown = 0;
  run_members(3, [&](int rank) {
    meeting.meet(rank, "test", [] {});
    for (int again = 0; again < 2; ++again) {
      try {
        meeting.meet(rank, "test", [] { throw InputError("the work failed"); });
      } catch (const InputError& error) {
        EXPECT_STREQ(error.what(), "the work failed");
        ++thrown;
      }
    }
  });
  EXPECT_EQ(thrown, 6);
}

TEST(Meeting, AnAbsentRankIsNamedInTime) {
  Meeting meeting(10, 3, milliseconds(300));
  const auto since = std::chrono::steady_clock::now();
  run_members(3, [&](int rank) {
    if (rank == 11) return;
    try {
      meeting.meet(rank, "roll call", [] { ADD_FAILURE() << "two of three are not all"; });
      ADD_FAILURE() << "rank 11 was not missed";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().peer, 11);
      EXPECT_EQ(error.fault().phase, "roll call");
      EXPECT_EQ(error.fault().expected, 3u);
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - since, milliseconds(20000));
}

TEST(Meeting, WorkMayTakeLongerThanTheDeadline) {
  Meeting meeting(10, 2, milliseconds(100));
  run_members(
      2, [&](int rank) { EXPECT_NO_THROW(meeting.meet(rank, "test", [] { std::this_thread::sleep_for(milliseconds(400)); })); });
}

TEST(Meeting, ItsEndWakesWhoWaits) {
  Meeting meeting(10, 2, milliseconds(60000));
  const auto since = std::chrono::steady_clock::now();
  run_members(2, [&](int rank) {
    if (rank == 10) {
      std::this_thread::sleep_for(milliseconds(50));
      meeting.end(std::make_exception_ptr(InputError("rank 10 refused")));
      meeting.end(std::make_exception_ptr(InputError("a second story")));
    }
    try {
      meeting.meet(rank, "test", [] { ADD_FAILURE() << "there is no meeting any more"; });
    } catch (const InputError& error) {
      EXPECT_STREQ(error.what(), "rank 10 refused");
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - since, milliseconds(30000));
  meeting.begin_again();
  std::atomic<int> works = 0;
  run_members(2, [&](int rank) {
    for (int round = 0; round < 3; ++round) meeting.meet(rank, "test", [&works] { ++works; });
  });
  EXPECT_EQ(works, 3);
}

/// Counted from ids, through text, they are what the host engine's own tables say.
void expect_counts_of_the_engine(const Case& c, const std::vector<bool>& live, bool all_outputs) {
  RowCounts counts(c.options);
  for (int rank = 0; rank < c.ranks(); ++rank) {
    RowCounts one(c.options);
    const RankData data = draw(c, rank, 0);
    one.count(rank, data.input(c.tokens_of(rank)));
    counts.take(one.lines(rank, 1));
  }
  std::latch made(c.ranks());  // who is masked has left all barriers by then: a reset without it would tell it that it is late
  run_ranks(c.ranks(), {}, [&](Group& group) {
    const int rank = group.rank();
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    const auto exchange = create_exchange(workspace, c.options, memory);
    made.count_down();
    if (!is_live(live, rank)) return;
    if (!live.empty()) {
      for (int waits = 0; !made.try_wait() && waits < 20'000; ++waits) std::this_thread::sleep_for(milliseconds(1));
      workspace.reset(live);
    }
    const RankData data = draw(c, rank, 0);
    const Arrived arrived = exchange->dispatch(data.input(c.tokens_of(rank)), {c.most_tokens(), Phase::decode});
    const ExchangeTraffic out = exchange->take_traffic();
    const auto results = run_experts(c, arrived, rank);
    std::vector<bf16> outputs(data.hidden.size() + 1);
    CombineOutput output;
    output.out = outputs.data();
    for (int r = 0; r < (c.tensor_parallel() ? 1 : c.ranks()); ++r) {
      if (r < rank) output.first += c.tokens_of(r);
      output.all_tokens += c.tokens_of(r);
    }
    std::vector<bf16> all(static_cast<std::size_t>(output.all_tokens * c.options.hidden + 1));
    const bool shares = all_outputs || c.tensor_parallel();
    if (shares) output.all_out = all.data();
    exchange->combine(results.data(), output);
    const ExchangeTraffic back = exchange->take_traffic();
    const auto expect_same = [&](const ExchangeTraffic& have, const ExchangeTraffic& want, const char* half) {
      EXPECT_EQ(have.remote_rows, want.remote_rows) << half << ", rank " << rank;
      EXPECT_EQ(have.local_rows, want.local_rows) << half << ", rank " << rank;
      EXPECT_EQ(have.remote_bytes, want.remote_bytes) << half << ", rank " << rank;
      EXPECT_EQ(have.local_bytes, want.local_bytes) << half << ", rank " << rank;
    };
    expect_same(counts.dispatched(rank, workspace.live()), out, "dispatch");
    expect_same(counts.combined(rank, workspace.live(), shares), back, "combine");
    EXPECT_EQ(counts.received(rank, workspace.live()), arrived.received) << "rank " << rank;
  });
}

TEST(RowCounts, AreThoseOfTheHostEngine) {
  const std::uint64_t seed = test_seed();
  for (const std::vector<bool>& live : {std::vector<bool>{}, std::vector<bool>{true, false, true}}) {
    for (const ExchangeOptions& options : every_way(64, 7, 3, 3, 9)) {
      for (const bool all_outputs : {false, true}) {
        Case c;
        c.options = options;
        c.options.wire = Wire::fp8;
        c.tokens = {9, 4, 0};
        c.seed = seed;
        SCOPED_TRACE(testing::Message() << title(options) << (live.empty() ? "" : ", rank 1 dead"));
        expect_counts_of_the_engine(c, live, all_outputs);
      }
    }
  }
}

}  // namespace
}  // namespace heddle
