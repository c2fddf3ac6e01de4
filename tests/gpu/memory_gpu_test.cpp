// What the exchange may touch on a GPU: outputs up to the number of tokens and nothing else of the caller. Inputs and results
// are only read, nothing around any array is written, nor what lies behind the heap's areas; what nobody has
// written (poisoned here) shows nowhere. Small cases, fit for compute-sanitizer as well.
#include <gtest/gtest.h>

#include <cstring>

#include "gpu/device_run.hpp"

namespace heddle {
namespace {

/// An array of the caller begins with `want` and is poison behind it.
template <class T>
void expect_kept(const Buffer<T>& buffer, const std::vector<T>& want, const std::string& what) {
  const std::vector<T> have = buffer.read();
  ASSERT_LE(want.size(), have.size()) << what;
  std::vector<unsigned char> bytes(have.size() * sizeof(T), poison_byte);
  if (!want.empty()) std::memcpy(bytes.data(), want.data(), want.size() * sizeof(T));
  const auto* there = reinterpret_cast<const unsigned char*>(have.data());
  const auto [expected_byte, byte] = std::mismatch(bytes.begin(), bytes.end(), there);
  const std::size_t value = static_cast<std::size_t>(byte - there) / sizeof(T);
  ASSERT_EQ(expected_byte, bytes.end()) << what << ": value " << value << " is not what it has to be; " << want.size()
                                        << " values were written, the rest is poison";
}

/// Bytes of every rank's part behind the last area: the heap comes in pages, so there are some.
class BehindTheHeap {
 public:
  explicit BehindTheHeap(DeviceRun& run) : run_(run), end_(areas_of(run.memory(), run.ranks()).end) {
    const HeapView view = run.workspace().view(0);
    bytes_ = std::min<std::size_t>(view.stride - end_, 1 << 16);
    for (int rank = 0; rank < run.ranks(); ++rank) check(cudaMemset(view.at<std::byte>(rank, end_), 0x3C, bytes_), "cudaMemset");
    run.settle();
  }
  void expect_kept() const {
    for (int rank = 0; rank < run_.ranks(); ++rank) {
      for (const std::byte byte : read(run_.workspace().view(0).at<std::byte>(rank, end_), bytes_))
        ASSERT_EQ(byte, std::byte{0x3C}) << "behind the areas of rank " << rank;
    }
  }

 private:
  DeviceRun& run_;
  std::size_t end_;
  std::size_t bytes_ = 0;
};

void expect_seat_kept(const Case& c, const DeviceRun& run, int rank, const RankData& data, Shared shared) {
  const std::string whose = "rank " + std::to_string(rank);
  const Seat& seat = run.seat(rank);
  expect_kept(seat.tokens, std::vector<int>{c.tokens_of(rank)}, whose + ", number of tokens");
  expect_kept(seat.hidden, data.hidden, whose + ", hidden states");
  expect_kept(seat.ids, data.ids, whose + ", ids");
  expect_kept(seat.weights, data.weights, whose + ", weights");
  expect_kept(seat.shared, data.shared, whose + ", rows of the shared expert");
  expect_kept(seat.factors, data.factors, whose + ", factors of the shared expert");
  for (std::size_t p = 0; p < data.extra.size(); ++p) expect_kept(seat.extra[p], data.extra[p], whose + ", payload");
  expect_kept(seat.out, expected(c, data, {}, shared), whose + ", outputs");
  seat.expect_guards(whose);
}

void check_memory(const Case& c, bool halves, Shared shared) {
  SCOPED_TRACE(testing::Message() << title(c.options) << (halves ? ", in halves" : "") << "\n" << describe(c.options));
  DeviceRun run(c, gpus_here());
  const BehindTheHeap behind(run);
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round << ", seed " << c.seed);
    std::vector<RankData> data;
    for (int rank = 0; rank < c.ranks(); ++rank) {
      data.push_back(draw(c, rank, round));
      run.load(rank, data.back());
    }
    run.settle();
    if (halves || c.options.way == Way::normal) {
      run.dispatch({c.most_tokens(), Phase::decode}, false);
    } else {
      run.dispatch_fused({c.most_tokens(), Phase::decode});
    }
    run.wait();
    const std::vector<Buffer<bf16>> results = results_of(c, run, nullptr);
    std::vector<std::vector<bf16>> before;
    for (const auto& buffer : results) before.push_back(buffer.read());
    run.settle();
    run.combine(DeviceRun::pointers(results), shared, !halves);
    run.wait();
    for (int rank = 0; rank < c.ranks(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      expect_kept(results[r], before[r], "results of rank " + std::to_string(rank));
      results[r].expect_guards("results of rank " + std::to_string(rank));
      expect_seat_kept(c, run, rank, data[r], shared);
      if (testing::Test::HasFailure()) return;
    }
    behind.expect_kept();
  }
}

/// One way and mode, by number among every_way_on_gpus.
class MemoryGpu : public testing::TestWithParam<int> {};

ExchangeOptions options_of(int number, int hidden, int ranks, int cap) {
  return every_way_on_gpus(hidden, 7, ranks, 3, cap)[static_cast<std::size_t>(number)];
}

std::string name_of(const testing::TestParamInfo<int>& info) {
  std::string text = title(options_of(info.param, 64, 2, 4));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == ' ' || c == '='; }, '_');
  return text;
}

void check_wires(int number, int hidden, int ranks, const std::vector<int>& tokens, int cap) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
    for (const auto layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
      Case c;
      c.options = options_of(number, hidden, ranks, cap);
      if (!allows_layout(c.options.way, layout)) continue;
      c.options.arrived = layout;
      c.options.wire = wire;
      c.options.combine_wire = wire;
      c.options.quantisation = {wire == Wire::fp8 && ranks % 2 == 0 ? 32 : 128, ScaleFormat::f32};
      if (c.options.way == Way::one_sided) c.options.extra_payloads = {16, 80};
      c.tokens = tokens;
      c.seed = seed % 100000;
      check_memory(c, layout == ArrivedLayout::masked, layout == ArrivedLayout::routed ? Shared::gated : Shared::rows);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// A hidden size whose groups of scales are cut short, fewer tokens than the cap.
TEST_P(MemoryGpu, Small) {
  std::vector<int> tokens(static_cast<std::size_t>(std::max(2, gpus_here())), 5);
  tokens[1] = 3;
  check_wires(GetParam(), 192, static_cast<int>(tokens.size()), tokens, 8);
}

// Enough tokens for all CTAs and for numbering in chunks, a rank without any.
TEST_P(MemoryGpu, Larger) {
  const int ranks = std::max(3, gpus_here());
  std::vector<int> tokens(static_cast<std::size_t>(ranks), 290);
  tokens[1] = 0;
  tokens[2] = 257;
  check_wires(GetParam(), 320, ranks, tokens, 300);
}

INSTANTIATE_TEST_SUITE_P(Ways, MemoryGpu, testing::Range(0, static_cast<int>(every_way_on_gpus(64, 7, 2, 3, 4).size())), name_of);

}  // namespace
}  // namespace heddle
