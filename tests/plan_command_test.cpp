// `heddle plan` from outside: exit statuses, one-line errors, files written whole or not at all.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "command_fixture.hpp"

namespace heddle {
namespace {

namespace fs = std::filesystem;

class PlanCommand : public Command {
 protected:
  const std::string good_ = "plan --preset deepseek-v4-flash --ranks 8 --tokens 512 --cap 1024";
};

TEST_F(PlanCommand, BadArgumentsEndInOneLine) {
  expect_refused("", "heddle --help");
  expect_refused("weave", "weave");
  expect_refused("plan", "--preset");
  expect_refused("plan --wrap", "--wrap");
  expect_refused("plan --preset nobody --ranks 8 --tokens 1", "deepseek-v3");
  expect_refused("plan --preset deepseek-v3 --tokens 1", "--ranks");
  expect_refused("plan --preset deepseek-v3 --ranks 8", "--tokens");
  expect_refused("plan --preset deepseek-v3 --ranks eight --tokens 1", "whole number");
  expect_refused("plan --preset deepseek-v3 --ranks 99999999999 --tokens 1", "whole number");
  expect_refused("plan --preset deepseek-v3 --ranks 8 --tokens 9 --cap 8", "9 tokens");
  expect_refused("plan --preset deepseek-v3 --ranks 8 --tokens 1 --wire fp4", "nvfp4");
  expect_refused("plan --preset deepseek-v3 --ranks 8 --tokens 1 --machine h100", "h200");
  expect_refused("plan --preset deepseek-v4-pro --ranks 8 --tokens 1", "--weights");
  expect_refused("plan --hidden 4096 --experts 8 --topk 2 --ranks 2 --tokens 1", "--intermediate");
}

TEST_F(PlanCommand, HelpVersionAndListsSucceed) {
  for (const char* arguments : {"--help", "--version", "plan --help", "plan --list", "plan --articles"}) {
    const Ran ran = run(arguments);
    EXPECT_EQ(0, ran.status) << arguments;
    EXPECT_FALSE(ran.text.empty()) << arguments;
    EXPECT_EQ("", errors_of(arguments).text) << arguments;
  }
}

TEST_F(PlanCommand, WritesTheNumbersAsJson) {
  const fs::path file = folder_ / "plan.json";
  ASSERT_EQ(0, errors_of(good_ + " --json " + file.string()).status);
  const auto json = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ("deepseek-v4-flash", json.at("request").at("preset"));
  EXPECT_EQ(1024, json.at("request").at("cap"));
  EXPECT_EQ(8, json.at("copies").at("every_rank").at("value"));
  EXPECT_NEAR(4.44, json.at("copies").at("needed_ranks").at("value").get<double>(), 0.005);
  EXPECT_EQ(4096 * 4128, json.at("traffic").at("gather").at("dispatch").at("value"));
  EXPECT_EQ("bytes", json.at("traffic").at("gather").at("dispatch").at("unit"));
  EXPECT_EQ(1, std::distance(fs::directory_iterator(folder_), fs::directory_iterator())) << "nothing else is left";
}

TEST_F(PlanCommand, LeavesAFileAloneWhenItCannotWrite) {
  const fs::path directory = folder_ / "taken";
  fs::create_directory(directory);
  expect_refused(good_ + " --json " + directory.string(), "taken");
  expect_refused(good_ + " --json " + (folder_ / "missing" / "plan.json").string(), "No such file");
  expect_refused(good_ + " --json " + (folder_ / "plan.json").string() + " --tokens 2000", "--tokens");
  EXPECT_EQ(1, std::distance(fs::directory_iterator(folder_), fs::directory_iterator())) << "nothing appeared";
}

// A device or a pipe is written, never replaced by a file. The test's own pipe stands for both:
// a mistake here must not reach a device of the machine.
TEST_F(PlanCommand, DoesNotReplaceAPipe) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(0, ::mkfifo(pipe.c_str(), 0600));
  const Ran ran = run(good_ + " --json " + pipe.string() + " >/dev/null & cat " + pipe.string());
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_NO_THROW(EXPECT_EQ(8, nlohmann::json::parse(ran.text).at("request").at("ranks")));
}

TEST_F(PlanCommand, SaysWhenItsOutputIsLost) {
  if (!fs::is_character_file("/dev/full")) {
    GTEST_SKIP() << "/dev/full is not a device here";
  }
  for (const std::string& arguments :
       {std::string("--version"), std::string("plan --list"), good_}) {  // less and more than a block
    const Ran ran = run(arguments + " 2>&1 >/dev/full");
    EXPECT_EQ(2, ran.status) << arguments;
    EXPECT_EQ(0u, ran.text.find("heddle: cannot write")) << ran.text;
    EXPECT_EQ(ran.text.size() - 1, ran.text.find('\n')) << "one line: " << ran.text;
  }
}

}  // namespace
}  // namespace heddle
