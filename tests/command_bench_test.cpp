// `heddle bench step` and `heddle bench all` on the host engine: what they write, and what they refuse.
#include <set>

#include "command_support.hpp"

namespace heddle::command_test {
namespace {

const std::string tiny = " --hidden 128 --intermediate 64 --experts 8 --ranks 2 --layers 2 --replays 2 --sizes 3";

class BenchStepCommand : public CommandTest {};

TEST_F(BenchStepCommand, ALineForEveryWayAndGap) {
  expect_done("bench step --preset deepseek-v4-flash" + tiny + " --gaps 0,30 --commit abc --json " + file("s.json") +
              " >/dev/null");
  const auto json = json_of(file("s.json"));
  EXPECT_EQ(json.at("benchmark"), "step");
  EXPECT_EQ(json.at("commit"), "abc");
  EXPECT_EQ(json.at("machine").at("engine"), "host");
  EXPECT_EQ(json.at("layers"), 2);
  EXPECT_EQ(json.at("graph"), false);
  std::set<std::pair<std::string, int>> lines;
  for (const auto& row : json.at("rows")) {
    lines.emplace(row.at("way"), row.at("gap_us"));
    EXPECT_EQ(row.at("samples_us").size(), 2u);
    EXPECT_NEAR(row.at("moe_us").get<double>(), row.at("median_us").get<double>() - row.at("gaps_us").get<double>(), 1e-9);
    EXPECT_NEAR(row.at("moe_us_a_layer").get<double>() * 2, row.at("moe_us").get<double>(), 1e-9);
    EXPECT_GE(row.at("gaps_us").get<double>(), 2 * row.at("gap_us").get<double>()) << "a sleep is never shorter";
  }
  EXPECT_EQ(lines.size(), 12u) << "six ways, two gaps";
}

TEST_F(BenchStepCommand, SaysWhatIsMissing) {
  const std::string step = "bench step --preset deepseek-v4-flash" + tiny;
  expect_error(2, "bench step --preset mixtral-8x7b --hidden 128 --intermediate 64 --ranks 2", "--layers");
  expect_error(2, step + " --gaps -1", "--gaps");
  expect_error(2, step + " --tokens 4", "--sizes");
  expect_error(2, step + " --way nonsense", "nonsense");
  expect_error(2, step + " --processes", "--processes");
  expect_error(2, "bench step --preset deepseek-v4-flash --layers 1", "--ranks");
}

}  // namespace
}  // namespace heddle::command_test
