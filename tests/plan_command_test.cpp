// `heddle plan` from outside: exit statuses, one-line errors, files written whole or not at all.
#include <sys/stat.h>

#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class PlanCommand : public CommandTest {
 protected:
  const std::string good_ = "plan --preset deepseek-v4-flash --ranks 8 --tokens 512 --cap 1024";
  const std::string budget_ = "plan --budget --preset deepseek-v4-flash --ranks 8";
};

TEST_F(PlanCommand, BadArgumentsEndInOneLine) {
  expect_error(2, "", "heddle --help");
  expect_error(2, "weave", "weave");
  expect_error(2, "plan", "--preset");
  expect_error(2, "plan --wrap", "--wrap");
  expect_error(2, "plan --preset nobody --ranks 8 --tokens 1", "deepseek-v3");
  expect_error(2, "plan --preset deepseek-v3 --tokens 1", "--ranks");
  expect_error(2, "plan --preset deepseek-v3 --ranks 8", "--tokens");
  expect_error(2, "plan --preset deepseek-v3 --ranks eight --tokens 1", "whole number");
  expect_error(2, "plan --preset deepseek-v3 --ranks 99999999999 --tokens 1", "whole number");
  expect_error(2, "plan --preset deepseek-v3 --ranks 8 --tokens 9 --cap 8", "9 tokens");
  expect_error(2, "plan --preset deepseek-v3 --ranks 8 --tokens 1 --wire fp4", "nvfp4");
  expect_error(2, "plan --preset deepseek-v3 --ranks 8 --tokens 1 --machine h100", "h200");
  expect_error(2, "plan --preset deepseek-v4-pro --ranks 8 --tokens 1", "--weights");
  expect_error(2, "plan --hidden 4096 --experts 8 --topk 2 --ranks 2 --tokens 1", "--intermediate");
}

TEST_F(PlanCommand, HelpVersionAndListsSucceed) {
  for (const char* arguments : {"--help", "--version", "plan --help", "plan --list", "plan --articles"}) {
    const Ran ran = run(arguments);
    EXPECT_EQ(0, ran.status) << arguments;
    EXPECT_FALSE(ran.out.empty()) << arguments;
    EXPECT_EQ("", ran.err) << arguments;
  }
}

TEST_F(PlanCommand, WritesTheNumbersAsJson) {
  ASSERT_EQ(0, run(good_ + " --json " + file("plan.json")).status);
  const auto json = json_of(file("plan.json"));
  EXPECT_EQ("deepseek-v4-flash", json.at("request").at("preset"));
  EXPECT_EQ(1024, json.at("request").at("cap"));
  EXPECT_EQ(8, json.at("copies").at("every_rank").at("value"));
  EXPECT_NEAR(4.44, json.at("copies").at("needed_ranks").at("value").get<double>(), 0.005);
  EXPECT_EQ(4096 * 4128, json.at("traffic").at("gather").at("dispatch").at("value"));
  EXPECT_EQ("bytes", json.at("traffic").at("gather").at("dispatch").at("unit"));
  EXPECT_EQ(files().size(), 1u) << "nothing else is left";
}

TEST_F(PlanCommand, SaysWhichCapABudgetNeeds) {
  const std::string settings = budget_ + " --decode-graphs 1,64,8 --speculative-rows 4 --dp-groups 8 --prefill-chunk ";
  const Ran ran = run(settings + "65536 --json " + file("budget.json"));
  ASSERT_EQ(0, ran.status) << ran.err;
  for (const char* text : {"64 requests in the largest graph x 1 token x 4 speculative rows",
                           "65,536 tokens / 8 data-parallel groups", "cap to take"}) {
    EXPECT_NE(std::string::npos, ran.out.find(text)) << text;
  }
  const auto json = json_of(file("budget.json"));
  EXPECT_EQ(8192, json.at("budget").at("cap").at("value"));
  EXPECT_EQ(256, json.at("budget").at("decode").at("value"));
  EXPECT_EQ(8192, json.at("request").at("cap"));
  EXPECT_EQ(nlohmann::json({1, 64, 8}), json.at("request").at("budget").at("decode_graphs"));
  EXPECT_EQ(65536, json.at("request").at("budget").at("prefill_chunk"));
  for (const char* way : {"gather", "normal", "low_latency", "elastic", "one_sided", "mega"}) {
    EXPECT_EQ("bytes", json.at("own_layouts").at(way).at("unit")) << way;
    EXPECT_TRUE(json.at("decode_layouts").contains(way)) << way;
    EXPECT_TRUE(json.at("article_buffers").at(way).contains("total")) << way;
  }
  expect_error(2, settings + "65536 --cap 4096", "at least 8192, or prefill in chunks of at most 32768");
  expect_done(settings + "65536 --cap 8320");
  expect_done(settings + "none");
}

TEST_F(PlanCommand, ABudgetHasToBoundEveryStep) {
  expect_error(2, budget_ + " --decode-graphs 64 --prefill-chunk -1", "a prefill chunk of -1 is no bound");
  expect_error(2, budget_ + " --decode-graphs 64 --prefill-chunk=0", "a prefill chunk of 0 is no bound");
  expect_error(2, budget_ + " --decode-graphs 64", "--prefill-chunk");
  expect_error(2, budget_ + " --prefill-chunk 4096", "--decode-graphs");
  expect_error(2, budget_ + " --prefill-chunk none --decode-graphs none", "bounds nothing");
  expect_error(2, budget_ + " --prefill-chunk 4096 --decode-graphs 8,none", "'none' stands among numbers");
  expect_error(2, budget_ + " --prefill-chunk 4096 --decode-graphs 8,x", "'x'");
  expect_error(2, budget_ + " --prefill-chunk many --decode-graphs 8", "'many'");
  expect_error(2, budget_ + " --prefill-chunk 4096 --decode-graphs 8 --tokens 8", "--tokens");
  expect_error(2, budget_ + " --prefill-chunk 4096 --decode-graphs 8 --dp-groups 3", "3 data-parallel groups");
  expect_error(2, good_ + " --prefill-chunk 4096", "--budget");
}

TEST_F(PlanCommand, PlansNodesDirectAgainstHybrid) {
  const std::string several = "plan --preset deepseek-v3 --tokens 128 ";
  ASSERT_EQ(0, run(several + "--ranks 64 --nodes 8 --json " + file("nodes.json")).status);
  const auto nodes = json_of(file("nodes.json")).at("nodes");
  EXPECT_NEAR(5.29, nodes.at("needed_nodes").at("value").get<double>(), 0.005);
  for (const char* mode : {"direct", "hybrid"}) {
    for (const char* part : {"dispatch", "experts", "combine"}) EXPECT_EQ("seconds", nodes.at(mode).at(part).at("unit")) << mode;
    EXPECT_EQ("bytes", nodes.at(mode).at("buffer").at("unit")) << mode;
  }
  EXPECT_LT(nodes.at("hybrid").at("dispatch_between").at("value"), nodes.at("direct").at("dispatch_between").at("value"));
  ASSERT_EQ(0, run(several + "--gpus-per-node 8 --up-to 512 --json " + file("table.json")).status);
  const auto table = json_of(file("table.json")).at("scale_out");
  EXPECT_EQ(7u, table.size());
  EXPECT_EQ(512, table.back().at("ranks"));
  EXPECT_TRUE(table.back().at("hybrid").contains("combine_seconds"));
  expect_error(2, several + "--ranks 64 --nodes 7", "64 ranks cannot be shared equally by 7 nodes");
  expect_error(2, several + "--ranks 60 --gpus-per-node 8", "60 ranks are no whole number of nodes of 8");
  expect_error(2, several + "--up-to 512", "--gpus-per-node");
  expect_error(2, several + "--gpus-per-node 8 --up-to 4", "4 ranks in nodes of 8");
  expect_error(2, several + "--ranks 64 --nodes 8 --router-groups 7 --router-topk-groups 4", "4 of 7 groups");
}

TEST_F(PlanCommand, LeavesAFileAloneWhenItCannotWrite) {
  fs::create_directory(file("taken"));
  expect_error(2, good_ + " --json " + file("taken"), "taken");
  expect_error(2, good_ + " --json " + file("missing/plan.json"), "No such file");
  expect_error(2, good_ + " --json " + file("plan.json") + " --tokens 2000", "--tokens");
}

// A device or a pipe is written, never replaced by a file. The test's own pipe stands for both:
// a mistake here must not reach a device of the machine.
TEST_F(PlanCommand, DoesNotReplaceAPipe) {
  const std::string pipe = file("pipe");
  ASSERT_EQ(0, ::mkfifo(pipe.c_str(), 0600));
  const Ran ran = shell("\"$heddle\" " + good_ + " --json " + pipe + " >/dev/null & cat " + pipe);
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_NO_THROW(EXPECT_EQ(8, nlohmann::json::parse(ran.out).at("request").at("ranks")));
}

TEST_F(PlanCommand, SaysWhenItsOutputIsLost) {
  if (!fs::is_character_file("/dev/full")) {
    GTEST_SKIP() << "/dev/full is not a device here";
  }
  for (const std::string& arguments :
       {std::string("--version"), std::string("plan --list"), good_}) {  // less and more than a block
    expect_error_of_script(2, "\"$heddle\" " + arguments + " >/dev/full", "cannot write");
  }
}

}  // namespace
}  // namespace heddle::command_test
