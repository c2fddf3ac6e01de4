// `heddle bench exchange` from outside: what it refuses (no GPU needed), and that every table and the JSON are complete and add up.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "gpu/bench_command.hpp"

namespace heddle {
namespace {

class BenchGpu : public BenchCommand {
 protected:
  /// A small run on two ranks or more; its JSON, null if there is none.
  Json run(const std::string& arguments, int hidden = 256) const {
    const int ranks = std::max(2, gpus_here());
    Json object =
        measured(fmt::format("bench exchange --ranks {} --gpus {} --hidden {} --experts 12 --topk 3 --replays 3 --round-trips 2 {}",
                             ranks, gpus_here(), hidden, arguments));
    if (object.is_null()) return object;
    EXPECT_EQ(object["ranks"], ranks);
    EXPECT_GT(object["floor"]["empty_grid_us"].get<double>(), 0.0);
    return object;
  }
};

TEST_F(BenchGpu, RefusesByName) {
  expect_refused("bench exchange", {{"--way mega", "--way does not know 'mega'"},
                                    {"--wire fp7", "--wire does not know 'fp7'"},
                                    {"--combine-wire fp7", "--combine-wire does not know 'fp7'"},
                                    {"--tokens 8,0", "--tokens 0: at least 1 is needed"},
                                    {"--sms-sweep 8,-1", "--sms-sweep -1: at least 1 is needed"},
                                    {"--overlap-sms 4", "--overlap"},
                                    {"--bulk -1", "--bulk -1: 0 for no bulk copies"},
                                    {"--tagged -1", "--tagged -1: 0 for no tagged rows"},
                                    {"--counters yes", "--counters does not know 'yes'"},
                                    {"--replays 0", "--replays"}});
}

TEST_F(BenchGpu, RoundTripsOfEveryWayAndWire) {
  SKIP_WITHOUT_GPU();
  const Json object =
      run("--way gather,normal,low_latency,elastic,one_sided --wire bf16,fp8,nvfp4 --combine-wire bf16,fp8 --tokens 1,33");
  if (object.is_null()) return;
  const Json& rows = object["rows"];
  EXPECT_EQ(rows.size(), 5u * 3 * 2 * 2);
  for (const Json& row : rows) {
    SCOPED_TRACE(row.dump().substr(0, 200));
    ASSERT_EQ(row.count("failed"), 0u);
    EXPECT_EQ(row["samples_us"].size(), 3u);
    for (const char* field : {"median_us", "dispatch_us", "combine_us", "floor_us"})
      EXPECT_GT(row[field].get<double>(), 0.0) << field;
    EXPECT_LE(row["least_us"], row["median_us"]);
    EXPECT_LE(row["median_us"], row["most_us"]);
    EXPECT_EQ(row["graph"].get<bool>(), row["way"] != "normal");
    EXPECT_EQ(row.count("host_blocked_us"), row["way"] == "normal" ? 1u : 0u);
    const bool in_place = (row["way"] == "gather" || row["way"] == "one_sided") && row["combine_wire"] == "bf16";
    EXPECT_EQ(row["results_in_place"].get<bool>(), in_place);
  }
}

// The same configurations without and with bulk copies, but where nothing could go by them.
TEST_F(BenchGpu, BulkCopiesBesideOrdinaryOnes) {
  SKIP_WITHOUT_GPU();
  const Json object =
      run("--way gather,normal,low_latency,elastic,one_sided --wire bf16,fp8 --combine-wire fp8 --tokens 33 --bulk 0,512");
  if (object.is_null()) return;
  int with = 0;
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(row.dump().substr(0, 200));
    ASSERT_EQ(row.count("failed"), 0u);
    if (row["bulk_bytes"] == 0) continue;
    ++with;
    EXPECT_EQ(row["wire"], "bf16");
    EXPECT_GT(row["median_us"].get<double>(), 0.0);
  }
  EXPECT_EQ(with, 5);
  EXPECT_EQ(object["rows"].size(), 15u);
}

// gather with and without the flag beside the data, but where nothing could travel so.
TEST_F(BenchGpu, TaggedRowsBesideOrdinaryOnes) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--way gather,one_sided --wire bf16,fp8 --tokens 1,8,33 --tagged 0,8");
  if (object.is_null()) return;
  int with = 0;
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(row.dump().substr(0, 200));
    ASSERT_EQ(row.count("failed"), 0u);
    if (row["tagged_tokens"] == 0) continue;
    ++with;
    EXPECT_EQ(row["way"], "gather");
    EXPECT_EQ(row["wire"], "bf16");
    EXPECT_LE(row["tokens"].get<int>(), 8);
    EXPECT_GT(row["median_us"].get<double>(), 0.0);
  }
  EXPECT_EQ(with, 2);
  EXPECT_EQ(object["rows"].size(), 14u);
}

// The same configurations without and with counters, one behind the other; what was counted, and what that cost.
TEST_F(BenchGpu, CountersBesideNone) {
  SKIP_WITHOUT_GPU();
  const Json object =
      run("--way gather,normal,low_latency,elastic,one_sided --wire bf16 --tokens 8,33 --tagged 0,8 --counters on,off");
  if (object.is_null()) return;
  const Json& rows = object["rows"];
  ASSERT_EQ(rows.size(), 2u * (5 * 2 + 1));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Json& row = rows[i];
    SCOPED_TRACE(row.dump().substr(0, 300));
    ASSERT_EQ(row.count("failed"), 0u);
    ASSERT_EQ(row["counters"].get<bool>(), i % 2 == 1);
    ASSERT_EQ(row.count("counted"), i % 2);
    if (i % 2 == 0) continue;
    for (const char* field : {"way", "tokens", "tagged_tokens"}) EXPECT_EQ(row[field], rows[i - 1][field]) << field;
    const double cost = row["median_us"].get<double>() - rows[i - 1]["median_us"].get<double>();
    EXPECT_DOUBLE_EQ(row["counters_cost_us"].get<double>(), cost);
    const Json& counted = row["counted"];
    EXPECT_GE(counted["calls"].get<int>(), 3 * (row["way"] == "normal" ? 1 : 2))
        << "three samples, of two round trips each in graphs";
    for (const char* field : {"dispatch_wait_us", "combine_wait_us"}) EXPECT_TRUE(counted[field].is_number()) << field;
    EXPECT_GE(counted["experts_over_mean"].get<double>(), 1.0) << "twelve experts, fifty pairs and more";
  }
  const Json alone = run("--way one_sided --wire bf16 --tokens 8 --counters on");
  if (alone.is_null()) return;
  ASSERT_EQ(alone["rows"].size(), 1u);
  EXPECT_EQ(alone["rows"][0].count("counted"), 1u);
  EXPECT_EQ(alone["rows"][0].count("counters_cost_us"), 0u) << "there is nothing to compare with";
}

// Rows of the busiest GPU, where they do not depend on the routing: gather's go to every rank, low_latency's are one a choice.
TEST_F(BenchGpu, RowsAddUp) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--way gather,low_latency --wire bf16 --tokens 20");
  if (object.is_null()) return;
  const double ranks = object["ranks"].get<double>();
  const double gpus = gpus_here();
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(row.dump().substr(0, 200));
    ASSERT_EQ(row.count("failed"), 0u);
    const double remote = row["remote_rows"].get<double>();
    const double local = row["local_rows"].get<double>();
    EXPECT_EQ(row["remote_bytes"].get<double>(), remote * 256 * 2);
    EXPECT_EQ(row["local_bytes"].get<double>(), local * 256 * 2);
    if (gpus == 1) {
      EXPECT_EQ(remote, 0.0);
      EXPECT_EQ(local, 2 * ranks * 20 * (row["way"] == "gather" ? ranks : 3));
    } else if (row["way"] == "gather" && ranks == gpus) {
      EXPECT_EQ(remote, 2 * 20 * (ranks - 1));
      EXPECT_EQ(local, 2.0 * 20);
    } else {
      EXPECT_GT(remote, 0.0);
    }
  }
}

TEST_F(BenchGpu, NcclOrTheReasonWhyNot) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--way nccl,gather_nccl --wire bf16 --tokens 16");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 2u);
  for (const Json& row : object["rows"]) {
    if (row.count("failed") == 1) {
      std::printf("not measured: %s\n", row["failed"].get<std::string>().c_str());
      EXPECT_FALSE(row["failed"].get<std::string>().empty());
      continue;
    }
    EXPECT_GT(row["median_us"].get<double>(), 0.0);
    if (row["way"] == "nccl") {
      EXPECT_EQ(row["forms"].size(), 2u);
      EXPECT_EQ(row["median_us"], row["forms"][row["form"].get<std::string>()]["median_us"]);
    }
  }
}

TEST_F(BenchGpu, Studies) {
  SKIP_WITHOUT_GPU();
  const Json layouts = run("--layout-cost --wire fp8 --tokens 9");
  if (layouts.is_null()) return;
  EXPECT_EQ(layouts["layouts"].size(), 1u + 3 + 1 + 3 + 1) << "gather, normal, low_latency, elastic, one_sided";
  for (const Json& row : layouts["layouts"]) EXPECT_EQ(row.count("layout_us"), 1u) << row;
  const Json sweep = run("--sms-sweep 4,8 --way one_sided,elastic --wire bf16 --tokens 9");
  if (sweep.is_null()) return;
  EXPECT_EQ(sweep["sms_sweep"].size(), 2u);
  for (const Json& row : sweep["sms_sweep"]) {
    EXPECT_EQ(row["median_us"].size(), 2u) << row;
    EXPECT_GE(row["rule_over_best"].get<double>(), 1.0) << row;
  }
  const Json overlap = run("--overlap 5,20 --overlap-sms 8 --wire fp8 --tokens 9");
  if (overlap.is_null()) return;
  EXPECT_EQ(overlap["overlap"].size(), 2u);
  for (const Json& row : overlap["overlap"]) {
    for (const char* field : {"work_us", "exchange_us", "one_stream_us", "two_streams_us"})
      EXPECT_GT(row[field].get<double>(), 0.0) << row;
  }
}

// 400,000 tokens of low_latency ask for more than 150 GB a rank.
TEST_F(BenchGpu, WhatDoesNotFitIsALineAndNotTheEnd) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--way low_latency --wire bf16 --tokens 9,400000,7", 7168);
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 3u);
  EXPECT_EQ(object["rows"][0].count("failed"), 0u);
  EXPECT_EQ(object["rows"][1].count("failed"), 1u) << "it fitted";
  EXPECT_EQ(object["rows"][2].count("failed"), 0u) << "the failure before left something behind";
}

}  // namespace
}  // namespace heddle
