// `heddle bench balance` from outside: what it refuses (no GPU needed), and that small runs follow the load by every kind of way,
// keep their outputs and say what changes took.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "gpu/bench_command.hpp"

namespace heddle {
namespace {

constexpr const char* layer = "bench balance --engine cuda --preset deepseek-v4-flash --hidden 512 --intermediate 256 --experts 16";

class BenchBalanceGpu : public BenchCommand {
 protected:
  /// Four ranks that follow two loads; the JSON, null if there is none.
  Json run(const std::string& arguments) const {
    Json object =
        measured(fmt::format("{} --topk 3 --ranks 4 --gpus {} --extra 8 --sizes 64 --calls 32 --copy-mb 1 "
                             "--routing zipf:1.5 {}",
                             layer, std::min(gpus_here(), 2), arguments));
    if (object.is_null()) return object;
    EXPECT_EQ(object["benchmark"], "balance");
    EXPECT_EQ(object["ranks"], 4);
    EXPECT_EQ(object["extra"], 8);
    return object;
  }

  static void expect_phase(const Json& phase, std::size_t least) {
    EXPECT_GE(phase["calls"].get<std::size_t>(), least);
    EXPECT_EQ(phase["samples_us"].size(), phase["calls"].get<std::size_t>());
    for (const Json& times : {phase, phase["between"]}) EXPECT_LE(times["median_us"], times["most_us"]);
    EXPECT_GT(phase["median_us"].get<double>(), 0.0);
  }

  static void expect_change(const Json& row) {
    ASSERT_EQ(row.count("failed"), 0u) << row["failed"];
    ASSERT_EQ(row.count("wrong"), 0u) << row["wrong"];
    ASSERT_TRUE(row["changed"].get<bool>());
    expect_phase(row["before"], 1);
    expect_phase(row["during"], 2);
    expect_phase(row["after"], 32);
    EXPECT_EQ(row["during"]["calls"], row["calls_to_switch"]);
    EXPECT_GT(row["experts"].get<int>(), 0);
    EXPECT_EQ(row["switches_us"].size(), row["switches"].get<std::size_t>());
    EXPECT_GE(row["switches"].get<int>(), 1);
    double bytes = 0;
    for (const Json& sent : row["sent_bytes"]) bytes += sent.get<double>();
    EXPECT_GT(bytes, 0.0);
    for (const char* field : {"copy_bytes_per_second", "decision_to_switch_us", "switch_us", "staging_bytes"})
      EXPECT_GT(row[field].get<double>(), 0.0) << field;
    for (const char* rows : {"rows_before", "rows_after"}) EXPECT_GE(row[rows]["max_over_mean"].get<double>(), 1.0);
  }
};

TEST_F(BenchBalanceGpu, RefusesByName) {
  expect_refused(layer, {{"--gpus 1", "give --ranks N"},
                         {"--ranks 1", "--ranks 1: one rank has all rows"},
                         {"--ranks 4 --sizes 0", "--sizes 0: 1 to 8192"},
                         {"--ranks 4 --way fused", "fused"},
                         {"--ranks 4 --extra 0", "--extra 0: 1 to 1024"},
                         {"--ranks 4 --extra 3", "--extra 3: 16 experts and 3 copies do not divide over 4 ranks"},
                         {"--ranks 4 --calls 15", "--calls 15: 16 to 1000"},
                         {"--ranks 4 --copy-mb 0", "--copy-mb 0"},
                         {"--ranks 4 --staged 0", "--staged 0"},
                         {"--ranks 4 --tokens 4", "--sizes"}});
}

TEST_F(BenchBalanceGpu, EveryWayFollowsTwoLoads) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--way gather,normal,low_latency,elastic,one_sided,mega --changes 2 --weights mxfp4");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 12u);
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(fmt::format("{} {}", row["way"].get<std::string>(), row.value("load", 0)));
    EXPECT_EQ(row["graph"], row["way"] != "normal");
    expect_change(row);
  }
}

// Memory for two experts a rank: a change is gone to in parts.
TEST_F(BenchBalanceGpu, StagesLessMemoryInMoreSwitches) {
  SKIP_WITHOUT_GPU();
  const Json all = run("--way low_latency --changes 1 --weights bf16");
  const Json few = run("--way low_latency --changes 1 --weights bf16 --staged 2");
  if (all.is_null() || few.is_null()) return;
  EXPECT_EQ(few["staged_experts"], 2);
  EXPECT_EQ(3 * few["rows"][0]["staging_bytes"].get<std::size_t>(), all["rows"][0]["staging_bytes"].get<std::size_t>())
      << "six experts a rank";
  expect_change(all["rows"][0]);
  expect_change(few["rows"][0]);
  EXPECT_EQ(all["rows"][0]["switches"], 1);
  EXPECT_GE(few["rows"][0]["switches"].get<int>(), 2) << "four come to a rank";
}

}  // namespace
}  // namespace heddle
