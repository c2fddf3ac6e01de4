// The fused layer's order of tasks, by itself: every task once, nothing waits for what nobody has taken, the ring is large
// enough. Small cases exhaustively, whatever the counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "exchange_support.hpp"
#include "mega/layout.hpp"

namespace heddle {
namespace {

using Kind = MegaTask::Kind;

/// Calls check(schedule) for all small schedules.
template <class Check>
void for_schedules(Check check) {
  for (int blocks = 0; blocks <= 9; ++blocks) {
    for (int gemm1 = 1; gemm1 <= 5; ++gemm1) {
      for (int gemm2 = 1; gemm2 <= 5; ++gemm2) {
        for (int lag = 1; lag <= 4; ++lag) {
          SCOPED_TRACE(testing::Message() << blocks << " blocks, " << gemm1 << " + " << gemm2 << " tasks, lag " << lag);
          check(MegaSchedule{blocks, gemm1, gemm2, lag});
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

std::vector<MegaTask> tasks_of(const MegaSchedule& schedule) {
  std::vector<MegaTask> tasks;
  for (int place = 0; place < schedule.tasks(); ++place) tasks.push_back(schedule.task(place));
  return tasks;
}

TEST(MegaSchedule, EveryTaskHasOnePlace) {
  for_schedules([](const MegaSchedule& schedule) {
    std::set<std::tuple<Kind, int, int>> seen;
    for (const MegaTask& task : tasks_of(schedule)) {
      EXPECT_TRUE(task.block >= 0 && task.block < schedule.blocks);
      EXPECT_TRUE(task.part >= 0 && task.part < (task.kind == Kind::gemm1 ? schedule.gemm1_tasks : schedule.gemm2_tasks));
      EXPECT_TRUE(seen.insert({task.kind, task.block, task.part}).second) << "block " << task.block << ", part " << task.part;
    }
    EXPECT_EQ(static_cast<int>(seen.size()), schedule.blocks * (schedule.gemm1_tasks + schedule.gemm2_tasks));
  });
}

TEST(MegaSchedule, WarmUpThenBothKindsInTurn) {
  for_schedules([](const MegaSchedule& schedule) {
    const std::vector<MegaTask> tasks = tasks_of(schedule);
    const int warm_up = std::min(schedule.lag, schedule.blocks) * schedule.gemm1_tasks;
    const int drain = std::min(schedule.lag, schedule.blocks) * schedule.gemm2_tasks;
    for (int place = 0; place < warm_up; ++place) EXPECT_EQ(tasks[static_cast<std::size_t>(place)].kind, Kind::gemm1);
    // In between no kind is ever ahead of its share by a task.
    int gemm1 = 0;
    for (int place = warm_up; place < schedule.tasks() - drain; ++place) {
      gemm1 += tasks[static_cast<std::size_t>(place)].kind == Kind::gemm1 ? 1 : 0;
      const int done = place + 1 - warm_up;
      EXPECT_LT(std::abs(gemm1 * schedule.a_block() - done * schedule.gemm1_tasks), schedule.a_block());
    }
    for (int place = schedule.tasks() - drain; place < schedule.tasks(); ++place)
      EXPECT_EQ(tasks[static_cast<std::size_t>(place)].kind, Kind::gemm2);
  });
}

/// Places of all tasks, by kind and block: the first and the last.
struct Places {
  std::map<std::pair<Kind, int>, int> first, last;
  explicit Places(const MegaSchedule& schedule) {
    for (int place = 0; place < schedule.tasks(); ++place) {
      const MegaTask task = schedule.task(place);
      first.try_emplace({task.kind, task.block}, place);
      last[{task.kind, task.block}] = place;
    }
  }
};

// With these two, a line that is worked off from its beginning never waits for anything behind the task in hand.
TEST(MegaSchedule, WhatATaskWaitsForComesBeforeIt) {
  for_schedules([](const MegaSchedule& schedule) {
    const Places places(schedule);
    const int ring = schedule.lag + 1;
    for (int block = 0; block < schedule.blocks; ++block) {
      EXPECT_LT(places.last.at({Kind::gemm1, block}), places.first.at({Kind::gemm2, block})) << "activations of block " << block;
      if (block < ring) continue;
      EXPECT_LT(places.last.at({Kind::gemm2, block - ring}), places.first.at({Kind::gemm1, block})) << "room of block " << block;
    }
  });
}

// A ring of one block less would deadlock: the bound is not only enough.
TEST(MegaSchedule, TheRingIsNoLargerThanItMustBe) {
  const MegaSchedule schedule{8, 2, 2, 3};
  const Places places(schedule);
  EXPECT_GT(places.last.at({Kind::gemm2, 0}), places.first.at({Kind::gemm1, 3}));
}

/// Workers and dispatch as they wait for each other, stepped in random order; says whether all ended.
bool runs_to_its_end(const MegaSchedule& schedule, int ring_blocks, int workers, std::mt19937_64& random) {
  std::vector<int> gemm1_done(static_cast<std::size_t>(schedule.blocks)), gemm2_done = gemm1_done;
  std::vector<bool> filled(static_cast<std::size_t>(schedule.blocks));
  std::vector<int> in_hand(static_cast<std::size_t>(workers), -1);
  int next = 0;
  int next_fill = 0;
  const auto at = [](auto& list, int i) -> decltype(auto) { return list[static_cast<std::size_t>(i)]; };
  const auto step = [&](int who) {
    if (who == workers) {  // dispatch fills blocks in order, where the ring has room
      if (next_fill == schedule.blocks) return false;
      if (next_fill >= ring_blocks && at(gemm2_done, next_fill - ring_blocks) < schedule.gemm2_tasks) return false;
      filled[static_cast<std::size_t>(next_fill++)] = true;
      return true;
    }
    int& place = at(in_hand, who);
    if (place < 0) {
      if (next == schedule.tasks()) return false;
      place = next++;
      return true;
    }
    const MegaTask task = schedule.task(place);
    if (task.kind == Kind::gemm1 && !filled[static_cast<std::size_t>(task.block)]) return false;
    if (task.kind == Kind::gemm2 && at(gemm1_done, task.block) < schedule.gemm1_tasks) return false;
    ++at(task.kind == Kind::gemm1 ? gemm1_done : gemm2_done, task.block);
    place = -1;
    return true;
  };
  for (;;) {
    std::vector<int> order(static_cast<std::size_t>(workers) + 1);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    if (std::none_of(order.begin(), order.end(), step)) break;
  }
  return next == schedule.tasks() && std::all_of(in_hand.begin(), in_hand.end(), [](int place) { return place < 0; }) &&
         std::all_of(gemm2_done.begin(), gemm2_done.end(), [&](int done) { return done == schedule.gemm2_tasks; });
}

TEST(MegaSchedule, NoDeadlockWithTheSmallestRingAndAnyNumberOfWorkers) {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  for_schedules([&random](const MegaSchedule& schedule) {
    for (const int workers : {1, 2, 3, 7, 50}) EXPECT_TRUE(runs_to_its_end(schedule, schedule.lag + 1, workers, random)) << workers;
  });
}

TEST(MegaSchedule, TheModelSeesADeadlockWhereTheRingIsTooSmall) {
  std::mt19937_64 random(1);
  EXPECT_FALSE(runs_to_its_end({8, 2, 2, 3}, 3, 1, random));
}

TEST(MegaSchedule, WarmUpCoversARoundOfAllWorkers) {
  for (const int workers : {1, 2, 8, 132}) {
    for (const int gemm1 : {1, 3, 16, 144}) {
      EXPECT_GE((lag_of(workers, gemm1) - 1) * gemm1, workers);
      EXPECT_GE(live_blocks(lag_of(workers, gemm1), 0), lag_of(workers, gemm1) + 1);
    }
  }
}

/// Every list of `n` counts from 0 to `most`.
template <class Check>
void for_counts(int n, int most, Check check) {
  std::vector<int> counts(static_cast<std::size_t>(n), 0);
  for (;;) {
    check(counts);
    std::size_t i = 0;
    while (i < counts.size() && counts[i] == most) counts[i++] = 0;
    if (i == counts.size()) return;
    ++counts[i];
  }
}

TEST(MegaRows, SourcesTakeTurnsAndEveryRowIsTakenOnce) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for_counts(ranks, 4, [ranks](const std::vector<int>& counts) {
      const auto count = [&counts](int s) { return counts[static_cast<std::size_t>(s)]; };
      // What it must be: again and again one row of each source that has some left.
      std::vector<std::pair<int, int>> want;
      for (int turn = 0; turn < 4; ++turn) {
        for (int s = 0; s < ranks; ++s) {
          if (count(s) > turn) want.emplace_back(s, turn);
        }
      }
      for (std::size_t row = 0; row < want.size(); ++row) {
        const RowSource source = source_of_row(ranks, count, static_cast<int>(row));
        EXPECT_EQ(std::make_pair(source.rank, source.number), want[row]) << testing::PrintToString(counts) << ", row " << row;
      }
    });
  }
}

TEST(MegaRows, BlocksOfAllExpertsWhateverTheirCounts) {
  for (const int block_rows : {1, 2, 3}) {
    for_counts(4, 5, [block_rows](const std::vector<int>& counts) {
      const std::vector<std::int32_t> rows(counts.begin(), counts.end());
      std::vector<std::int32_t> ends;
      for (const int n : counts) ends.push_back((ends.empty() ? 0 : ends.back()) + (n + block_rows - 1) / block_rows);
      const MegaBlocks blocks{4, block_rows, rows.data(), ends.data()};
      std::vector<int> found(4, 0);
      for (int block = 0; block < blocks.count(); ++block) {
        const int expert = blocks.expert_of(block);
        const int n = blocks.rows_of(expert, block);
        EXPECT_TRUE(n >= 1 && n <= block_rows);
        EXPECT_TRUE(block >= blocks.begin(expert) && block < ends[static_cast<std::size_t>(expert)]);
        found[static_cast<std::size_t>(expert)] += n;
      }
      EXPECT_EQ(found, counts);
    });
  }
  EXPECT_EQ((MegaBlocks{0, 8, nullptr, nullptr}).count(), 0);
}

TEST(MegaRows, NoCountsMakeMoreBlocksThanTheWorstCase) {
  for (const int block_rows : {1, 2, 3, 8}) {
    for (const int topk : {1, 2, 3}) {
      const ExchangeShape shape{2, 6, 3, topk, 2};  // 4 tokens in all, 3 local experts
      std::size_t most = 0;
      for_counts(3, 4, [&](const std::vector<int>& counts) {
        const int pairs = std::accumulate(counts.begin(), counts.end(), 0);
        if (pairs > 4 * std::min(topk, 3)) return;
        std::size_t blocks = 0;
        for (const int n : counts) blocks += static_cast<std::size_t>((n + block_rows - 1) / block_rows);
        most = std::max(most, blocks);
      });
      EXPECT_LE(most, worst_blocks(shape, block_rows)) << block_rows << " rows, top-" << topk;
    }
  }
}

}  // namespace
}  // namespace heddle
