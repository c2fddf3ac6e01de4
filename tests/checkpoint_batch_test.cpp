// Batches: what is read, and what is refused with its numbers.
#include <gtest/gtest.h>

#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

using Tensors = std::vector<OwnedTensor>;

OwnedTensor hidden(int tokens, int size = 4) {
  std::vector<std::uint16_t> values;
  for (int i = 0; i < tokens * size; ++i) values.push_back(static_cast<std::uint16_t>(0x3F80 + i));
  return make_tensor("hidden_states", "BF16", {tokens, size}, values);
}
OwnedTensor ids(std::vector<std::int32_t> values, std::int64_t tokens, std::int64_t topk) {
  return make_tensor("topk_ids", "I32", {tokens, topk}, values);
}
OwnedTensor weights(std::vector<float> values, std::int64_t tokens, std::int64_t topk) {
  return make_tensor("topk_weights", "F32", {tokens, topk}, values);
}
OwnedTensor counts(std::vector<std::int32_t> values) {
  const auto ranks = static_cast<std::int64_t>(values.size());
  return make_tensor("tokens_per_rank", "I32", {ranks}, values);
}

Batch read(const Tensors& tensors) {
  const TempFolder folder;
  write_tensors(folder.file("batch.safetensors"), tensors);
  return read_batch(folder.file("batch.safetensors"));
}

void expect_refused(const Tensors& tensors, std::initializer_list<std::string> parts) {
  expect_refusal([&] { read(tensors); }, parts);
}

TEST(Batch, EverythingIsRead) {
  const auto batch = read({hidden(3), ids({0, -1, 2, 3, 1, 0}, 3, 2), weights({.5f, 0, .25f, .75f, 1, 2}, 3, 2), counts({2, 0, 1}),
                           make_tensor("other", "U8", {1}, std::vector<char>{1})});
  EXPECT_EQ(batch.tokens, 3);
  EXPECT_EQ(batch.hidden, 4);
  ASSERT_EQ(batch.hidden_states.size(), 12u);
  EXPECT_EQ(batch.hidden_states[11].bits, 0x3F80 + 11);
  ASSERT_TRUE(batch.routing);
  EXPECT_EQ(batch.routing->tokens, 3);
  EXPECT_EQ(batch.routing->topk, 2);
  EXPECT_EQ(batch.routing->ids, (std::vector<std::int32_t>{0, -1, 2, 3, 1, 0}));
  EXPECT_EQ(batch.routing->weights, (std::vector<float>{.5f, 0, .25f, .75f, 1, 2}));
  EXPECT_EQ(batch.tokens_per_rank, (std::vector<int>{2, 0, 1}));
}

TEST(Batch, WideIdsAndBareAndEmpty) {
  const auto wide =
      read({hidden(1), make_tensor("topk_ids", "I64", {1, 2}, std::vector<std::int64_t>{-1, 255}), weights({1, 1}, 1, 2)});
  EXPECT_EQ(wide.routing->ids, (std::vector<std::int32_t>{-1, 255}));
  const auto bare = read({hidden(2)});
  EXPECT_FALSE(bare.routing);
  EXPECT_TRUE(bare.tokens_per_rank.empty());
  const auto empty = read({hidden(0), ids({}, 0, 2), weights({}, 0, 2), counts({0, 0})});
  EXPECT_EQ(empty.tokens, 0);
  EXPECT_EQ(empty.routing->topk, 2);
  EXPECT_EQ(empty.tokens_per_rank.size(), 2u);
}

TEST(Batch, Refusals) {
  expect_refused({}, {"batch.safetensors", "'hidden_states' is missing"});
  expect_refused({make_tensor("hidden_states", "F32", {1, 1}, std::vector<float>{1})}, {"F32 [1, 1]", "BF16 [T, H]"});
  expect_refused({make_tensor("hidden_states", "BF16", {2}, std::vector<std::uint16_t>(2))}, {"BF16 [2]"});
  expect_refused({make_tensor("hidden_states", "BF16", {std::int64_t{1} << 40, 0}, std::vector<std::uint16_t>())},
                 {"BF16 [1099511627776, 0]"});
  expect_refused({hidden(2), ids({0, 1}, 2, 1)}, {"'topk_ids'", "stands alone; 'topk_weights' is missing"});
  expect_refused({hidden(2), weights({0, 1}, 2, 1)}, {"'topk_weights'", "stands alone; 'topk_ids' is missing"});
  expect_refused({hidden(2), ids({0, 1, 2}, 3, 1), weights({1, 1, 1}, 3, 1)}, {"topk_ids", "[3, 1]", "[2, k]"});
  expect_refused({hidden(2), ids({}, 2, 0), weights({}, 2, 0)}, {"topk_ids", "[2, 0]"});
  expect_refused({hidden(2), ids({0, 1}, 2, 1), weights({1, 1, 1, 1}, 2, 2)}, {"topk_weights", "[2, 2]", "F32 [2, 1]"});
  expect_refused({hidden(2), ids({0, 1}, 2, 1), make_tensor("topk_weights", "BF16", {2, 1}, std::vector<std::uint16_t>(2))},
                 {"BF16 [2, 1]", "F32 [2, 1]"});
  expect_refused({hidden(2), make_tensor("topk_ids", "I16", {2, 1}, std::vector<std::int16_t>(2)), weights({1, 1}, 2, 1)},
                 {"I16", "I32 or I64"});
  expect_refused({hidden(2), make_tensor("topk_ids", "I64", {2, 2}, std::vector<std::int64_t>{0, 1, 2, std::int64_t{1} << 33}),
                  weights({1, 1, 1, 1}, 2, 2)},
                 {"token 1, choice 1 is 8589934592"});
  expect_refused({hidden(3), counts({1, 1})}, {"sums to 2", "3 tokens"});
  expect_refused({hidden(3), counts({4, -1})}, {"rank 1 has -1"});
  expect_refused({hidden(3), counts({2147483647, 2147483647})}, {"sums to 4294967294"});
  expect_refused({hidden(0), counts({})}, {"tokens_per_rank", "I32 [0]"});
  expect_refused({hidden(3), make_tensor("tokens_per_rank", "I64", {1}, std::vector<std::int64_t>{3})}, {"I64 [1]", "I32 [R]"});
}

}  // namespace
}  // namespace heddle::testing
