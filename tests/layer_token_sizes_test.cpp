// A call's arrays from one of its tokens on: every array by its own size, what is not there stays away, and nothing wraps at 32
// bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "heddle/layer.hpp"
#include "layer/token_sizes.hpp"

namespace heddle {
namespace {

TEST(TokenSizes, EveryArrayGoesOnByItsOwnSize) {
  const std::vector<bf16> hidden(5 * 64);
  const std::vector<std::int32_t> ids(5 * 3);
  const std::vector<float> weights(5 * 3);
  const LayerInput input{5, hidden.data(), ids.data(), weights.data()};
  const TokenSizes sizes = TokenSizes::of({64, 128, 8, 3, {}});
  for (int first = 0; first <= 5; ++first) {
    const LayerInput part = sizes.from(input, first);
    EXPECT_EQ(part.tokens, 5) << "the caller's to say";
    EXPECT_EQ(part.hidden - hidden.data(), 64 * first);
    EXPECT_EQ(part.ids - ids.data(), 3 * first);
    EXPECT_EQ(part.weights - weights.data(), 3 * first);
  }
  std::vector<bf16> out(5 * 64);
  EXPECT_EQ(sizes.outputs_from(out.data(), 4) - out.data(), 4 * 64);
}

TEST(TokenSizes, WhatIsNotThereStaysAway) {
  const TokenSizes sizes{64, 3};
  const LayerInput part = sizes.from(LayerInput{}, 7);
  EXPECT_EQ(part.hidden, nullptr);
  EXPECT_EQ(part.ids, nullptr);
  EXPECT_EQ(part.weights, nullptr);
  EXPECT_EQ(sizes.outputs_from(nullptr, 7), nullptr);
}

/// Numbers that stand for arrays: a batch of 4 million tokens of 7,168 values.
TEST(TokenSizes, NothingWrapsAt32Bits) {
  struct Numbers {
    const bf16* hidden;
    const std::int32_t* ids;
    const float* weights;
  };
  const auto at = [](const auto* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  const auto* one = reinterpret_cast<const bf16*>(std::uintptr_t{1} << 20);
  const Numbers part = TokenSizes{7168, 8}.from(Numbers{one, nullptr, nullptr}, 4 << 20);
  EXPECT_EQ(at(part.hidden) - at(one), std::uintptr_t{2} * 7168 * (4 << 20));
}

}  // namespace
}  // namespace heddle
