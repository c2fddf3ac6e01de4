// The explorer itself: what its memory lets be seen, and that its reduction loses no outcome.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "explorer/litmus.hpp"
#include "explorer/search.hpp"

namespace heddle::explorer {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::uint64_t no_limit = 1000000;

Options late_writes() {
  Options options;
  options.races = false;
  return options;
}

/// All outcomes of a program, by brute force.
std::set<std::string> outcomes(const std::vector<Litmus::Program>& programs, const Options& options = {}) {
  Litmus litmus(programs);
  const Report report = explore_bounded(litmus, -1, no_limit, options);
  EXPECT_TRUE(report.complete) << report.line();
  return litmus.outcomes;
}

TEST(ExplorerModel, AnAcquireSeesWhatWasPublished) {
  const std::vector<Litmus::Program> programs = {[](LitmusRank& r) { r.write(0, 7), r.publish(0, 1); },
                                                 [](LitmusRank& r) { r.wait(0), r.read(0); }};
  EXPECT_THAT(outcomes(programs), ElementsAre("[][1 7 ]"));
  EXPECT_THAT(outcomes(programs, late_writes()), ElementsAre("[][1 7 ]"));
}

TEST(ExplorerModel, UnpublishedWritesAreSeenLateOrNotAtAll) {
  const std::vector<Litmus::Program> programs = {[](LitmusRank& r) { r.publish(0, 1), r.write(0, 7); },
                                                 [](LitmusRank& r) { r.wait(0), r.read(0); }};
  EXPECT_THAT(outcomes(programs, late_writes()), ElementsAre("[][1 0 ]", "[][1 7 ]"));
  Litmus litmus(programs);
  const Report report = explore_all(litmus, no_limit);
  ASSERT_TRUE(report.violation);
  EXPECT_THAT(report.violation->what, HasSubstr("race: rank 1 reads"));
}

TEST(ExplorerModel, AWriteMayNotPassAReaderThatWasNotHeard) {
  Litmus litmus(
      {[](LitmusRank& r) { r.write(0, 1), r.publish(0, 1), r.write(0, 2); }, [](LitmusRank& r) { r.wait(0), r.read(0); }});
  const Report report = explore_random(litmus, 1, 100);
  ASSERT_TRUE(report.violation);
  EXPECT_THAT(report.violation->what, HasSubstr("race"));
}

TEST(ExplorerModel, TwoRanksMayBothMissEachOthersWord) {
  const std::vector<Litmus::Program> programs = {[](LitmusRank& r) { r.publish(0, 1), r.peek(1); },
                                                 [](LitmusRank& r) { r.publish(1, 1), r.peek(0); }};
  EXPECT_THAT(outcomes(programs), ElementsAre("[0 ][0 ]", "[0 ][1 ]", "[1 ][0 ]", "[1 ][1 ]"));
  Options prompt;
  prompt.late_words = false;
  EXPECT_THAT(outcomes(programs, prompt), ElementsAre("[0 ][1 ]", "[1 ][0 ]", "[1 ][1 ]"));
}

TEST(ExplorerModel, AWordNeverGoesBack) {
  const std::vector<Litmus::Program> programs = {[](LitmusRank& r) { r.publish(0, 1), r.publish(0, 2); },
                                                 [](LitmusRank& r) { r.peek(0), r.peek(0); }};
  EXPECT_THAT(outcomes(programs), ElementsAre("[][0 0 ]", "[][0 1 ]", "[][0 2 ]", "[][1 1 ]", "[][1 2 ]", "[][2 2 ]"));
}

TEST(ExplorerModel, AWordPassesOnWhatItsPublisherHadSeen) {
  const std::vector<Litmus::Program> programs = {[](LitmusRank& r) { r.write(0, 7), r.publish(0, 1); },
                                                 [](LitmusRank& r) { r.wait(0), r.publish(1, 1); },
                                                 [](LitmusRank& r) { r.wait(1), r.read(0); }};
  EXPECT_THAT(outcomes(programs, late_writes()), ElementsAre("[][1 ][1 7 ]"));
}

TEST(ExplorerModel, CopiesAreUnderWayUntilCompleted) {
  static const std::uint32_t source = 7;
  const auto copy = [](LitmusRank& r) { return r.w.copy_bytes(r.cell_at(0), &source, sizeof source); };
  const Litmus::Program reader = [](LitmusRank& r) { r.wait(0), r.read(0); };
  const std::vector<Litmus::Program> done = {[&](LitmusRank& r) { r.w.complete(copy(r)), r.publish(0, 1); }, reader};
  const std::vector<Litmus::Program> under_way = {[&](LitmusRank& r) { copy(r), r.publish(0, 1), r.w.complete_all(); }, reader};
  EXPECT_THAT(outcomes(done, late_writes()), ElementsAre("[][1 7 ]"));
  EXPECT_THAT(outcomes(under_way, late_writes()), ElementsAre("[][1 0 ]", "[][1 7 ]"));
}

TEST(ExplorerModel, TheSourceOfACopyMustStay) {
  const RowFormat format{Wire::bf16, 8, {}, 1.0f};
  Litmus litmus({[&](LitmusRank& r) {
    std::vector<std::byte> row(format.row_bytes());
    r.w.copy_row(reinterpret_cast<std::byte*>(r.cell_at(0)), row.data(), format);
    row[3] = std::byte{1};
    r.w.complete_all();
  }});
  const Report report = explore_all(litmus, no_limit);
  ASSERT_TRUE(report.violation);
  EXPECT_THAT(report.violation->what, HasSubstr("changed the source"));
}

TEST(ExplorerModel, AnAddressBesideTheHeapIsRefused) {
  Litmus litmus({[](LitmusRank& r) { r.write(-1000000, 1); }});
  const Report report = explore_all(litmus, no_limit);
  ASSERT_TRUE(report.violation);
  EXPECT_THAT(report.violation->what, HasSubstr("outside of every part"));
}

TEST(ExplorerModel, AWordIsNotPlainMemory) {
  Litmus litmus({[](LitmusRank& r) { r.publish(0, 1), r.w.read(reinterpret_cast<std::uint32_t*>(r.word_at(0))); }});
  const Report report = explore_all(litmus, no_limit);
  ASSERT_TRUE(report.violation);
  EXPECT_THAT(report.violation->what, HasSubstr("as plain memory"));
}

TEST(ExplorerModel, TheBarrierOfATeamOrdersItsWrites) {
  const auto program = [](bool meet) {
    return std::vector<Litmus::Program>{[=](LitmusRank& r) { r.write(0, 7), meet&& r.w.team_barrier(); },
                                        [=](LitmusRank& r) { (meet && r.w.team_barrier()), r.read(0); }};
  };
  for (const bool meet : {true, false}) {
    Litmus litmus(program(meet), 2);
    EXPECT_TRUE(explore_bounded(litmus, -1, no_limit, late_writes()).complete);
    EXPECT_EQ(litmus.outcomes.size(), meet ? 1u : 2u);
    EXPECT_EQ(explore_all(litmus, no_limit).violation.has_value(), !meet);
  }
}

TEST(ExplorerModel, ADeadlockNamesTheWords) {
  Litmus litmus({[](LitmusRank& r) { r.wait(0), r.publish(1, 1); }, [](LitmusRank& r) { r.wait(1), r.publish(0, 1); }});
  const Report report = explore_all(litmus, no_limit);
  ASSERT_TRUE(report.violation);
  EXPECT_THAT(report.violation->what, HasSubstr("deadlock: rank 0 in acquire for epoch 1 value 0, its word holds nothing"));
}

TEST(ExplorerModel, ASleeperMissesNoRing) {
  const auto poll = [](LitmusRank& r) {
    auto patience = r.w.look();
    while (r.peek(0) < 2) r.w.rest(patience, {}, 0, 0);
  };
  const std::vector<Litmus::Program> programs = {poll, [](LitmusRank& r) { r.publish(0, 1), r.publish(1, 1), r.publish(0, 2); }};
  Litmus reduced(programs);
  const Report report = explore_all(reduced, no_limit);
  EXPECT_TRUE(report.complete) << report.line();
  EXPECT_EQ(reduced.outcomes, outcomes(programs));
}

/// A few random verbs on two words, two cells and a word that is waited for. Ranks wait only for lower ones.
Litmus::Program random_program(int rank, std::mt19937& random) {
  std::vector<std::pair<int, int>> verbs;
  for (int i = 0; i < 3; ++i) verbs.emplace_back(random() % 7, random() % 2);
  return [=](LitmusRank& r) {
    std::uint32_t value = static_cast<std::uint32_t>(rank) * 10;
    for (const auto& [verb, which] : verbs) {
      ++value;
      if (verb == 0) r.publish(which, value);
      if (verb == 1 || verb == 2) r.peek(which);
      if (verb == 3) r.write(which, value);
      if (verb == 4) r.read(which);
      if (verb == 5) r.note(r.w.look().rung == 0 ? 0 : 1);
      if (verb == 6 && rank > 0) r.wait(1 + rank);
    }
    r.publish(2 + rank, 1);
  };
}

TEST(ExplorerModel, TheReductionLosesNoOutcome) {
  const unsigned seed = 7;
  std::mt19937 random(seed);
  std::uint64_t reduced_runs = 0;
  std::uint64_t all_runs = 0;
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<Litmus::Program> programs;
    for (int rank = 0; rank < 3; ++rank) programs.push_back(random_program(rank, random));
    for (const bool late_words : {true, false}) {
      Options options = late_writes();
      options.late_words = late_words;
      Litmus reduced(programs);
      Litmus all(programs);
      const Report few = explore_all(reduced, no_limit, options);
      const Report many = explore_bounded(all, -1, no_limit, options);
      ASSERT_TRUE(few.complete && many.complete) << few.line() << many.line();
      ASSERT_EQ(reduced.outcomes, all.outcomes) << "seed " << seed << " trial " << trial;
      reduced_runs += few.schedules;
      all_runs += many.schedules;
    }
  }
  fmt::print("{} schedules instead of {} gave the same outcomes\n", reduced_runs, all_runs);
  EXPECT_LT(reduced_runs, all_runs / 10);
}

TEST(ExplorerModel, AScheduleThatDoesNotFitIsRefused) {
  Litmus litmus({[](LitmusRank& r) { r.publish(0, 1); }, [](LitmusRank& r) { r.wait(0); }});
  EXPECT_THROW(replay(litmus, "1,0"), std::invalid_argument);
  EXPECT_THROW(replay(litmus, "0;1"), std::invalid_argument);
  EXPECT_FALSE(replay(litmus, "0,1").violation);
}

}  // namespace
}  // namespace heddle::explorer
