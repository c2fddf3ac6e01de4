#include "group/text_reader.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace heddle {
namespace {

TEST(GroupText, WordsNumbersAndTheRestOfALine) {
  TextReader told("0 2 GPU-1f  NVIDIA H200 NVL\n1 3 GPU-2e NVIDIA H200\n");
  int device = -1, ranks = -1;
  ASSERT_TRUE(told.number(device));
  ASSERT_TRUE(told.number(ranks));
  EXPECT_EQ(device, 0);
  EXPECT_EQ(ranks, 2);
  EXPECT_EQ(told.word(), "GPU-1f");
  EXPECT_EQ(told.line(), "NVIDIA H200 NVL");
  ASSERT_TRUE(told.number(device));
  ASSERT_TRUE(told.number(ranks));
  EXPECT_EQ(device, 1);
  EXPECT_EQ(ranks, 3);
  EXPECT_EQ(told.word(), "GPU-2e");
  EXPECT_EQ(told.line(), "NVIDIA H200");
  EXPECT_FALSE(told.number(device));
  EXPECT_EQ(told.word(), "");
  EXPECT_EQ(told.line(), "");
}

TEST(GroupText, WhatIsNoNumberChangesNothing) {
  for (const char* text : {"", "  \n", "x", "1x", "-", "256", "1.5"}) {
    std::uint8_t value = 7;
    EXPECT_FALSE(TextReader(text).number(value)) << text;
    EXPECT_EQ(value, 7) << text;
  }
}

TEST(GroupText, NumbersOfEverySize) {
  const std::string text =
      std::to_string(std::numeric_limits<std::uint64_t>::max()) + " " + std::to_string(std::numeric_limits<std::int64_t>::min());
  TextReader told(text);
  std::uint64_t most = 0;
  std::int64_t least = 0;
  ASSERT_TRUE(told.number(most));
  ASSERT_TRUE(told.number(least));
  EXPECT_EQ(most, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(least, std::numeric_limits<std::int64_t>::min());
}

}  // namespace
}  // namespace heddle
