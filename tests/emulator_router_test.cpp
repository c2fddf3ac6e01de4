// The kernels of a router, run thread by thread on the host: logits, ids and weights of the host's, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#include "emulator/device.hpp"
#include "heddle/routing.hpp"
#include "routing/choice_kernel.cuh"
#include "routing/logits_kernel.cuh"

namespace heddle::router_kernel {
namespace {

std::uint32_t announced_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const auto seed = given != nullptr ? static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  std::cout << "HEDDLE_SEED=" << seed << "\n";
  return seed;
}

int between(std::mt19937& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

bool same_bits(float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); }

struct Shape {
  int tokens, hidden, experts;
};

/// Logits of the kernel against the host's; what lies behind the tokens stays.
template <class Weight, class Tile>
void expect_logits(std::mt19937& random, const Shape& shape) {
  SCOPED_TRACE(testing::Message() << shape.tokens << " tokens, hidden size " << shape.hidden << ", " << shape.experts
                                  << " experts");
  std::normal_distribution<float> normal;
  std::vector<bf16> hidden(static_cast<std::size_t>(shape.tokens * shape.hidden));
  for (bf16& value : hidden) value = to_bf16(normal(random));
  std::vector<float> weights(static_cast<std::size_t>(shape.experts * shape.hidden));
  for (float& value : weights) {
    value = normal(random);
    if constexpr (sizeof(Weight) == sizeof(bf16)) value = to_float(to_bf16(value));
  }
  const std::vector<float> wanted = router_logits(hidden, weights, shape.tokens, shape.hidden, shape.experts);
  std::vector<Weight> stored;
  for (const float value : weights) {
    if constexpr (sizeof(Weight) == sizeof(bf16))
      stored.push_back(to_bf16(value));
    else
      stored.push_back(value);
  }
  hidden.resize(std::max<std::size_t>(hidden.size(), 8));
  constexpr float untouched = -7.0f;
  std::vector<float> logits(wanted.size() + static_cast<std::size_t>(shape.experts), untouched);
  RouterCall call;
  call.tokens = &shape.tokens;
  call.most_tokens = shape.tokens + 1;
  call.hidden = hidden.data();
  call.hidden_size = shape.hidden;
  call.experts = shape.experts;
  call.logits = logits.data();
  struct alignas(128) Memory {
    std::byte bytes[Stages<Weight, Tile>::bytes];
  };
  const auto shared = std::make_unique<Memory>();
  emulator::launch({between(random, 1, 4), Tile::threads, static_cast<unsigned>(random())},
                   [&] { compute_logits<Weight, Tile>(call, stored.data(), shared->bytes); });
  for (std::size_t i = 0; i < logits.size(); ++i) {
    ASSERT_TRUE(same_bits(logits[i], i < wanted.size() ? wanted[i] : untouched))
        << "logit " << i << ": " << logits[i] << " for " << (i < wanted.size() ? wanted[i] : untouched);
  }
}

template <class Tile>
void expect_logits_of_tile(std::mt19937& random) {
  for (int round = 0; round < 4 && !testing::Test::HasFatalFailure(); ++round) {
    const Shape shape{between(random, round == 0 ? 0 : 1, 2 * Tile::tokens), 64 * between(random, 1, 20),
                      between(random, 1, 2 * Tile::experts + 1)};
    expect_logits<float, Tile>(random, shape);
    expect_logits<bf16, Tile>(random, shape);
  }
}

TEST(EmulatorRouter, LogitsAreTheHostsBitForBit) {
  std::mt19937 random(announced_seed());
  expect_logits_of_tile<TileOf4>(random);
  expect_logits_of_tile<TileOf16>(random);
  expect_logits_of_tile<TileOf64>(random);
  expect_logits_of_tile<TileOfMany>(random);
  expect_logits<float, TileOf4>(random, {1, 7168, 3});  // every stage is used again
}

RouterOptions random_options(std::mt19937& random, int experts) {
  RouterOptions options;
  options.score = static_cast<Score>(between(random, 0, 3));
  if (options.score == Score::sigmoid || options.score == Score::sqrtsoftplus) {
    std::vector<int> divisors;
    for (int groups = 1; groups <= experts; ++groups) {
      if (experts % groups == 0) divisors.push_back(groups);
    }
    options.groups = divisors[static_cast<std::size_t>(between(random, 0, static_cast<int>(divisors.size()) - 1))];
    options.topk_groups = between(random, 1, options.groups);
  }
  const int reachable = experts / options.groups * options.topk_groups;
  options.topk = between(random, 1, between(random, 0, 3) == 0 ? reachable : std::min(reachable, 8));
  options.renormalise = random() % 2 == 0;
  options.scale = random() % 2 == 0 ? 1.0f : 2.5f;
  return options;
}

/// Many ties, infinities and NaN in some rounds.
std::vector<float> random_values(std::mt19937& random, int count, int kind) {
  std::normal_distribution<float> normal(0.0f, kind == 3 ? 40.0f : 2.0f);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) {
    value = normal(random);
    if (kind == 1) value = std::round(value);
    if (kind != 2 || random() % 8 != 0) continue;
    constexpr float odd[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity(), -0.0f, 0.0f};
    value = odd[random() % std::size(odd)];
  }
  return values;
}

void expect_choices(std::mt19937& random, int tokens, int experts, int kind) {
  std::vector<float> logits = random_values(random, tokens * experts, kind);
  const std::vector<float> bias = random() % 2 == 0 ? random_values(random, experts, kind) : std::vector<float>();
  RouterCall call;
  call.options = random_options(random, experts);
  SCOPED_TRACE(testing::Message() << experts << " experts, values of kind " << kind << ", score "
                                  << static_cast<int>(call.options.score) << ", top-" << call.options.topk << ", "
                                  << call.options.topk_groups << " of " << call.options.groups << " groups");
  const Routing wanted = route(logits, bias, tokens, experts, call.options);
  std::vector<std::int32_t> ids(wanted.ids.size() + 1, -7);
  std::vector<float> weights(ids.size(), -7.0f);
  call.tokens = &tokens;
  call.most_tokens = tokens + 3;
  call.experts = experts;
  call.bias = bias.empty() ? nullptr : bias.data();
  call.logits = logits.data();
  call.ids = ids.data();
  call.weights = weights.data();
  ChoiceShared shared;
  emulator::launch({between(random, 1, 3), choice_threads, static_cast<unsigned>(random())}, [&] { choose(call, shared); });
  for (std::size_t i = 0; i < wanted.ids.size(); ++i) {
    ASSERT_EQ(ids[i], wanted.ids[i]) << "choice " << i;
    ASSERT_TRUE(same_bits(weights[i], wanted.weights[i]) || (std::isnan(weights[i]) && std::isnan(wanted.weights[i])))
        << "weight " << i << ": " << weights[i] << " for " << wanted.weights[i];
  }
  EXPECT_EQ(ids.back(), -7);
  EXPECT_EQ(weights.back(), -7.0f);
}

TEST(EmulatorRouter, ChoicesAreTheHosts) {
  std::mt19937 random(announced_seed());
  for (int round = 0; round < 60 && !HasFatalFailure(); ++round)
    expect_choices(random, between(random, 0, 4), between(random, 1, round % 10 == 0 ? 512 : 80), round % 4);
  expect_choices(random, 1, most_routed_experts, 0);
}

/// One CTA; the places of ids and weights begin with -7.
std::vector<std::int32_t> chosen_of(std::vector<float> logits, int tokens, RouterCall call) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>((call.most_tokens + 1) * call.options.topk), -7);
  std::vector<float> weights(ids.size(), -7.0f);
  call.tokens = &tokens;
  call.logits = logits.data();
  call.ids = ids.data();
  call.weights = weights.data();
  ChoiceShared shared;
  emulator::launch({1, choice_threads, 1}, [&] { choose(call, shared); });
  return ids;
}

TEST(EmulatorRouter, TiesGoToTheLowerIdAndZerosOfBothSignsAreEqual) {
  RouterCall call;
  call.most_tokens = 1;
  call.experts = 6;
  call.options = {Score::softmax_topk, 5, 1, 1, true, 1.0f};
  const auto ids = chosen_of({-0.0f, 0.0f, 1.0f, 1.0f, -0.0f, 1.0f}, 1, call);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{2, 3, 5, 0, 1, -7, -7, -7, -7, -7}));
}

TEST(EmulatorRouter, MoreTokensThanMayBeAreLeftAlone) {
  RouterCall call;
  call.most_tokens = 2;
  call.experts = 3;
  EXPECT_EQ(chosen_of(std::vector<float>(9, 1.0f), 9, call), (std::vector<std::int32_t>{0, 0, -7}));
}

}  // namespace
}  // namespace heddle::router_kernel
