// Counters that the host reads while kernels run: a late rank shows as the others' waiting.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "exchange/normal/layout.hpp"
#include "exchange/one_sided/layout.hpp"
#include "gpu/counting.hpp"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;

/// A rank that comes late: by its own abort word it leaves its kernels without a word, and the test writes its words later, in its
/// name. dispatch_word, combine_word: where others look for it.
class LateRank {
 public:
  LateRank(DeviceRun& run, std::size_t dispatch_word, std::size_t combine_word, int late)
      : run_(run), dispatch_word_(dispatch_word), combine_word_(combine_word), late_(late) {}

  void fall_silent() const { write(&header(late_)->abort, static_cast<Word>(late_) + 1); }
  Word epoch() const { return read(&header(0)->epoch, 1)[0]; }
  /// Until the kernels of all others have begun, which they tell by one of their epochs.
  void wait_for_the_others(Word HeapHeader::*which, Word epoch) const {
    const Clock::time_point end = Clock::now() + std::chrono::seconds(10);
    for (int rank = 0; rank < run_.ranks(); ++rank) {
      while (rank != late_ && read(&(header(rank)->*which), 1)[0] != epoch)
        ASSERT_LT(Clock::now(), end) << "the kernel of rank " << rank << " does not begin";
    }
  }
  /// No rows, of one CTA.
  void speak(bool combine, Word epoch) const {
    const std::size_t word = combine ? combine_word_ : dispatch_word_;
    for (int rank = 0; rank < run_.ranks(); ++rank) {
      if (rank != late_) write(run_.workspace().view(0).at<Word>(rank, word), pack_word(static_cast<std::uint32_t>(epoch), 0));
    }
  }

 private:
  HeapHeader* header(int rank) const { return run_.workspace().view(0).at<HeapHeader>(rank, 0); }
  static void write(Word* where, Word value) {
    check(cudaMemcpy(where, &value, sizeof value, cudaMemcpyHostToDevice), "writing of a word");
    check(cudaStreamSynchronize(nullptr), "writing of a word");
  }

  DeviceRun& run_;
  std::size_t dispatch_word_, combine_word_;
  int late_;
};

constexpr std::chrono::milliseconds late(100);
constexpr std::uint64_t least_wait = 50'000'000;  // nanoseconds: most of that time the others were waiting already
constexpr int victim = 2;

std::vector<ExchangeCounters> counters_of_all(DeviceRun& run) {
  std::vector<ExchangeCounters> all;
  for (int rank = 0; rank < run.ranks(); ++rank) all.push_back(counters_of_rank(run, rank));
  return all;
}

/// Inputs of a round, and results that say nothing, with room for whatever arrives.
std::vector<Buffer<bf16>> load_all(DeviceRun& run, const Case& c, int round) {
  std::vector<Buffer<bf16>> results;
  const int rows = rows_at_most(c);
  for (int rank = 0; rank < c.ranks(); ++rank) {
    run.load(rank, draw(c, rank, round));
    results.emplace_back(run.device_of(rank), std::vector<bf16>(static_cast<std::size_t>(rows * c.options.hidden), bf16{0}));
  }
  run.settle();
  return results;
}

/// All ranks are still in the dispatch behind the first one.
void expect_nobody_heard(DeviceRun& run) {
  for (int rank = 0; rank < run.ranks(); ++rank)
    EXPECT_EQ(counters_of_rank(run, rank).dispatches, 1u) << "rank " << rank << " has not heard of rank " << victim << " yet";
}

/// After one good round trip and another one in which the victim was late in both halves.
void expect_waits(DeviceRun& run, const std::vector<ExchangeCounters>& before) {
  for (int rank = 0; rank < run.ranks(); ++rank) {
    SCOPED_TRACE(testing::Message() << "rank " << rank);
    const ExchangeCounters& was = before[static_cast<std::size_t>(rank)];
    const ExchangeCounters now = counters_of_rank(run, rank);
    EXPECT_EQ(now.dispatches, rank == victim ? 1u : 2u);
    EXPECT_EQ(now.combines, rank == victim ? 1u : 2u);
    if (rank == victim) continue;
    EXPECT_GE(now.dispatch_wait.last, least_wait);
    EXPECT_EQ(now.dispatch_wait.sum, was.dispatch_wait.sum + now.dispatch_wait.last);
    EXPECT_GE(now.combine_wait.last, least_wait);
    EXPECT_EQ(now.combine_wait.sum, was.combine_wait.sum + now.combine_wait.last);
    EXPECT_EQ(now.arrived[victim].last, 0u);
    EXPECT_EQ(now.arrived[victim].sum, was.arrived[victim].sum);
  }
}

void expect_counting_goes_on(DeviceRun& run, const Case& c) {
  run.workspace().reset();
  round_trip(c, run, 2, false, false, false);
  EXPECT_EQ(counters_of_rank(run, victim).dispatches, 2u);
  EXPECT_EQ(counters_of_rank(run, 0).dispatches, 3u);
}

TEST(CountersWaitGpu, ALateRankShowsAsTheOthersWaiting) {
  SKIP_WITHOUT_GPU();
  Case c;
  c.options = options_for(Way::one_sided, 128, 12, ranks_here(), 3, 8);
  c.tokens.assign(static_cast<std::size_t>(c.ranks()), 8);
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), counting());
  round_trip(c, run, 0, false, false, false);
  const std::vector<ExchangeCounters> before = counters_of_all(run);

  const auto layout = make_layout<OneSidedLayout>(c.options, areas_of(run.memory(), c.ranks()));
  const LateRank late_rank(run, layout.arrived_word(victim), layout.ready_word(victim), victim);
  const std::vector<Buffer<bf16>> results = load_all(run, c, 1);
  const Word epoch = late_rank.epoch() + 1;
  late_rank.fall_silent();
  run.dispatch_fused({c.most_tokens(), Phase::decode});
  late_rank.wait_for_the_others(&HeapHeader::call, epoch);
  std::this_thread::sleep_for(late);
  expect_nobody_heard(run);
  late_rank.speak(false, epoch);
  run.wait();
  run.combine(DeviceRun::pointers(results), Shared::none, true);
  late_rank.wait_for_the_others(&HeapHeader::epoch, epoch);
  std::this_thread::sleep_for(late);
  late_rank.speak(true, epoch);
  run.wait();
  expect_waits(run, before);
  expect_counting_goes_on(run, c);
}

// normal: the rank is there when rows are counted, and late for the queues. It has neither tokens nor experts, so all that the
// others wait for is the word that no row comes.
TEST(CountersWaitGpu, ALateRankShowsAsTheOthersWaitingAtTheirQueues) {
  SKIP_WITHOUT_GPU();
  Case c;
  c.options = options_for(Way::normal, 128, 12, ranks_here(), 3, 8);
  std::vector<int> homes;
  for (int expert = 0; expert < 12; ++expert) homes.push_back(expert % (c.ranks() - 1) + (expert % (c.ranks() - 1) >= victim));
  c.options.placement = Placement::from_map(homes, c.ranks());
  c.tokens.assign(static_cast<std::size_t>(c.ranks()), 8);
  c.tokens[victim] = 0;
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), counting());
  round_trip(c, run, 0, false, false, false);
  const std::vector<ExchangeCounters> before = counters_of_all(run);
  for (int rank = 0; rank < c.ranks(); ++rank)
    EXPECT_LT(before[static_cast<std::size_t>(rank)].combine_wait.last, least_wait) << "nobody was late, rank " << rank;

  const auto layout = make_layout<NormalLayout>(c.options, areas_of(run.memory(), c.ranks()));
  const LateRank late_rank(run, layout.tail_word(victim), layout.return_tail_word(victim), victim);
  const std::vector<Buffer<bf16>> results = load_all(run, c, 1);
  const Word epoch = late_rank.epoch() + 1;
  run.send({c.most_tokens(), Phase::decode});
  run.wait();
  late_rank.fall_silent();
  run.receive();
  std::this_thread::sleep_for(late);
  expect_nobody_heard(run);
  late_rank.speak(false, epoch);
  run.wait();
  run.combine(DeviceRun::pointers(results), Shared::none, true);
  std::this_thread::sleep_for(late);
  late_rank.speak(true, epoch);
  run.wait();
  expect_waits(run, before);
  expect_counting_goes_on(run, c);
}

}  // namespace
}  // namespace heddle
