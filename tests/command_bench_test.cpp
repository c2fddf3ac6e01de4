// `heddle bench step` and `heddle bench all` on the host engine: what they write, and what they refuse.
#include <map>
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
  expect_error(2, step + " --sizes 2000000000", "--sizes");
  expect_error(2, step + " --processes", "--processes");
  expect_error(2, "bench step --preset deepseek-v4-flash --layers 1", "--ranks");
  expect_error(2, step + " --engine cuda --workers 3", "--workers");
  expect_error(2, step + " --engine cuda --wire bf16", "--wire");
}

class BenchBalanceCommand : public CommandTest {};

TEST_F(BenchBalanceCommand, SaysWhatIsMissing) {
  const std::string cuda = "bench balance --preset deepseek-v4-flash --hidden 128 --intermediate 64 --experts 8 --engine cuda";
  const std::string ranks = cuda + " --ranks 2";
  expect_error(2, "bench balance --preset deepseek-v4-flash --ranks 2", "--engine cuda");
  expect_error(2, cuda, "--ranks N");
  expect_error(2, cuda + " --ranks 1", "one rank has all rows");
  expect_error(2, ranks + " --tokens 4", "--sizes");
  expect_error(2, ranks + " --sizes 9000", "--sizes 9000: 1 to 8192");
  expect_error(2, ranks + " --way nonsense", "nonsense");
  expect_error(2, ranks + " --extra 0", "--extra 0: 1 to 1024");
  expect_error(2, ranks + " --extra 3", "--extra 3: 8 experts and 3 copies do not divide over 2 ranks");
  expect_error(2, ranks + " --changes 0", "--changes 0");
  expect_error(2, ranks + " --calls 15", "--calls 15: 16 to 1000");
  expect_error(2, ranks + " --calls 40 --calls-ahead 20", "--calls 40: 48 to 1000");
  expect_error(2, ranks + " --calls-ahead -1", "--calls-ahead -1");
  expect_error(2, ranks + " --copy-mb 0", "--copy-mb 0");
  expect_error(2, ranks + " --copy-mb much", "not a whole number");
  expect_error(2, ranks + " --staged 0", "--staged 0");
  expect_error(2, ranks + " --wire bf16", "--wire");
  expect_error(2, ranks + " --workers 3", "--workers");
}

class BenchCommand : public CommandTest {};

/// A build without CUDA says so; one with it reads the flags.
TEST_F(BenchCommand, PartsOnGpusAreKnownInEveryBuild) {
  for (const std::string part : {"exchange", "activation", "experts", "mega"}) {
    const Ran ran = run("bench " + part + " --replays many");
    EXPECT_EQ(ran.status, 2) << ran.err;
    const bool without_cuda = ran.err.find("heddle bench " + part + ": this build has no CUDA part") != std::string::npos;
    EXPECT_TRUE(without_cuda || ran.err.find("--replays") != std::string::npos) << ran.err;
  }
}

class BenchAllCommand : public CommandTest {
 protected:
  /// The names in a file, with what became of each.
  static std::map<std::string, std::string> measured(const std::string& file) {
    std::map<std::string, std::string> all;
    const auto json = json_of(file);
    for (const auto& one : json.at("measurements"))
      all[one.at("name")] = one.contains("result") ? "result" : one.at("skipped").get<std::string>();
    return all;
  }
  const std::string all_ = "bench all --recordings '" HEDDLE_TEST_DATA "/routing' ";
};

TEST_F(BenchAllCommand, MeasuresWithProvenance) {
  expect_done(all_ + "--only copies,buffers,ring-8,grids,trace-2 --commit abc --out " + file("a.json") + " >/dev/null");
  const auto json = json_of(file("a.json"));
  EXPECT_EQ(json.at("benchmark"), "all");
  EXPECT_EQ(json.at("engine"), "host");
  EXPECT_FALSE(json.contains("under_way"));
  EXPECT_EQ(json.at("measurements").size(), 5u);
  for (const auto& one : json.at("measurements")) {
    EXPECT_EQ(one.at("commit"), "abc");
    EXPECT_EQ(one.at("machine").at("engine"), "host");
    EXPECT_TRUE(one.at("machine").at("processor").is_string());
    EXPECT_GE(one.at("wall_seconds").get<double>(), 0.0);
    EXPECT_FALSE(one.at("serves").get<std::string>().empty());
    EXPECT_EQ(one.at("result").at("benchmark"), one.at("benchmark"));
  }
  const auto& copies = json.at("measurements").at(0).at("result");
  EXPECT_EQ(copies.at("recordings").size(), 3u);
  for (const auto& recording : copies.at("recordings")) {
    EXPECT_FALSE(recording.at("points").empty());
    for (const auto& point : recording.at("points"))
      EXPECT_NEAR(point.at("copies").get<double>(), point.at("formula").get<double>(), 0.15 * point.at("formula").get<double>());
  }
  EXPECT_FALSE(json.at("measurements").at(2).at("result").at("rows").empty());
  for (const auto& row : json.at("measurements").at(2).at("result").at("rows")) {
    EXPECT_EQ(row.at("ring"), "full");
    EXPECT_EQ(row.at("samples_us").size(), 5u);
  }
}

TEST_F(BenchAllCommand, TheSecondCallMeasuresWhatIsMissing) {
  const std::string out = " --out " + file("a.json");
  const auto of_another = [&](const std::string& options) { return run(all_ + options + out).out; };
  expect_done(all_ + "--only copies --commit abc" + out + " >/dev/null");
  EXPECT_NE(of_another("--only copies,buffers --commit abc").find("2 measurements, 1 of them there already"), std::string::npos);
  EXPECT_EQ(measured(file("a.json")), (std::map<std::string, std::string>{{"buffers", "result"}, {"copies", "result"}}));
  EXPECT_NE(of_another("--only copies,buffers --commit abc").find("2 measurements, 2 of them there already"), std::string::npos);
  EXPECT_NE(of_another("--only copies,buffers --commit other").find("2 measurements, 0 of them there already"), std::string::npos);
}

TEST_F(BenchAllCommand, WhatDoesNotFitTheBudgetIsLeft) {
  const Ran ran = run(all_ + "--only buffers,step-4 --budget 5 --out " + file("a.json"));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.out.find("1 left for another call"), std::string::npos) << ran.out;
  EXPECT_NE(ran.out.find("heddle report " + file("a.json")), std::string::npos) << ran.out;
  EXPECT_EQ(measured(file("a.json")), (std::map<std::string, std::string>{{"buffers", "result"}}));
  const Ran none = run(all_ + "--only step-4 --budget 5 --out " + file("b.json"));
  EXPECT_EQ(none.status, 0) << none.err;
  EXPECT_NE(none.out.find("1 measurement, 0 of them"), std::string::npos) << none.out;
  EXPECT_EQ(none.out.find("b.json"), std::string::npos) << "there is none: " << none.out;
  EXPECT_FALSE(fs::exists(file("b.json")));
}

TEST_F(BenchAllCommand, SaysWhatIsWrong) {
  expect_error(2, "bench all", "--out");
  expect_error(2, "bench all --only nonsense --out " + file("a.json"), "copies, buffers");
  expect_error(2, "bench all --engine other --out " + file("a.json"), "host, cuda");
  expect_error(2, "bench all --gpus 1 --out " + file("a.json"), "--engine cuda");
  expect_error(2, "bench all --only copies --recordings 'a b' --out " + file("a.json"), "--recordings 'a b'");
  expect_error(2, "bench all --budget 0 --out " + file("a.json"), "--budget 0");
  std::ofstream(file("b.json")) << "{\"benchmark\": \"mega\"}";
  expect_error(2, "bench all --only buffers --out " + file("b.json"), "b.json");
  EXPECT_NE(run("bench all --list").out.find("layer-8"), std::string::npos);
}

}  // namespace
}  // namespace heddle::command_test
