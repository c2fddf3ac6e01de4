// The task list of the Hopper tile engine: every row of every expert meets every tile of weights exactly once.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "experts/sm90/call.hpp"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {
namespace {

struct Lists {
  std::vector<int> row_end;
  std::vector<int> block_end;
};

Lists lists_of(const std::vector<int>& counts, int most_tokens) {
  Lists lists;
  int rows = 0;
  int blocks = 0;
  for (const int count : counts) {
    rows += count;
    blocks += blocks_of(count, most_tokens);
    lists.row_end.push_back(rows);
    lists.block_end.push_back(blocks);
  }
  return lists;
}

TEST(Tasks, EveryRowMeetsEveryTileOnce) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const int most_tokens = std::vector<int>{32, 96, 128}[random() % 3];
    const int unit = most_tokens == 128 && random() % 2 == 0 ? 128 : 8;
    const int tiles = 1 + static_cast<int>(random() % 9);
    std::vector<int> counts(1 + random() % 40);
    for (int& count : counts) count = random() % 3 == 0 ? 0 : static_cast<int>(random() % 300);
    const Lists lists = lists_of(counts, most_tokens);
    const TaskList tasks{lists.row_end.data(), lists.block_end.data(), static_cast<int>(counts.size()), tiles, unit};
    const auto total = static_cast<std::size_t>(lists.row_end.back());
    std::vector<int> met(total * static_cast<std::size_t>(tiles), 0);
    const int ctas = 1 + static_cast<int>(random() % 12);
    int found = 0;
    for (int cta = 0; cta < ctas; ++cta) {
      TaskTurns turns(tasks, cta, ctas);
      Task task;
      while (turns.next(task)) {
        ++found;
        ASSERT_GE(task.rows, 1) << "seed " << seed;
        ASSERT_LE(task.rows, most_tokens) << "seed " << seed;
        ASSERT_LE(task.first + task.rows, counts[static_cast<std::size_t>(task.expert)]) << "seed " << seed;
        ASSERT_LT(task.tile, tiles) << "seed " << seed;
        const int begin = task.expert == 0 ? 0 : lists.row_end[static_cast<std::size_t>(task.expert) - 1];
        ASSERT_EQ(task.flat, begin + task.first) << "seed " << seed;
        for (int row = 0; row < task.rows; ++row) {
          met[static_cast<std::size_t>(task.flat + row) * static_cast<std::size_t>(tiles) + static_cast<std::size_t>(task.tile)] +=
              1;
        }
      }
    }
    ASSERT_EQ(found, tasks.count()) << "seed " << seed;
    for (const int times : met) ASSERT_EQ(times, 1) << "seed " << seed;
  }
}

TEST(Tasks, WithoutRowsThereAreNone) {
  const Lists lists = lists_of({0, 0, 0}, 32);
  EXPECT_EQ((TaskList{lists.row_end.data(), lists.block_end.data(), 3, 16}.count()), 0);
  EXPECT_EQ((TaskList{nullptr, nullptr, 0, 16}.count()), 0);
}

/// CTAs that run at the same time share weights: the row blocks of a tile are neighbours in the list.
TEST(Tasks, RowBlocksOfATileFollowEachOther) {
  const Lists lists = lists_of({100, 7}, 32);
  const TaskList tasks{lists.row_end.data(), lists.block_end.data(), 2, 3};
  ASSERT_EQ(tasks.count(), 4 * 3 + 3);
  for (int index = 0; index < 12; ++index) {
    EXPECT_EQ(tasks.find(index).tile, index / 4);
    EXPECT_EQ(tasks.find(index).first, index % 4 * 32);
  }
  EXPECT_EQ(tasks.find(12).expert, 1);
}

/// As few blocks as there can be, of about as many rows each.
TEST(Tasks, RowBlocksAreAlike) {
  for (const int most : {32, 96, 128}) {
    for (int rows = 1; rows <= 700; ++rows) {
      const Lists lists = lists_of({rows}, most);
      const TaskList tasks{lists.row_end.data(), lists.block_end.data(), 1, 1};
      ASSERT_EQ(tasks.count(), (rows + most - 1) / most);
      const int even = (rows + tasks.count() - 1) / tasks.count();
      for (int index = 0; index < tasks.count(); ++index) ASSERT_LT(tasks.find(index).rows, even + 8) << rows << " rows, " << most;
    }
  }
  const Lists lists = lists_of({192}, 128);
  EXPECT_EQ((TaskList{lists.row_end.data(), lists.block_end.data(), 1, 1}.find(0).rows), 96);
}

/// A CTA's tasks are of row blocks in turn, also where the number of CTAs is a multiple of the number of blocks.
TEST(Tasks, BlocksGoRound) {
  const Lists lists = lists_of({192}, 128);
  const TaskList tasks{lists.row_end.data(), lists.block_end.data(), 1, 8, 128};
  TaskTurns turns(tasks, 0, 4);
  Task task;
  for (int turn = 0; turn < 4; ++turn) {
    ASSERT_TRUE(turns.next(task));
    EXPECT_EQ(task.rows, turn % 2 == 0 ? 128 : 64) << "turn " << turn;
  }
  EXPECT_FALSE(turns.next(task));
}

/// Where only full and half tiles exist, blocks are full but the last one.
TEST(Tasks, RowBlocksOfWholeUnits) {
  for (const int rows : {1, 64, 128, 129, 192, 300, 512}) {
    const Lists lists = lists_of({rows}, 128);
    const TaskList tasks{lists.row_end.data(), lists.block_end.data(), 1, 1, 128};
    ASSERT_EQ(tasks.count(), (rows + 127) / 128);
    for (int index = 0; index < tasks.count(); ++index) {
      EXPECT_EQ(tasks.find(index).rows, index + 1 < tasks.count() ? 128 : rows - 128 * index) << rows << " rows";
    }
  }
}

TEST(RowMap, FindsRowsInEveryArrangement) {
  const Task task{2, 0, 10, 5, 37};
  EXPECT_EQ(RowMap{}.place(task, 3), 40u);
  EXPECT_EQ((RowMap{RowMap::Kind::blocks, 100, nullptr, nullptr}.place(task, 3)), 213u);
  const std::vector<int> begin{0, 64, 128};
  EXPECT_EQ((RowMap{RowMap::Kind::listed, 0, begin.data(), nullptr}.place(task, 3)), 141u);
  std::vector<int> rows(50, -1);
  rows[40] = 7;
  EXPECT_EQ((RowMap{RowMap::Kind::flat, 0, nullptr, rows.data()}.place(task, 3)), 7u);
}

}  // namespace
}  // namespace heddle::sm90
