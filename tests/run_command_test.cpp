// `heddle run` and `heddle verify` from outside: arguments that contradict each other or the files, and runs at the edges.
#include <gtest/gtest.h>

#include <string>

#include "command_fixture.hpp"

namespace heddle {
namespace {

class RunCommand : public Command {
 protected:
  std::string small(const std::string& more) const {
    return "verify --preset deepseek-v4-flash --hidden 64 --intermediate 64 --experts 4 --topk 2 --seed 1 " + more;
  }
  void expect_passes(const std::string& arguments) const {
    const Ran ran = run(arguments + " 2>&1");
    EXPECT_EQ(0, ran.status) << arguments << ": " << ran.text;
  }
};

TEST_F(RunCommand, OptionsThatCannotApplyAreRefused) {
  const std::string saved = folder_.string() + "/saved";
  expect_passes(small("--ranks 2 --tokens 4 --way gather --save-inputs " + saved));
  const std::string files = "verify --layer " + saved + " --batch " + saved + "/batch.safetensors --ranks 2 ";
  expect_passes(files + "--topk 2");
  expect_refused(files + "--topk 3", "2 choices");
  expect_refused(files + "--tokens 4", "--batch");
  for (const std::string option : {"--hidden 64", "--intermediate 64", "--experts 4", "--weights bf16"})
    expect_refused(files + option, "--preset");
  for (const std::string option : {"--trace-layer 1", "--trace-step 1", "--trace-expand 4"})
    expect_refused(files + option, "--trace");
  expect_refused(files + "--hidden-states gaussian", "--batch");
}

TEST_F(RunCommand, NumbersAndWordsAreReadWhole) {
  for (const char* seed : {"-1", "18446744073709551616", "0x10", "''"}) expect_refused(small("--ranks 1 --seed ") + seed, "--seed");
  for (const char* scale : {"nan", "inf", "''", "1x"}) expect_refused(small("--ranks 1 --route-scale ") + scale, "--route-scale");
  expect_refused(small("--ranks 1 --routing hot:0.5"), "hot:RANK");
  expect_refused(small("--ranks 1 --way gather --deepep-mode fast"), "low_latency");
  expect_refused(small("--ranks 2 --cap 2147483647"), "2147483647");
}

/// What a limit of the shell forbids is an error too, and nothing is left.
TEST_F(RunCommand, LimitsOfTheShellEndInOneLine) {
  const std::string layer = " --preset deepseek-v4-flash --hidden 64 --intermediate 64 --experts 4 --topk 2 --seed 1 --ranks 2";
  const std::string out = folder_.string() + "/out.safetensors";
  const Ran ran = errors_of("run" + layer + " --way gather --tokens 3000 --out " + out, "ulimit -f 8; ");
  EXPECT_EQ(2, ran.status) << ran.text;
  EXPECT_EQ(ran.text.size() - 1, ran.text.find('\n')) << ran.text;
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(RunCommand, AKilledProcessIsNamedWithItsSignal) {
  const std::string out = folder_.string() + "/out.safetensors";
  const std::string slow =
      "run --preset deepseek-v4-flash --hidden 512 --intermediate 512 --experts 8 --topk 4 --seed 1 --tokens 6000";
  const std::string killer =
      " & command=$!; children=/proc/$command/task/$command/children; first=; "
      "while kill -0 $command && [ -z \"$first\" ]; do read first others < $children; done 2>/dev/null; kill -9 $first; wait "
      "$command";
  const Ran ran = run(slow + " --ranks 3 --processes --deadline-ms 2000 --way normal --out " + out + " 2>&1 >/dev/null" + killer);
  EXPECT_EQ(3, ran.status) << ran.text;
  EXPECT_EQ(0u, ran.text.find("heddle: ")) << ran.text;
  EXPECT_EQ(ran.text.size() - 1, ran.text.find('\n')) << ran.text;
  EXPECT_NE(std::string::npos, ran.text.find("signal 9")) << ran.text;
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(RunCommand, NobodyHasTokens) {
  expect_passes(small("--ranks 3 --tokens 0"));
  expect_passes(small("--ranks 3 --tokens 0 --tensor-parallel --deadline-ms 5000"));
  expect_passes(small("--ranks 3 --tokens 0 --tensor-parallel --deadline-ms 5000 --processes"));
}

}  // namespace
}  // namespace heddle
