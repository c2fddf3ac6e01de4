// `heddle trace` from outside: its files, its table, and that nothing appears unless the run succeeded.
#include <set>

#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class TraceCommand : public CommandTest {};

TEST_F(TraceCommand, WritesTraceStripsAndNumbers) {
  const Ran ran = run("trace" + deepseek_layer + " --ranks 2 --tokens 9 --out " + file("t.json") + " --strips " + file("s.svg") +
                      " --json " + file("j.json"));
  EXPECT_EQ(0, ran.status) << ran.err;
  EXPECT_NE(std::string::npos, ran.out.find("products of gemm1")) << ran.out;
  EXPECT_EQ(files(), (std::vector<std::string>{file("j.json"), file("s.svg"), file("t.json")}));
  EXPECT_EQ(text_of(file("s.svg")).find("<svg "), 0u);
  std::set<int> processes;
  const auto trace = json_of(file("t.json"));
  for (const auto& event : trace.at("traceEvents")) processes.insert(event.at("pid").get<int>());
  EXPECT_EQ(processes, (std::set<int>{0, 1, 2, 3})) << "two ranks of mega, two of low_latency";
}

TEST_F(TraceCommand, NumbersAddUp) {
  expect_done("trace" + small_layer + " --ranks 3 --tokens 10 --way all --json " + file("j.json") + " >/dev/null");
  const auto json = json_of(file("j.json"));
  EXPECT_TRUE(json.at("heddle").is_string());
  std::set<std::string> ways;
  for (const auto& way : json.at("ways")) {
    ways.insert(way.at("configuration").at("way"));
    EXPECT_TRUE(way.at("title").is_string());
    EXPECT_EQ(way.at("lost_spans"), 0);
    std::int64_t spans = 0;
    for (const auto& role : way.at("roles")) {
      double sum = role.at("idle_seconds");
      for (const auto& line : role.at("lines")) {
        sum += line.at("seconds").get<double>();
        spans += line.at("count").get<std::int64_t>();
        EXPECT_TRUE(line.at("wait").is_boolean());
        EXPECT_TRUE(line.at("during").is_null() || line.at("during").is_string());
      }
      EXPECT_NEAR(sum, role.at("seconds").get<double>(), 1e-12);
      EXPECT_LE(role.at("begin_seconds").get<double>(), role.at("end_seconds").get<double>());
      EXPECT_TRUE(role.at("kernel").is_null());
      EXPECT_GE(role.at("lanes").get<int>(), 1);
    }
    EXPECT_EQ(way.at("spans"), spans);
  }
  EXPECT_EQ(ways, (std::set<std::string>{"elastic", "gather", "low_latency", "mega", "normal", "one_sided"}));
}

TEST_F(TraceCommand, TheFusedLayerComesFirst) {
  const Ran ran = run("trace" + small_layer + " --ranks 2 --tokens 4 --way gather,mega");
  EXPECT_EQ(0, ran.status) << ran.err;
  EXPECT_LT(ran.out.find("\nmega: "), ran.out.find("\ngather: "));
}

TEST_F(TraceCommand, NothingAppearsWhereSomethingIsWrong) {
  const std::string good = "trace" + small_layer + " --ranks 2 --tokens 4 --out " + file("t.json");
  expect_error(2, good + " --way mega,nonsense", "nonsense");
  expect_error(2, good + " --processes", "--processes");
  expect_error(2, good + " --ctas 0", "--ctas 0");
  expect_error(2, good + " --warm -1", "--warm -1");
  expect_error(2, good + " --json " + file("no_folder/j.json"), "no_folder");
  expect_error(2, good + " --strips " + file("no_folder/s.svg"), "no_folder");
}

TEST_F(TraceCommand, KernelsWithoutStampsSayWhichBuildHasThem) {
#ifdef HEDDLE_TRACE
  GTEST_SKIP() << "this build's kernels take time stamps";
#endif
  expect_error(2, "trace" + small_layer + " --ranks 2 --tokens 4 --engine cuda --out " + file("t.json"), "preset trace");
}

}  // namespace
}  // namespace heddle::command_test
