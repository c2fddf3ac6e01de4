// What the command does when something is wrong: one line, the right status, nothing half-written, no rank left behind.
#include <signal.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <chrono>
#include <thread>

#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class CommandFailures : public CommandTest {
 protected:
  std::string good(const std::string& out) const {
    return "run" + small_layer + " --ranks 2 --tokens 6 --way elastic --out " + file(out);
  }
};

TEST_F(CommandFailures, BadArgumentsEndInOneLine) {
  const std::string run_good = good("never");
  const auto without = [&](const std::string& part) {
    std::string left = run_good;
    const std::size_t at = left.find(part);
    EXPECT_NE(at, std::string::npos) << part;
    return left.erase(at, part.size());
  };
  expect_error(2, without(" --ranks 2"), "--ranks");
  expect_error(2, without(" --way elastic"), "--way");
  expect_error(2, without(" --out " + file("never")), "--out");
  expect_error(2, without(" --preset mixtral-8x7b"), "--preset");
  const auto also = [&](const std::string& more, const std::string& part) { expect_error(2, run_good + " " + more, part); };
  also("--layer nowhere", "either");
  also("--rank 2", "not expected: --rank 2; did you mean --ranks?");
  also("--teapot 2", "not expected: --teapot 2 (see heddle run --help)");
  expect_error(2, "bench", "see heddle bench --help");
  also("--cap 2", "3");
  also("--workers 0", "0 workers");
  also("--group 64", "128 or 32");
  also("--scale e5m2", "ue8m0");
  also("--wire fp4", "nvfp4");
  also("--combine-wire fp4", "nvfp4");
  also("--activation int8", "fp8");
  also("--weight-at home", "combine");
  also("--reduce twice", "home");
  also("--runner fast", "masked");
  also("--gather all", "zero_filled");
  also("--shared apart", "fused");
  also("--clamp 0", "--clamp");
  also("--clamp 1x", "--clamp");
  also("--deadline-ms 0", "--deadline-ms");
  also("--deadline-ms soon", "whole number");
  also("--engine tpu", "host or cuda");
  also("--batch nowhere.safetensors", "nowhere.safetensors");
  also("--trace nowhere.npy", "nowhere.npy");
  also("--weights fp2", "mxfp4");
  also("--topk 9", "9");
  also("--hidden-states wild", "gaussian");
  also("--shared-mxfp4", "no shared expert");
  also("--renormalise --no-renormalise", "renormalise");
  const auto instead = [&](const std::string& old, const std::string& now, const std::string& part) {
    std::string changed = run_good;
    changed.replace(changed.find(old), old.size(), now);
    expect_error(2, changed, part);
  };
  instead("--ranks 2", "--ranks 0", "1 to 1024");
  instead("--ranks 2", "--ranks 1025", "1 to 1024");
  instead("--tokens 6", "--tokens -1", "--tokens");
  instead("--hidden 128", "--hidden 100", "multiples of 64");
  instead("--way elastic", "--way gather --runner masked", "masked");
  instead("--way elastic", "--way normal --reduce home", "elastic");
  instead("mixtral-8x7b", "kimi-k3", "plan");
  instead("mixtral-8x7b", "nobody", "deepseek-v3");
}

TEST_F(CommandFailures, BatchesThatDoNotFitTheLayer) {
  const std::vector<std::uint16_t> hidden(4 * 128);
  const std::vector<float> weights(8, 0.5f);
  const auto batch = [&](const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& split) {
    testing::write_tensors(
        file("batch"),
        {testing::make_tensor("hidden_states", "BF16", {4, 128}, hidden), testing::make_tensor("topk_ids", "I32", {4, 2}, ids),
         testing::make_tensor("topk_weights", "F32", {4, 2}, weights),
         testing::make_tensor("tokens_per_rank", "I32", {static_cast<std::int64_t>(split.size())}, split)});
    return "run" + small_layer + " --ranks 2 --way normal --out " + file("o") + " --batch " + file("batch");
  };
  expect_done(batch({0, 1, 2, 3, 4, 5, 6, -1}, {4, 0}));
  fs::remove(file("o"));
  expect_error(2, batch({0, 1, 2, 3, 4, 5, 6, 8}, {2, 2}), "8");
  expect_error(2, batch({0, 1, 2, 2, 4, 5, 6, 7}, {2, 2}), "2");
  expect_error(2, batch({0, 1, 2, 3, 4, 5, 6, -2}, {2, 2}), "-2");
  expect_error(2, batch({0, 1, 2, 3, 4, 5, 6, 7}, {2, 1}), "tokens_per_rank");
  expect_error(2, batch({0, 1, 2, 3, 4, 5, 6, 7}, {2, 1, 1}), "--ranks");
  expect_error(2, batch({0, 1, 2, 3, 4, 5, 6, 7}, {3, 1}) + " --cap 2", "at least 3");
  expect_error(2, batch({0, 1, 2, 3, 4, 5, 6, 7}, {2, 2}) + " --tokens 4", "--tokens");
}

/// Only the rank of the damaged expert reads it; the others must not wait for that rank's deadline, which ctest would not survive.
TEST_F(CommandFailures, ADamagedExpertIsFoundBeforeRanksStart) {
  testing::LayerFileSpec spec;
  spec.shape = {128, 64, 4, 2, std::nullopt};
  spec.kind = WeightKind::mxfp4;
  spec.naming = testing::Naming::deepseek_v4;
  testing::LayerTensors tensors = testing::make_layer(spec);
  const testing::LayerFile whole = testing::write_layer(spec, tensors);
  const auto scales = std::find_if(tensors.tensors.begin(), tensors.tensors.end(),
                                   [](const auto& tensor) { return tensor.name.ends_with("experts.3.w2.scale"); });
  ASSERT_NE(scales, tensors.tensors.end());
  scales->data[5] = std::byte{0xFF};
  const testing::LayerFile damaged = testing::write_layer(spec, tensors);
  const std::string how = " --ranks 4 --tokens 8 --topk 2 --routing uniform --way gather --deadline-ms 100000000";
  expect_done("run --layer " + whole.path + how + " --out " + file("o"));
  fs::remove(file("o"));
  const std::string arguments = " --layer " + damaged.path + how;
  expect_error(2, "run" + arguments + " --out " + file("o"), "experts.3.w2");
  expect_error(2, "run --processes" + arguments + " --out " + file("o"), "experts.3.w2");
}

TEST_F(CommandFailures, NothingAppearsWhereItCannotBeWritten) {
  expect_error(2, good("missing/o"), "No such file");
  fs::create_directory(file("taken"));
  expect_error(2, good("taken"), "taken");
  expect_error(2, good("o") + " --json " + file("missing/j"), "missing/j");  // no output without its report
  expect_error(2, good("o") + " --save-inputs /dev/null/x", "--save-inputs");
  expect_error(2, "verify" + small_layer + " --ranks 2 --tokens 6 --way elastic --json " + file("missing/j"), "missing/j");
}

// The test's own pipe and node: a mistake here must not reach a device of the machine.
TEST_F(CommandFailures, DevicesAndPipesStayWhatTheyAre) {
  ASSERT_EQ(0, ::mkfifo(file("pipe").c_str(), 0600));
  std::thread reader([&] { EXPECT_GT(text_of(file("pipe")).size(), 6u * 128u * 2u); });
  expect_done(good("pipe"));
  reader.join();
  EXPECT_TRUE(fs::is_fifo(file("pipe")));
  if (::mknod(file("full").c_str(), S_IFCHR | 0600, makedev(1, 7)) != 0 || !std::ofstream(file("full")).is_open()) {
    GTEST_SKIP() << "no device can be made or opened here";
  }
  expect_error(2, good("full"), "No space left");
  expect_error(2, good("o") + " --json " + file("full"), "No space left");
  EXPECT_TRUE(fs::is_character_file(file("full")));
}

TEST_F(CommandFailures, SizesBeyondMemory) {
  expect_error(2, "run" + small_layer + " --ranks 2 --tokens 2147483647 --way gather --out " + file("never"), "memory");
  expect_error(2, "run" + small_layer + " --ranks 3 --tokens 6 --way gather --cap 300000000 --out " + file("never"), "no memory");
  expect_error(2, "run" + small_layer + " --ranks 3 --tokens 6 --way gather --cap 2000000000 --out " + file("never"), "32 bits");
}

/// Refused at once, not when the machine has no page left.
TEST_F(CommandFailures, WeightsBeyondMemory) {
  const std::string how = "run --preset mixtral-8x7b --ranks 2 --tokens 6 --way gather --out " + file("never");
  expect_error(2, how + " --hidden 128 --intermediate 64 --experts 2147483647", "--experts");
  expect_error(2, how + " --hidden 128 --intermediate 2147483584", "--intermediate");
  expect_error(2, how + " --hidden 2147483584 --intermediate 2147483584", "--hidden");
}

TEST_F(CommandFailures, OptionsThatCannotApply) {
  const std::string saved = file("saved");
  expect_done("verify" + small_layer + " --ranks 2 --tokens 4 --way gather --save-inputs " + saved);
  const std::string files = "verify --layer " + saved + " --batch " + saved + "/batch.safetensors --ranks 2 ";
  expect_done(files + "--topk 2");
  expect_error(2, files + "--topk 3", "2 choices");
  for (const std::string option : {"--hidden 64", "--intermediate 64", "--experts 4", "--weights bf16"}) {
    expect_error(2, files + option, "--preset");
  }
  for (const std::string option : {"--trace-layer 1", "--trace-step 1", "--trace-expand 4"}) {
    expect_error(2, files + option, "--trace");
  }
  expect_error(2, files + "--hidden-states gaussian", "--batch");
  expect_error(2, files + "--way gather --deepep-mode fast", "low_latency");
}

TEST_F(CommandFailures, NumbersAreReadWhole) {
  for (const char* seed : {"-1", "18446744073709551616", "0x10", "''"}) expect_error(2, good("o") + " --seed " + seed, "--seed");
  for (const char* scale : {"nan", "inf", "''", "1x"}) expect_error(2, good("o") + " --route-scale " + scale, "--route-scale");
  expect_error(2, good("o") + " --routing hot:0.5", "hot:RANK");
}

TEST_F(CommandFailures, LimitsOfTheShell) {
  expect_error_of_script(2, "ulimit -f 8; \"$heddle\" " + good("o") + " --cap 3000", "File too large");
}

// ---- ranks that fail ---------------------------------------------------------------------------------

/// A process's line in /proc; empty where it has gone, or goes while its line is read.
std::string stat_of(const std::string& process) {
  try {
    return text_of("/proc/" + process + "/stat");
  } catch (const std::ios_base::failure&) {
    return "";
  }
}

/// Processes whose parent is `parent` and that are no zombies.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string stat = stat_of(name);  // pid (name) state parent ...
    const std::size_t end = stat.rfind(')');
    if (end == std::string::npos || stat.size() < end + 5 || stat[end + 2] == 'Z') continue;
    if (std::strtol(stat.c_str() + end + 4, nullptr, 10) == parent) children.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return children;
}

bool is_running(pid_t process) {
  const std::string stat = stat_of(std::to_string(process));
  const std::size_t end = stat.rfind(')');
  return end != std::string::npos && stat[end + 2] != 'Z';
}

/// Starts a run of three processes with some seconds of work, waits for all of them and hands them over.
class RanksAsProcesses : public CommandTest {
 protected:
  void SetUp() override {
    CommandTest::SetUp();
    if (IsSkipped()) return;
    const std::string arguments =
        " run --preset mixtral-8x7b --weights nvfp4 --hidden 1024 --intermediate 1024 --tokens 6000 --ranks 3 --way low_latency"
        " --processes --deadline-ms 1000 --out " +
        file("o");
    parent_ = ::fork();
    if (parent_ == 0) {
      const std::string command = "exec '" + command_ + "'" + arguments + " >/dev/null 2>'" + file("err") + "'";
      ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      ::_exit(127);
    }
    while (children_.size() < 3 && is_running(parent_)) children_ = children_of(parent_);
    ASSERT_EQ(children_.size(), 3u) << text_of(file("err"));
  }
  void TearDown() override {
    if (parent_ > 0) ::kill(parent_, SIGKILL);
  }

  int wait() {
    int status = 0;
    ::waitpid(parent_, &status, 0);
    parent_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  void expect_fault() {
    EXPECT_EQ(wait(), 3);
    const std::string err = text_of(file("err"));
    EXPECT_EQ(err.size() - 1, err.find('\n')) << "one line: " << err;
    for (const char* part : {"heddle: rank ", "waited for", "expected", "saw"}) EXPECT_NE(std::string::npos, err.find(part)) << err;
    EXPECT_FALSE(fs::exists(file("o")));
    for (const pid_t child : children_) EXPECT_FALSE(is_running(child));
  }

  pid_t parent_ = 0;
  std::vector<pid_t> children_;
};

TEST_F(RanksAsProcesses, AKilledRankIsAFaultThatNamesTheSignal) {
  ASSERT_EQ(0, ::kill(children_[1], SIGKILL));
  expect_fault();
  EXPECT_NE(std::string::npos, text_of(file("err")).find("signal 9")) << text_of(file("err"));
}

TEST_F(RanksAsProcesses, AStoppedRankIsAFaultAndIsEnded) {
  ASSERT_EQ(0, ::kill(children_[2], SIGSTOP));
  expect_fault();
}

TEST_F(RanksAsProcesses, GoWithTheCommand) {
  ASSERT_EQ(0, ::kill(parent_, SIGKILL));
  EXPECT_EQ(wait(), -SIGKILL);
  for (const pid_t child : children_) {
    while (is_running(child)) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // ctest ends what never ends
  }
  EXPECT_FALSE(fs::exists(file("o")));
}

}  // namespace
}  // namespace heddle::command_test
