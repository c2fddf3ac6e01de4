// Every cell of a table has one thread, whatever the size of a launch.
#include "signal/spread.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace heddle {
namespace {

/// The least n with 2^n >= columns.
int bits_of(int columns) {
  int bits = 0;
  while ((1 << bits) < columns) ++bits;
  return bits;
}

void expect_each_once(int threads, int rows, int columns) {
  SCOPED_TRACE(testing::Message() << threads << " threads, " << rows << " rows of " << columns << " columns");
  std::vector<int> visits(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns), 0);
  for (int thread = 0; thread < threads; ++thread) {
    spread_over(thread, threads, rows, columns, bits_of(columns), [&](int row, int column) {
      ASSERT_TRUE(row >= 0 && row < rows && column >= 0 && column < columns) << row << ", " << column;
      ++visits[static_cast<std::size_t>(row * columns + column)];
    });
  }
  for (std::size_t cell = 0; cell < visits.size(); ++cell)
    ASSERT_EQ(visits[cell], 1) << "row " << cell / static_cast<std::size_t>(columns) << ", column "
                               << cell % static_cast<std::size_t>(columns);
}

// CTAs of 256 and 512 threads.
TEST(Spread, EveryCellHasOneThread) {
  for (const int threads : {256, 512, 768, 1280, 132 * 256, 132 * 512}) {
    for (const int columns : {1, 6, 8, 64, 100, 200, most_spread_columns}) {
      for (const int rows : {0, 1, 7, 65, 300}) {
        expect_each_once(threads, rows, columns);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace heddle
