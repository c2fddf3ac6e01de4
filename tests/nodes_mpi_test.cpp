// Groups over nodes by MPI, started by mpirun: nodes that are named on one machine, and nodes in network namespaces joined by
// virtual links (tests/mpi/namespaces.sh), of which one is killed or cut off. Skipped, with the reason, where that cannot be done.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <sstream>
#include <string>

#include "folder.hpp"

namespace heddle {
namespace {

#if defined(HEDDLE_NODES_PROGRAM) && !defined(HEDDLE_SANITIZED)
constexpr const char* program = HEDDLE_NODES_PROGRAM;
constexpr const char* recovery_program = HEDDLE_RECOVERY_PROGRAM;
constexpr const char* mpirun = HEDDLE_MPIRUN;
constexpr const char* missing = "";
#else
constexpr const char* program = "";
constexpr const char* recovery_program = "";
constexpr const char* mpirun = "";
#ifdef HEDDLE_SANITIZED
constexpr const char* missing = "MPI itself does not pass the sanitizers";
#else
constexpr const char* missing = "MPI was not found when this was built";
#endif
#endif

struct Ran {
  int status = -1;
  std::string out;
};

Ran shell(const std::string& command) {
  Ran ran;
  // Continuous integration runs as root, which Open MPI wants to be told twice.
  const std::string as_root = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; ";
  FILE* pipe = popen((as_root + command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return ran;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;) ran.out.append(part.data(), n);
  const int status = pclose(pipe);
  ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return ran;
}

std::string seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  std::string text = given != nullptr ? given : std::to_string(std::random_device{}());
  std::printf("HEDDLE_SEED=%s\n", text.c_str());
  return text;
}

int times(const std::string& text, const std::string& what) {
  int found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

class MpiNodes : public testing::Test {
 protected:
  void SetUp() override {
    if (*missing != 0) GTEST_SKIP() << missing;
    if (shell(std::string(mpirun) + " --version").out.find("open-mpi.org") == std::string::npos)
      GTEST_SKIP() << "mpirun is not Open MPI's, whose options these tests know";
  }
};

class Namespaces : public MpiNodes {
 protected:
  void SetUp() override {
    MpiNodes::SetUp();
    if (IsSkipped()) return;
    const Ran probe = shell(script_ + " probe");
    if (probe.status == 77) GTEST_SKIP() << probe.out;
    ASSERT_EQ(0, probe.status) << probe.out;
  }
  Ran run(int nodes, int ranks, const std::string& event, const std::string& arguments,
          const std::string& started = program) const {
    return shell(script_ + " run " + std::to_string(nodes) + " " + mpirun + " " + std::to_string(ranks) + " " + event + " " +
                 started + " " + arguments);
  }
  /// What the ranks wrote, a text each.
  static std::map<int, std::string> by_rank(const std::string& out) {
    std::map<int, std::string> texts;
    std::istringstream lines(out);
    for (std::string line; std::getline(lines, line);) {
      int rank = 0;
      if (std::sscanf(line.c_str(), "rank %d:", &rank) == 1) texts[rank] += line.substr(line.find(':') + 1) + "\n";
    }
    return texts;
  }
  const std::string script_ = (std::filesystem::path(HEDDLE_TEST_DATA).parent_path() / "mpi/namespaces.sh").string();
};

TEST_F(MpiNodes, NodesThatAreNamedOnOneMachineGiveTheBitsOfOne) {
  for (const char* nodes : {"1", "2", "4"}) {
    const Ran ran = shell(std::string("HEDDLE_NODES=") + nodes + " " + mpirun + " --oversubscribe --bind-to none -n 4 " + program +
                          " " + seed() + " 12 3 60000");
    EXPECT_EQ(0, ran.status) << ran.out;
    EXPECT_EQ(4, times(ran.out, std::string("of 4 on ") + nodes + " nodes: 0 different values")) << ran.out;
  }
}

TEST_F(MpiNodes, NodesThatDoNotDivideTheRanksAreRefused) {
  const Ran ran = shell(std::string("HEDDLE_NODES=3 ") + mpirun + " --oversubscribe -n 4 " + program + " 1 1 1 20000");
  EXPECT_NE(ran.out.find("3 nodes do not divide 4 ranks"), std::string::npos) << ran.out;
}

TEST_F(Namespaces, GiveTheBitsOfOneMachine) {
  for (const auto& [nodes, ranks] : {std::pair{2, 2}, std::pair{3, 1}}) {
    const Ran ran = run(nodes, ranks, "none", seed() + " 12 3 60000");
    const auto texts = by_rank(ran.out);
    EXPECT_EQ(nodes * ranks, static_cast<int>(texts.size())) << ran.out;
    for (const auto& [rank, text] : texts) {
      EXPECT_NE(text.find(" on " + std::to_string(nodes) + " nodes: 0 different values"), std::string::npos) << text;
      EXPECT_NE(text.find("status 0"), std::string::npos) << text;
    }
  }
}

/// Every rank that is left says which rank of the lost node it waited for, in which phase, and ends as after any fault.
void expect_named(const std::map<int, std::string>& texts, int first, int count, const std::string& lost_node) {
  for (int rank = first; rank < first + count; ++rank) {
    ASSERT_EQ(1u, texts.count(rank));
    const std::string& text = texts.at(rank);
    EXPECT_NE(text.find("gave up in elastic "), std::string::npos) << text;
    const int lost = lost_node == "1" ? 2 : 0;
    const bool named = text.find("message of node " + lost_node) != std::string::npos ||
                       text.find("from rank " + std::to_string(lost)) != std::string::npos ||
                       text.find("from rank " + std::to_string(lost + 1)) != std::string::npos;
    EXPECT_TRUE(named) << text;
    EXPECT_NE(text.find("status 3"), std::string::npos) << text;
  }
}

TEST_F(Namespaces, ANodeThatIsKilledIsNamed) {
  const Ran ran = run(2, 2, "kill", seed() + " 1 1000000 1500 1");
  SCOPED_TRACE(ran.out);
  expect_named(by_rank(ran.out), 0, 2, "1");
}

TEST_F(Namespaces, ANodeThatStopsIsNamed) {
  const Ran ran = run(2, 2, "stop", seed() + " 1 1000000 1500 1");
  SCOPED_TRACE(ran.out);
  expect_named(by_rank(ran.out), 0, 2, "1");
}

TEST_F(Namespaces, ALinkThatIsCutEndsBothSides) {
  const Ran ran = run(2, 2, "cut", seed() + " 1 1000000 1500 1");
  SCOPED_TRACE(ran.out);
  expect_named(by_rank(ran.out), 0, 2, "1");
  expect_named(by_rank(ran.out), 2, 2, "0");
}

// Under recovery: who is left goes on with the bits of a group that never had the last node, and all have the same mask.
TEST_F(Namespaces, UnderRecoveryWhoIsLeftGoesOn) {
  std::mt19937_64 random(std::stoull(seed()));
  for (const char* event : {"kill", "stop", "cut"}) {
    for (const char* mode : {"direct", "hybrid"}) {
      const TempFolder folder;
      const std::string after = "0." + std::to_string(100 + random() % 300);  // seconds, into the steps
      setenv("HEDDLE_EVENT_AFTER", after.c_str(), 1);
      const Ran ran = run(3, 2, event, folder.file("store") + " " + mode + " 1500", recovery_program);
      unsetenv("HEDDLE_EVENT_AFTER");
      SCOPED_TRACE(std::string(event) + " after " + after + " s, " + mode + "\n" + ran.out);
      auto texts = by_rank(ran.out);
      for (int rank = 0; rank < 4; ++rank) {
        EXPECT_NE(texts[rank].find("mask 111100: 0 different values in "), std::string::npos) << texts[rank];
        EXPECT_NE(texts[rank].find("status 0"), std::string::npos) << texts[rank];
      }
      if (std::string(event) != "cut") continue;
      for (int rank = 4; rank < 6; ++rank) {
        EXPECT_NE(texts[rank].find("is out"), std::string::npos) << texts[rank];
        EXPECT_NE(texts[rank].find("status 3"), std::string::npos) << texts[rank];
      }
    }
  }
}

}  // namespace
}  // namespace heddle
