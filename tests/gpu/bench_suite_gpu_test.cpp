// `heddle bench step` and `heddle bench all` on GPUs, from outside: a step by way and gap, and measurements that a second call
// leaves.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "gpu/bench_command.hpp"

namespace heddle {
namespace {

class BenchSuiteGpu : public BenchCommand {};

TEST_F(BenchSuiteGpu, AStepByWayAndGap) {
  SKIP_WITHOUT_GPU();
  const Json step = measured(
      "bench step --engine cuda --ranks 2 --gpus 1 --preset deepseek-v4-flash --hidden 512 --intermediate 256 --experts 16 "
      "--layers 5 --sizes 8 --gaps 0,50 --replays 3");
  ASSERT_FALSE(step.is_null());
  std::set<std::string> done, refused;
  for (const Json& row : step.at("rows")) {
    const std::string way = row.at("way");
    if (row.contains("failed")) {
      refused.insert(way);
      continue;
    }
    done.insert(way);
    EXPECT_EQ(row.at("samples_us").size(), 3u);
    EXPECT_GT(row.at("moe_us").get<double>(), 0.0) << row;
    EXPECT_GE(row.at("gaps_us").get<double>(), 5.0 * row.at("gap_us").get<double>()) << "kernels that wait, wait as long";
    EXPECT_GE(row.at("kernels_a_layer").get<double>(), 2.0) << row;
  }
  EXPECT_EQ(refused, std::set<std::string>{"normal"}) << "it waits on the host";
  EXPECT_EQ(done, (std::set<std::string>{"elastic", "gather", "low_latency", "mega", "one_sided"}));
}

TEST_F(BenchSuiteGpu, ASecondCallLeavesWhatIsThere) {
  SKIP_WITHOUT_GPU();
  const std::string all = fmt::format("bench all --engine cuda --gpus 1 --only copies,activation --out {}", file());
  const Ran first = run_heddle(all);
  ASSERT_EQ(first.status, 0) << first.text;
  const Json before = json();
  EXPECT_EQ(before.at("machine").at("engine"), "cuda");
  for (const Json& one : before.at("measurements")) EXPECT_TRUE(one.contains("result") || one.contains("skipped")) << one;
  const Ran second = run_heddle(all);
  EXPECT_EQ(second.status, 0) << second.text;
#ifndef HEDDLE_TRACE  // there the activation is refused anew
  EXPECT_NE(second.text.find("2 measurements, 2 of them there already"), std::string::npos) << second.text;
  EXPECT_EQ(json().at("measurements"), before.at("measurements"));
#endif
}

}  // namespace
}  // namespace heddle
