// The choice of an engine where it cannot be had: one line that says what would be right. GPUs are hidden from the command, so
// this holds on every machine and in every build.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class CommandEngine : public CommandTest {
 protected:
  void expect_refused(const std::string& arguments, const std::string& part) const {
    expect_error_of_script(2, "CUDA_VISIBLE_DEVICES=-1 \"$heddle\" " + arguments, part);
  }
  std::string run_with(const std::string& more) const {
    return "run" + small_layer + " --ranks 2 --tokens 6 --way low_latency --out " + file("never") + " " + more;
  }
};

TEST_F(CommandEngine, CudaWithoutAGpuIsRefused) {
  expect_refused(run_with("--engine cuda"), "take --engine host");
  expect_refused(run_with("--engine cuda --gpus 1"), "take --engine host");
  expect_refused(run_with("--engine cuda --processes"), "take --engine host");
  expect_refused("verify" + small_layer + " --ranks 2 --tokens 6 --engine cuda", "take --engine host");
}

TEST_F(CommandEngine, UnknownEnginesAndStrayGpusAreNamed) {
  expect_refused(run_with("--engine tpu"), "host or cuda");
  expect_refused(run_with("--gpus 2"), "--engine cuda");
  expect_refused(run_with("--engine host --gpus 1"), "--engine cuda");
  expect_refused(run_with("--gpus many"), "whole number");
  expect_refused(run_with("--experts-engine cuda"), "--engine cuda");
  expect_refused(run_with("--experts-engine tpu"), "host or cuda");
}

TEST_F(CommandEngine, HelpSaysWhereExpertsRun) {
  for (const char* command : {"run", "verify"}) {
    const Ran ran = run(std::string(command) + " --help");
    EXPECT_EQ(0, ran.status);
    EXPECT_NE(std::string::npos, ran.out.find("experts")) << ran.out;
    EXPECT_NE(std::string::npos, ran.out.find("--gpus")) << ran.out;
  }
}

TEST_F(CommandEngine, SlicesOfExpertsGoByGatherOnTheHostToo) {
  const std::string sliced = " --preset mixtral-8x7b --hidden 128 --intermediate 384 --ranks 3 --tokens 20 --expert-slices";
  expect_refused("run" + sliced + " --way low_latency --out " + file("never"), "take gather");
  expect_done("verify" + sliced + " --json " + file("j"));
  const auto ways = json_of(file("j")).at("ways");
  ASSERT_EQ(ways.size(), 1u);
  EXPECT_TRUE(ways[0].at("configuration").at("expert_slices").get<bool>());
  for (const auto& rank : ways[0].at("per_rank")) EXPECT_EQ(rank.at("rows_real"), 40) << "every rank has all pairs";
}

TEST_F(CommandEngine, TheHostEngineReportsNoGpus) {
  expect_done("run" + small_layer + " --ranks 2 --tokens 6 --way low_latency --out " + file("o") + " --json " + file("j"));
  const auto json = json_of(file("j"));
  EXPECT_EQ(json.at("configuration").at("engine"), "host");
  EXPECT_FALSE(json.at("configuration").contains("gpus"));
  EXPECT_EQ(json.at("kernels_launched"), 0);
}

}  // namespace
}  // namespace heddle::command_test
