// Every number that the three articles compute, by the planner's functions. Expected values are the
// articles', with the digits that they give; the section stands beside each.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "heddle/plan.hpp"

namespace heddle {
namespace {

constexpr double mebi = 1024.0 * 1024.0;  // MB of the exchange-ways and fused-kernel articles
constexpr double gibi = 1024.0 * mebi;    // their GB
constexpr double giga = 1e9;              // GB of the persistent-grid article

/// Rounded to so many decimals.
double rounded(double value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  return std::round(value * scale) / scale;
}

#define EXPECT_ROUNDS_TO(expected, decimals, value) EXPECT_DOUBLE_EQ(expected, rounded(value, decimals))

PlanRequest request_for(std::string_view preset, int ranks, int tokens) {
  PlanRequest request;
  request.shape = find_preset(preset).shape;
  request.weights = find_preset(preset).weights.at(0);
  request.ranks = ranks;
  request.tokens = tokens;
  request.cap = tokens;
  request.machine = find_machine("b300");
  return request;
}

// The exchange-ways article's example: DeepSeek-V4.1-Flash, 384 experts, top-6, hidden 5,120, bf16 rows.
PlanRequest v41(int ranks, int tokens) { return request_for("deepseek-v4.1-flash", ranks, tokens); }
// The fused-kernel and persistent-grid articles': DeepSeek-V4-Flash, 256 experts, top-6, hidden 4,096, intermediate 2,048.
PlanRequest v4(int ranks, int tokens) { return request_for("deepseek-v4-flash", ranks, tokens); }

TEST(ExchangeWaysArticle, CopiesOfAToken) {
  const LayerShape shape = v41(8, 64).shape;
  EXPECT_ROUNDS_TO(4.43, 2, copies_of_a_token(Way::elastic, shape, 8));   // 1.3
  EXPECT_ROUNDS_TO(3.30, 2, copies_of_a_token(Way::elastic, shape, 4));   // 1.3
  EXPECT_ROUNDS_TO(5.81, 2, copies_of_a_token(Way::elastic, shape, 64));  // 1.3
  EXPECT_EQ(8, copies_of_a_token(Way::gather, shape, 8));                 // 1.3
  EXPECT_EQ(6, copies_of_a_token(Way::low_latency, shape, 8));            // 1.3
  for (const Way way : {Way::normal, Way::one_sided}) {                   // 3.5, 6.4
    EXPECT_EQ(copies_of_a_token(Way::elastic, shape, 8), copies_of_a_token(way, shape, 8));
  }
  EXPECT_ROUNDS_TO(3.6, 1, 8 - copies_of_a_token(Way::elastic, shape, 8));  // 2.4
}

TEST(ExchangeWaysArticle, HowMuchMoreIsMoved) {
  const auto percent_more = [](Way way, int ranks) {
    const LayerShape shape = v41(ranks, 64).shape;
    return 100 * (copies_of_a_token(way, shape, ranks) / copies_of_a_token(Way::elastic, shape, ranks) - 1);
  };
  EXPECT_ROUNDS_TO(21, 0, percent_more(Way::gather, 4));       // 2.3
  EXPECT_ROUNDS_TO(81, 0, percent_more(Way::gather, 8));       // 2.3
  EXPECT_ROUNDS_TO(35, 0, percent_more(Way::low_latency, 8));  // 4.1
}

TEST(ExchangeWaysArticle, BytesDeliveredToARank) {
  const auto megabytes = [](Way way, int tokens) { return dispatch_traffic(way, v41(8, tokens)).bytes / mebi; };
  EXPECT_ROUNDS_TO(320, 0, megabytes(Way::gather, 4096));       // 1.3, prefill
  EXPECT_ROUNDS_TO(240, 0, megabytes(Way::low_latency, 4096));  // 1.3
  EXPECT_ROUNDS_TO(177, 0, megabytes(Way::elastic, 4096));      // 1.3
  EXPECT_ROUNDS_TO(5.0, 1, megabytes(Way::gather, 64));         // 1.3, decode
  EXPECT_ROUNDS_TO(3.8, 1, megabytes(Way::low_latency, 64));    // 1.3
  EXPECT_ROUNDS_TO(2.8, 1, megabytes(Way::elastic, 64));        // 1.3
}

TEST(ExchangeWaysArticle, OneCopyInEightStaysAtHome) {  // 1.3
  const Traffic traffic = dispatch_traffic(Way::elastic, v41(8, 4096));
  EXPECT_DOUBLE_EQ(traffic.bytes * 7 / 8, traffic.remote_bytes);
}

TEST(ExchangeWaysArticle, BytesOfARow) {  // 7.2
  EXPECT_EQ(10240u, wire_row_bytes(Wire::bf16, 5120));
  EXPECT_EQ(5280u, wire_row_bytes(Wire::fp8, 5120, {32, ScaleFormat::ue8m0}));
  EXPECT_EQ(5280u, wire_row_bytes(Wire::fp8, 5120, {128, ScaleFormat::f32}));
  EXPECT_EQ(2880u, wire_row_bytes(Wire::nvfp4, 5120));
}

TEST(ExchangeWaysArticle, FourBitRowsOutAndEightBitRowsBack) {  // 9.3
  EXPECT_DOUBLE_EQ(2.56, round_trip_reduction({4, 32}, {8, 32}));
}

TEST(ExchangeWaysArticle, RoomAndRows) {
  const LayerShape shape = v41(8, 64).shape;
  EXPECT_EQ(48, most_local_experts(shape.experts, 8));    // 1.1
  EXPECT_EQ(49152u, padded_tensors(shape, 8, 128).rows);  // 4.2
  PlanRequest capped = v41(8, 64);
  capped.cap = 128;
  EXPECT_EQ(49152u, article_buffer(Way::low_latency, capped).region("packed").rows);       // 4.2
  EXPECT_EQ(384, pair_counts(shape, 8, 64).per_rank);                                      // 4.2
  EXPECT_EQ(32768u, article_buffer(Way::one_sided, v41(8, 4096)).region("arrived").rows);  // 6.3
  EXPECT_EQ(32768u, article_buffer(Way::gather, v41(8, 4096)).region("arrived").rows);     // 6.3, as many as without a backend
}

TEST(ExchangeWaysArticle, SmsOfElasticsTransfer) {  // 5.1
  // The inputs that the article names, with the values of the library that it describes: 18 links of
  // 53.125 GB/s of which nine tenths are usable, an SM reads 200 and writes 50 GB/s, 148 SMs.
  const LayerShape shape = v41(8, 64).shape;
  const double copies = expected_copies(shape.experts, shape.topk, 8);
  EXPECT_EQ(26, transfer_sms(copies, 8, 0.9 * 18 * 53.125e9, 200e9, 50e9, 148));
  const Machine& b300 = find_machine("b300");
  EXPECT_EQ(26, transfer_sms(copies, 8, b300.link->value, b300.sm_read->value, b300.sm_write->value, b300.sms));
}

TEST(FusedKernelArticle, PairsAndRows) {
  const LayerShape shape = v4(8, 512).shape;
  EXPECT_EQ(24576u, pair_counts(shape, 8, 512).pairs);                                       // 1.2
  EXPECT_EQ(96, pair_counts(shape, 8, 512).per_expert);                                      // 1.2
  EXPECT_EQ(1536, pair_counts(shape, 8, 8192).per_expert);                                   // 3.3
  EXPECT_EQ(3072, pair_counts(shape, 8, 512).per_rank);                                      // 3.4
  EXPECT_ROUNDS_TO(4.4, 1, expected_copies_with_replacement(shape.experts, shape.topk, 8));  // 3.2
  EXPECT_EQ(6, copies_of_a_token(Way::mega, shape, 8));                                      // 3.2
}

TEST(FusedKernelArticle, BytesOfAPair) {
  const PairBytes pair = fused_pair_bytes(4096);
  EXPECT_EQ(4228u, pair.out);               // 1.2
  EXPECT_EQ(8192u, pair.back);              // 1.2
  EXPECT_EQ(12420u, pair.out + pair.back);  // 5.4
}

TEST(FusedKernelArticle, TasksAndSteps) {
  const GemmTasks tasks = gemm_tasks(v4(8, 512).shape);
  EXPECT_EQ(16, tasks.gemm1_tasks);  // 3.3
  EXPECT_EQ(32, tasks.gemm1_steps);  // 3.3
  EXPECT_EQ(16, tasks.gemm2_steps);  // 3.6
}

TEST(FusedKernelArticle, WeightsAgainstRows) {  // 3.4
  const LayerShape shape = v4(8, 512).shape;
  const double expert = static_cast<double>(expert_weight_bytes(shape, WeightKind::mxfp4).values);
  const double weights = most_local_experts(shape.experts, 8) * expert;
  const double rows = pair_counts(shape, 8, 512).per_rank;
  const double incoming = rows * shape.hidden;
  const double outgoing = rows * static_cast<double>(fused_pair_bytes(shape.hidden).back);
  EXPECT_EQ(12 * mebi, expert);
  EXPECT_EQ(384 * mebi, weights);
  EXPECT_EQ(12 * mebi, incoming);
  EXPECT_EQ(24 * mebi, outgoing);
  EXPECT_ROUNDS_TO(11, 0, weights / (incoming + outgoing));
  EXPECT_ROUNDS_TO(1.9, 1, 1e6 * expert / find_machine("b300").memory_read->value);
}

TEST(FusedKernelArticle, TouchedExperts) {  // 3.4, 32 experts on one GPU
  EXPECT_ROUNDS_TO(6, 0, expected_touched_experts(32, 32, 6, 1));
  EXPECT_ROUNDS_TO(18, 0, expected_touched_experts(32, 32, 6, 4));
  EXPECT_ROUNDS_TO(31, 0, expected_touched_experts(32, 32, 6, 16));
  EXPECT_ROUNDS_TO(32, 0, expected_touched_experts(32, 32, 6, 64));
}

TEST(FusedKernelArticle, Caps) {
  EXPECT_EQ(9600, fused_cap(8192));  // 5.1
  EXPECT_EQ(9600, fused_cap(8320));  // 5.2
  EXPECT_EQ(5760, fused_cap(4096));  // 5.1
  EXPECT_EQ(ArrivedRegion::ring, fused_arrived(4096));
  EXPECT_EQ(ArrivedRegion::ring, fused_arrived(5760));
  EXPECT_EQ(ArrivedRegion::worst_case, fused_arrived(5761));
  EXPECT_EQ(ArrivedRegion::worst_case, fused_arrived(8192));
}

TEST(FusedKernelArticle, BufferRegions) {  // 5.1
  const LayerShape shape = v4(8, 8192).shape;
  const Buffer buffer = fused_buffer(shape, 8, 8192, ArrivedRegion::worst_case, 0, 148);
  EXPECT_EQ(460800u, fused_worst_rows(shape, 8, 8192));
  EXPECT_ROUNDS_TO(1.8, 1, static_cast<double>(buffer.region("arrived").bytes) / gibi);
  EXPECT_ROUNDS_TO(0.9, 1, static_cast<double>(buffer.region("intermediate").bytes) / gibi);
  EXPECT_ROUNDS_TO(1.3, 1, static_cast<double>(buffer.region("scales").bytes) / gibi);
  EXPECT_ROUNDS_TO(0.4, 1, static_cast<double>(buffer.region("result_slots").bytes) / gibi);
}

TEST(FusedKernelArticle, WholeBuffers) {
  const LayerShape shape = v4(8, 8192).shape;
  const auto gigabytes = [&](int ranks, int cap, ArrivedRegion arrived, int shared_experts) {
    return static_cast<double>(fused_buffer(shape, ranks, cap, arrived, shared_experts, 148).bytes()) / gibi;
  };
  EXPECT_ROUNDS_TO(4.5, 1, gigabytes(8, 8192, ArrivedRegion::worst_case, 0));  // 5.1
  EXPECT_ROUNDS_TO(4.7, 1, gigabytes(8, 8192, ArrivedRegion::worst_case, 1));  // 5.1
  EXPECT_ROUNDS_TO(0.35, 2, gigabytes(8, 4096, ArrivedRegion::ring, 0));       // 5.1
  EXPECT_ROUNDS_TO(22, 0, gigabytes(64, 8192, ArrivedRegion::worst_case, 0));  // 8
  EXPECT_ROUNDS_TO(0.6, 1, gigabytes(64, 8192, ArrivedRegion::ring, 0));       // 8
}

TEST(PersistentGridArticle, Grids) {
  const LayerShape shape = v4(4, 64).shape;
  const GridPlan b200 = activation_grid(shape, 4, 1024, find_machine("b200").sms);
  EXPECT_EQ(64, most_local_experts(shape.experts, 4));              // The shapes
  EXPECT_EQ(4096u, padded_tensors(shape, 4, 1024).rows_an_expert);  // How T is computed
  EXPECT_EQ(384, pair_counts(shape, 4, 64).per_rank);               // How T is computed
  EXPECT_EQ(256, b200.threads);                                     // The padded grid
  EXPECT_EQ(24576u, b200.padded);                                   // The padded grid
  EXPECT_EQ(1184u, b200.persistent);                                // The persistent grid
  EXPECT_EQ(23392u, b200.not_launched());                           // The two grids side by side
  const double real = pair_counts(shape, 4, 64).per_rank;
  EXPECT_EQ(24192, static_cast<double>(b200.padded) - real);                                             // Inside one CTA
  EXPECT_EQ(800, static_cast<double>(b200.persistent) - real);                                           // Inside one CTA
  EXPECT_ROUNDS_TO(20, 0, (static_cast<double>(b200.padded) - real) / static_cast<double>(b200.slots));  // The padded grid
  EXPECT_ROUNDS_TO(5, 0,
                   pair_counts(shape, 4, 1024).per_rank / static_cast<double>(b200.persistent));  // The two grids side by side
  EXPECT_EQ(1056u, activation_grid(shape, 4, 1024, find_machine("h200").sms).persistent);         // the same rule on 132 SMs
}

TEST(PersistentGridArticle, PaddedLayoutAtPrefillSizes) {  // Prefill uses option (a)
  const LayerShape shape = v4(4, 8192).shape;
  const PaddedTensors padded = padded_tensors(shape, 4, 8192);
  EXPECT_EQ(32768u, padded.rows_an_expert);
  EXPECT_ROUNDS_TO(8.6, 1, static_cast<double>(padded.received) / giga);
  EXPECT_ROUNDS_TO(17.2, 1, static_cast<double>(padded.gate_up) / giga);
  EXPECT_EQ(49152, pair_counts(shape, 4, 8192).per_rank);
  EXPECT_ROUNDS_TO(0.2, 1, pair_counts(shape, 4, 8192).per_rank * shape.hidden / giga);
}

// What `heddle plan --articles` prints.
TEST(ArticleTable, EveryRowAgrees) {
  const std::vector<ArticleNumber> numbers = article_numbers();
  ASSERT_GE(numbers.size(), 70u);
  for (const ArticleNumber& number : numbers) {
    EXPECT_EQ(number.stated, number.rounded()) << number.title << " (" << number.article << ", " << number.section << ")";
    EXPECT_FALSE(number.formula.empty()) << number.title;
  }
}

TEST(ArticleTable, ADeviationIsSeen) {
  ArticleNumber number{"a number", "an article", "1", "24,576", 24576.4, "rows", "x"};
  EXPECT_TRUE(number.agrees());
  number.value = 24577;
  EXPECT_FALSE(number.agrees());
  number.stated = "4.43";
  number.value = 4.4249;
  EXPECT_EQ("4.42", number.rounded());
  EXPECT_FALSE(number.agrees());
}

}  // namespace
}  // namespace heddle
