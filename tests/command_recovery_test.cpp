// `heddle bench recovery`: what it writes, and what it refuses.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

const std::string tiny = "bench recovery --preset deepseek-v4-flash --hidden 128 --intermediate 64 --experts 8 --tokens 9 --seed 1";

class BenchRecoveryCommand : public CommandTest {};

TEST_F(BenchRecoveryCommand, AnEntryForEveryLossAndReturn) {
  expect_done(tiny + " --ranks 3 --losses 2 --deadline-ms 500 --way low_latency,elastic --reduce home --commit abc --json " +
              file("r.json") + " >/dev/null");
  const auto json = json_of(file("r.json"));
  EXPECT_EQ(json.at("benchmark"), "recovery");
  EXPECT_EQ(json.at("commit"), "abc");
  EXPECT_EQ(json.at("machine").at("engine"), "host");
  EXPECT_EQ(json.at("deadline_ms"), 500);
  ASSERT_EQ(json.at("rows").size(), 2u);
  for (const auto& row : json.at("rows")) {
    for (const char* list : {"lost", "back"}) {
      ASSERT_EQ(row.at(list).size(), 2u);
      for (const auto& one : row.at(list)) {
        double sum = 0;
        for (const char* part : {"detect_ms", "agree_ms", "meet_ms", "memory_ms", "experts_ms", "again_ms"})
          sum += one.at(part).get<double>();
        EXPECT_NEAR(sum, one.at("total_ms").get<double>(), 1e-6);
      }
    }
    EXPECT_EQ(row.at("lost").at(0).at("rank"), 0);
    EXPECT_EQ(row.at("lost").at(1).at("rank"), 1);
    EXPECT_GT(row.at("lost").at(0).at("experts_moved").get<int>(), 0);
  }
}

TEST_F(BenchRecoveryCommand, SaysWhatIsMissing) {
  expect_error(2, tiny, "--ranks");
  expect_error(2, tiny + " --ranks 1", "--ranks");
  expect_error(2, tiny + " --ranks 33", "32");
  expect_error(2, tiny + " --ranks 2 --losses 0", "--losses");
  expect_error(2, tiny + " --ranks 2 --way nonsense", "nonsense");
  expect_error(2, tiny + " --ranks 2 --engine cuda", "host engine");
  expect_error(2, tiny + " --ranks 2 --tensor-parallel", "--tensor-parallel");
}

}  // namespace
}  // namespace heddle::command_test
