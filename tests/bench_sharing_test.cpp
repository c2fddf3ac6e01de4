// How two batches in flight share the SMs of a GPU: what waits for other GPUs always fits side by side, or is refused with the
// numbers.
#include "bench_sharing.hpp"

#include <gtest/gtest.h>

#include <string>

#include "heddle/error.hpp"

namespace heddle::tool {
namespace {

std::string refusal(bool waits_with_products, int sms, int ranks, std::optional<int> asked) {
  try {
    share_of_two(waits_with_products, sms, ranks, asked);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(Sharing, TheFusedLayerHasHalf) {
  const SmShare share = share_of_two(true, 132, 1, 20);
  EXPECT_EQ(share.exchange, 66) << "whatever a chain's exchange was asked to have";
  EXPECT_EQ(share_of_two(true, 133, 1, {}).exchange, 66);
}

TEST(Sharing, AChainsExchangeHasAQuarterOrWhatIsAsked) {
  EXPECT_EQ(share_of_two(false, 132, 1, {}).exchange, 33);
  EXPECT_EQ(share_of_two(false, 132, 1, {}).products, 99);
  EXPECT_EQ(share_of_two(false, 132, 1, 66).exchange, 66);
  EXPECT_EQ(share_of_two(false, 132, 1, 66).products, 66);
  EXPECT_EQ(share_of_two(false, 132, 40, {}).exchange, 40) << "a CTA for each rank";
}

TEST(Sharing, WhatCouldWaitForEverIsRefused) {
  EXPECT_NE(refusal(false, 132, 1, 67).find("need 134 SMs"), std::string::npos) << refusal(false, 132, 1, 67);
  EXPECT_NE(refusal(false, 132, 8, 7).find("--batch-sms 7: the 8 ranks"), std::string::npos) << refusal(false, 132, 8, 7);
  for (const bool fused : {false, true})
    EXPECT_NE(refusal(fused, 132, 67, {}).find("66 of 132 SMs each, too few for the 67 ranks"), std::string::npos);
  EXPECT_EQ(refusal(false, 132, 1, 66), "");
}

// For every machine and number of ranks: granted shares fit twice, and hold every rank.
TEST(Sharing, SharesFitSideBySide) {
  for (int sms = 1; sms <= 160; ++sms) {
    for (int ranks = 1; ranks <= 80; ++ranks) {
      for (const bool fused : {false, true}) {
        if (!refusal(fused, sms, ranks, {}).empty()) {
          EXPECT_GT(2 * ranks, sms);
          continue;
        }
        const SmShare share = share_of_two(fused, sms, ranks, {});
        EXPECT_LE(2 * share.exchange, sms);
        EXPECT_GE(share.exchange, ranks);
        EXPECT_GE(share.products, 1);
      }
    }
  }
}

}  // namespace
}  // namespace heddle::tool
