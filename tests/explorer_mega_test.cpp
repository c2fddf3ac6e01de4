// The fused layer's protocol under the schedule explorer: who claims what, whose rows come when, rings that wrap; and planted
// mistakes that it must find.
//
// HEDDLE_REPLAY=mega/problem/mode/schedule runs one schedule that a failure has printed (docs/explorer.md).
#include <cstdlib>

#include "explorer/trips/mega.hpp"
#include "explorer/ways.hpp"

namespace heddle::explorer {
namespace {

/// ranks, workers with tasks, experts, top-k, tokens a call and rank.
MegaProblem problem(int ranks, int workers, int experts, int topk, std::vector<std::vector<int>> tokens) {
  MegaProblem made;
  made.batches.ranks = ranks;
  made.batches.workers = workers;
  made.batches.experts = experts;
  made.batches.topk = topk;
  made.batches.tokens = std::move(tokens);
  return made;
}

std::vector<MegaProblem> mega_problems() {
  std::vector<MegaProblem> all{
      problem(2, 1, 2, 1, {{1, 1}, {1, 1}}),
      problem(2, 1, 1, 1, {{3, 2}, {1, 3}}),          // one expert, a ring that wraps
      problem(1, 2, 2, 2, {{3}, {2}}),                // two that claim
      problem(2, 2, 4, 2, {{2, 2}, {2, 0}}),          // blocks of two rows
      problem(2, 2, 2, 2, {{3, 2}, {0, 0}, {1, 3}}),  // two that dispatch, a shared expert, a call without tokens
      problem(3, 1, 2, 2, {{1, 2, 1}, {0, 0, 2}}),    // a rank without experts
      problem(3, 1, 3, 2, {{2, 0, 2}, {1, 0, 2}}),    // rank 1 is dead
      problem(2, 2, 2, 1, {{2, 1}}),                  // several steps, several parts of a row
      problem(2, 3, 2, 2, {{4, 4}, {4, 3}, {2, 4}}),  // many blocks through the smallest ring
      problem(2, 1, 2, 2, {{2, 1}, {1, 2}, {2, 2}}),  // two layers in turn
      problem(3, 2, 3, 2, {{2, 1, 0}, {1, 2, 2}, {2, 0, 1}}),
      problem(2, 2, 2, 1, {{2, 1}, {1, 3}}),        // an extra expert of every rank
      problem(3, 1, 2, 2, {{1, 2, 1}, {0, 0, 2}}),  // the same where a rank has no other one
      problem(2, 2, 4, 2, {{2, 2}, {2, 1}}),        // results are added where they arrive
      problem(3, 1, 3, 2, {{2, 1, 0}, {1, 0, 2}}),  // the same with two that dispatch, a shared expert, two layers in turn
  };
  all[3].block_rows = 2;
  all[4].dispatchers = 2;
  all[4].shared = true;
  all[6].batches.live = {true, false, true};
  all[7].batches.hidden = 260;
  all[7].shared = true;
  all[8].dispatchers = 2;
  for (const std::size_t i : {std::size_t{9}, std::size_t{10}}) all[i].alternates = all[i].shared = true;
  for (const std::size_t i : {std::size_t{11}, std::size_t{12}}) all[i].extra = true;
  for (const std::size_t i : {std::size_t{13}, std::size_t{14}}) all[i].adds = true;
  all[14].dispatchers = 2;
  all[14].alternates = all[14].shared = true;
  for (std::size_t i = 0; i < all.size(); ++i) all[i].batches.routing = static_cast<int>(i);
  return all;
}

std::string replay_name(std::size_t problem, const char* mode) { return fmt::format("mega/{}/{}", problem, mode); }

TEST(ExplorerMega, RandomSchedules) {
  constexpr std::uint64_t seed = 20240605;
  const auto all = mega_problems();
  for (std::size_t i = 0; i < all.size(); ++i) {
    MegaCalls<> scenario(all[i]);
    fmt::print("{}\n", scenario.name());
    for (const char* name : {"strict", "late"})
      expect_clean(explore_random(scenario, seed + i, i == 7 ? 40 : 400, mode(name)), replay_name(i, name));
  }
}

TEST(ExplorerMega, AllSchedules) {
  std::vector<MegaProblem> small{
      problem(2, 1, 2, 1, {{1, 1}, {1, 1}}),  // every counter has one adder
      problem(2, 1, 1, 1, {{3, 3}}),          // a ring that wraps
      problem(1, 2, 1, 1, {{1}}),             // two that claim the tasks of a row block
      problem(1, 2, 1, 1, {{0}}),             // and find none
      problem(1, 2, 1, 1, {{3}}),             // more blocks than the ring holds
      problem(1, 2, 2, 2, {{1}, {1}}),
      problem(2, 2, 2, 1, {{1, 1}}),
      problem(1, 1, 1, 1, {{2}}),  // two that fetch
  };
  small.back().dispatchers = 2;
  for (std::size_t i = 0; i < small.size(); ++i) {
    small[i].batches.routing = static_cast<int>(i);
    MegaCalls<> scenario(small[i]);
    fmt::print("{}\n", scenario.name());
    expect_complete(explore_all(scenario, 300000, mode("strict")), "mega/small/strict");
  }
}

TEST(ExplorerMega, OnePreemptionAtAnyVerb) {
  const auto all = mega_problems();
  for (const std::size_t i : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
    MegaCalls<> scenario(all[i]);
    fmt::print("{}\n", scenario.name());
    expect_clean(explore_bounded(scenario, 1, 20000, mode("strict")), replay_name(i, "strict"));
  }
}

// ---- planted mistakes -------------------------------------------------------------------------------------------------------

/// A wait for a word of the own rank that is left out.
template <WordKind kind>
class DoesNotAwait : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
    return name.kind == kind || ExplorerWorker::acquire_own(word, name, least);
  }
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    return (name.kind == kind && name.peer != heap().rank) || ExplorerWorker::acquire(word, name, value);
  }
};

/// A wait that sees the word and nothing that came before it.
class AcquiresNothing : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
    std::uint32_t value = 0;
    wait_for(word, name, least, value, orders_nothing);
    return true;
  }
};

/// Words of an earlier call end a wait.
class TakesAnyEpoch : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
    std::uint32_t value = 0;
    wait_for(word, name, least, value, {.acquires = true, .any_tag = true, .epoch = 0});
    return true;
  }
};

/// Rows are fetched only after they have been counted.
class CountsRowsFirst : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
    if (heap().owner(to) < 0 || heap().owner(from) < 0) return ExplorerWorker::copy_row(to, from, format);
    late_.push_back([this, to, from, format] { complete(ExplorerWorker::copy_row(to, from, format)); });
    return {};
  }
  std::uint32_t add(Word* word, std::uint32_t n) {
    const std::uint32_t before = ExplorerWorker::add(word, n);
    for (const auto& copy : late_) copy();
    late_.clear();
    return before;
  }

 private:
  std::vector<std::function<void()>> late_;
};

/// The first worker without tasks takes itself for the last one and speaks for its rank.
class SpeaksTooEarly : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  bool acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
    claimed_ = false;
    return ExplorerWorker::acquire_own(word, name, least);
  }
  std::uint32_t add(Word* word, std::uint32_t n) {
    if (claim_ == nullptr) claim_ = word;              // a worker with tasks begins by claiming one
    const bool finishes = claimed_ && word != claim_;  // and adds elsewhere, without having waited, in the end
    claimed_ = word == claim_;
    const std::uint32_t before = ExplorerWorker::add(word, n);
    return finishes ? static_cast<std::uint32_t>(count() - 1) : before;
  }

 private:
  Word* claim_ = nullptr;
  bool claimed_ = false;
};

/// Sums begin at 0 only when the others may add already.
class ClearsTooLate : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  void clear(std::byte* to, std::size_t bytes) {
    late_.push_back([this, to, bytes] { ExplorerWorker::clear(to, bytes); });
  }
  void publish(Word* word, std::uint32_t value) {
    ExplorerWorker::publish(word, value);
    for (const auto& clear : late_) clear();
    late_.clear();
  }

 private:
  std::vector<std::function<void()>> late_;
};

/// Results are added as if nobody else did.
class AddsAlone : public ExplorerWorker {
 public:
  using ExplorerWorker::ExplorerWorker;
  void add_values(bf16* to, const bf16* from, int n) {
    std::vector<bf16> sums(static_cast<std::size_t>(n));
    complete(copy_bytes(sums.data(), to, sums.size() * sizeof(bf16)));
    for (int i = 0; i < n; ++i) {
      bf16& sum = sums[static_cast<std::size_t>(i)];
      sum = to_bf16(to_float(sum) + to_float(from[i]));
    }
    complete(copy_bytes(to, sums.data(), sums.size() * sizeof(bf16)));
  }
};

template <class Mutant>
void expect_found(const char* mistake, const MegaProblem& made, const std::string& sign = "") {
  MegaCalls<Mutant> scenario(made);
  fmt::print("{}, in {}\n", mistake, scenario.name());
  for (const char* name : {"strict", "late"}) {
    const Report report = explore_random(scenario, 20240606, 20000, mode(name));
    fmt::print("  {}\n", report.line());
    ASSERT_TRUE(report.violation) << mistake << ", " << name;
    EXPECT_NE(report.violation->what.find(sign), std::string::npos) << report.violation->what;
    const Report again = replay(scenario, report.violation->schedule, mode(name));
    ASSERT_TRUE(again.violation) << report.violation->schedule;
    EXPECT_EQ(again.violation->what, report.violation->what);
  }
}

TEST(ExplorerMega, FindsPlantedMistakes) {
  const auto all = mega_problems();
  expect_found<CountsRowsFirst>("rows that are counted before they are fetched", all[1]);
  expect_found<SpeaksTooEarly>("a worker that speaks for another one", all[2]);
  expect_found<AcquiresNothing>("waits for fellow workers that acquire nothing", all[1]);
  expect_found<TakesAnyEpoch>("waits that an earlier call's words end", all[0]);
  expect_found<DoesNotAwait<WordKind::mega_filled>>("rows that are not waited for", all[1]);
  expect_found<DoesNotAwait<WordKind::mega_freed>>("a place in the ring taken before it is free", all[8]);
  expect_found<DoesNotAwait<WordKind::mega_step>>("activations that are not waited for", all[3]);
  expect_found<DoesNotAwait<WordKind::mega_shared_step>>("the shared expert's activations not waited for", all[7]);
  expect_found<DoesNotAwait<WordKind::mega_announced>>("announcements that are not waited for", all[0]);
  expect_found<DoesNotAwait<WordKind::mega_ready>>("results that are not waited for", all[0]);
  expect_found<ClearsTooLate>("sums that begin too late", all[13]);
  expect_found<AddsAlone>("results that are added as if nobody else did", all[13]);
  expect_found<DoesNotAwait<WordKind::mega_ready>>("sums that are read before all has been added", all[13]);
  MegaProblem nobody = problem(2, 1, 2, 1, {{0, 0}, {0, 0}});
  expect_found<DoesNotAwait<WordKind::mega_ready>>("a call that ends before the others have counted", nobody);
}

TEST(ExplorerMega, Replay) {
  const char* wanted = std::getenv("HEDDLE_REPLAY");
  if (wanted == nullptr) GTEST_SKIP() << "HEDDLE_REPLAY=mega/problem/mode/schedule is not set";
  std::vector<std::string> parts(1);
  for (const char* c = wanted; *c != 0; ++c) *c == '/' ? parts.emplace_back() : parts.back() += *c;
  if (parts.size() != 4 || parts[0] != "mega") GTEST_SKIP() << "HEDDLE_REPLAY=" << wanted << " is not of this program";
  MegaCalls<> scenario(mega_problems().at(std::stoul(parts[1])));
  expect_clean(replay(scenario, parts[3], mode(parts[2])), parts[0] + "/" + parts[1] + "/" + parts[2]);
}

}  // namespace
}  // namespace heddle::explorer
