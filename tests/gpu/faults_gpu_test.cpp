// A rank that stops in every phase of every way: the others' error names who missed whom and which word, within twice the
// deadline; the context stays healthy; after a reset the next calls are right.
//
// All virtual ranks of a GPU run in one launch, so none of them can simply not be launched. A rank is silenced by its
// own abort word: its kernels find it when they begin and leave without a word to anybody. Where the phase in question
// comes later in a kernel, the words before it are written in the silent rank's name.
#include <gtest/gtest.h>

#include <sstream>

#include "exchange/gather/layout.hpp"
#include "exchange/normal/layout.hpp"
#include "exchange_arrivals.hpp"
#include "gpu/trips.hpp"
#include "signal/fault.hpp"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds deadline(300);
constexpr int ranks = 4;

int most_gpus() { return std::min(gpus_here(), ranks); }

/// From when on the rank is silent. normal's dispatch has two kernels with the host between them.
enum class From { dispatch, dispatch_receive, combine };

/// One word of a protocol that does not come.
struct Stop {
  From from = From::dispatch;
  std::vector<WordKind> written;  ///< words of the same kernel that do come
  WordKind missing = WordKind::none;
};

/// Every word of a way's protocol, in the order of docs/protocols.
std::vector<Stop> stops_of(const ExchangeOptions& options) {
  switch (options.way) {
    case Way::gather: {
      std::vector<Stop> all;
      if (options.gather == GatherMode::padded) all.push_back({From::dispatch, {}, WordKind::gather_arrived});
      if (options.gather != GatherMode::padded) {
        all.push_back({From::dispatch, {}, WordKind::gather_count});
        all.push_back({From::dispatch, {WordKind::gather_count}, WordKind::gather_arrived});
      }
      if (options.gather == GatherMode::zero_filled)
        all.push_back({From::dispatch, {WordKind::gather_count, WordKind::gather_arrived}, WordKind::gather_reduced});
      all.push_back({From::combine, {}, WordKind::gather_partial});
      return all;
    }
    case Way::normal:
      return {{From::dispatch, {}, WordKind::normal_count},
              {From::dispatch_receive, {}, WordKind::normal_tail},
              {From::dispatch_receive, {WordKind::normal_tail}, WordKind::normal_head},
              {From::combine, {}, WordKind::normal_return_tail},
              {From::combine, {WordKind::normal_return_tail}, WordKind::normal_return_head}};
    case Way::low_latency:
      return {{From::dispatch, {}, WordKind::low_latency_arrived}, {From::combine, {}, WordKind::low_latency_returned}};
    case Way::elastic:
      return {{From::dispatch, {}, WordKind::elastic_count}, {From::combine, {}, WordKind::elastic_returned}};
    case Way::one_sided:
      return {{From::dispatch, {}, WordKind::one_sided_arrived}, {From::combine, {}, WordKind::one_sided_ready}};
    case Way::mega:
    case Way::automatic:
      break;
  }
  return {};
}

/// Small batches meet in clusters, large ones count arrivals in memory.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const ExchangeOptions& options : every_way_on_gpus(128, 12, ranks, 4, 32)) {
    for (const std::vector<int>& tokens : {std::vector<int>{14, 16, 12, 13}, std::vector<int>{32, 25, 30, 28}}) {
      Case c;
      c.options = options;
      c.tokens = tokens;
      all.push_back(c);
    }
  }
  return all;
}

std::string phase_of(WordKind kind) { return word_text(kind).phase; }

/// A run whose heap the test reaches into.
class Silencer {
 public:
  Silencer(DeviceRun& run, const Case& c) : run_(run), case_(c), areas_(areas_of(run.memory(), ranks)) {}

  /// The epoch of the call that comes next, or of the one that is under way.
  std::uint32_t epoch() const { return static_cast<std::uint32_t>(read(&header(0)->epoch, 1)[0]) + 1; }

  void silence(int victim) const { write(&header(victim)->abort, static_cast<Word>(victim) + 1); }

  /// Writes the victim's word of this kind to every other rank, as the victim would in this round.
  void write_in_the_name_of(int victim, WordKind kind, const Round& round) const {
    auto normal = make_layout<NormalLayout>(case_.options, areas_);
    const auto gather = make_layout<GatherLayout>(case_.options, areas_);
    const auto tokens = static_cast<std::uint32_t>(case_.tokens_of(victim));
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == victim) continue;
      const auto tell = [&](std::size_t offset, std::uint32_t value) {
        write(run_.workspace().view(0).at<Word>(rank, offset), pack_word(epoch(), value));
      };
      if (kind == WordKind::gather_count) tell(gather.count_word(victim), tokens);
      if (kind == WordKind::gather_arrived)
        tell(gather.arrived_word(victim), case_.options.gather == GatherMode::zero_filled ? 1 : tokens);
      // normal's rows go by flows, each with a tail of its own.
      const auto tell_flows = [&](std::size_t offset, int copies) {
        const int flows = std::clamp(case_.options.queue_rows / 2, 1, 128);
        for (int f = 0; f < flows; ++f)
          tell(offset + sizeof(Word) * static_cast<std::size_t>(f), static_cast<std::uint32_t>((copies - f + flows - 1) / flows));
      };
      if (kind == WordKind::normal_tail) tell_flows(normal.tail_word(victim), round.copies(victim, rank));
      if (kind == WordKind::normal_return_tail) tell_flows(normal.return_tail_word(victim), round.copies(rank, victim));
    }
  }

 private:
  HeapHeader* header(int rank) const { return run_.workspace().view(0).at<HeapHeader>(rank, 0); }
  static void write(Word* where, Word value) {
    check(cudaMemcpy(where, &value, sizeof value, cudaMemcpyHostToDevice), "writing of a word");
    check(cudaStreamSynchronize(nullptr), "writing of a word");
  }

  DeviceRun& run_;
  const Case& case_;
  Areas areas_;
};

void expect_healthy(DeviceRun& run) {
  for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) {
    const cuda::DeviceScope scope(run.workspace().device(gpu));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "GPU " << gpu;
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "GPU " << gpu;
  }
}

/// Runs what must end in a fault; `begin` is called when the clock is to start.
template <class Body>
void expect_fault(DeviceRun& run, WordKind missing, std::uint32_t epoch, const std::vector<bool>& silent, Body body) {
  Clock::time_point since = Clock::now();
  try {
    body(since);
    run.wait();
    ADD_FAILURE() << "nobody missed anything";
  } catch (const FaultError& error) {
    const Fault& fault = error.fault();
    SCOPED_TRACE(error.what());
    expect_healthy(run);
    EXPECT_LT(Clock::now() - since, 2 * deadline) << "the fault came too late";
    ASSERT_TRUE(fault.rank >= 0 && fault.rank < ranks && fault.peer >= 0 && fault.peer < ranks);
    EXPECT_TRUE(silent[static_cast<std::size_t>(fault.peer)]) << "rank " << fault.peer << " did its part";
    EXPECT_EQ(fault.phase, phase_of(missing));
    EXPECT_EQ(fault.word.rfind(word_text(missing).word, 0), 0u) << "expected the " << word_text(missing).word;
    EXPECT_EQ(word_tag(fault.expected), epoch);
    EXPECT_NE(fault.expected, fault.seen);
  }
}

std::vector<const bf16*> load_and_dispatch(const Case& c, DeviceRun& run, int round, std::vector<Buffer<bf16>>& results) {
  for (int rank = 0; rank < ranks; ++rank) run.load(rank, draw(c, rank, round));
  run.settle();
  run.dispatch({c.most_tokens(), Phase::decode}, false);
  run.wait();
  results = results_of(c, run, nullptr);
  run.settle();
  return DeviceRun::pointers(results);
}

/// One rank is silent from a point of this round on.
void check_silent_rank(const Case& c, DeviceRun& run, const Stop& stop, int victim, int round, bool halves) {
  const Round all(c, round);
  if (stop.missing == WordKind::normal_head || stop.missing == WordKind::normal_return_head) {
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_GT(all.copies(rank, victim), c.options.queue_rows) << "too few rows to fill a queue; change the case";
      ASSERT_GT(all.copies(victim, rank), c.options.queue_rows) << "too few rows to fill a queue; change the case";
    }
  }
  const Silencer silencer(run, c);
  const std::uint32_t epoch = silencer.epoch();
  const Step step{c.most_tokens(), Phase::decode};
  std::vector<bool> silent(ranks, false);
  silent[static_cast<std::size_t>(victim)] = true;
  const auto fall_silent = [&](Clock::time_point& since) {
    for (const WordKind kind : stop.written) silencer.write_in_the_name_of(victim, kind, all);
    silencer.silence(victim);
    since = Clock::now();
  };
  std::vector<Buffer<bf16>> results;
  std::vector<const bf16*> pointers;
  if (stop.from == From::combine) {
    pointers = load_and_dispatch(c, run, round, results);
  } else {
    for (int rank = 0; rank < ranks; ++rank) run.load(rank, draw(c, rank, round));
    run.settle();
  }
  expect_fault(run, stop.missing, epoch, silent, [&](Clock::time_point& since) {
    if (stop.from == From::combine) {
      fall_silent(since);
      run.combine(pointers, Shared::none, !halves);
      return;
    }
    if (stop.from == From::dispatch_receive) {
      run.send(step);
      run.wait();
    }
    fall_silent(since);
    if (stop.from == From::dispatch && !halves && c.options.way != Way::normal) {
      run.dispatch_fused(step);
      return;
    }
    if (stop.from == From::dispatch) run.send(step);
    run.receive();
  });
}

TEST(FaultsGpu, RankSilentInEveryPhase) {
  SKIP_WITHOUT_GPU();
  for (const Case& c : cases()) {
    DeviceRun run(c, most_gpus(), deadline);
    int round = 0, number = 0;
    for (const Stop& stop : stops_of(c.options)) {
      const int victim = number++ % ranks;
      const bool halves = (number + c.tokens[0]) % 2 == 0;
      SCOPED_TRACE(testing::Message() << title(c.options) << ", steps of " << c.most_tokens() << ": rank " << victim
                                      << " does not write the " << word_text(stop.missing).word << " of " << phase_of(stop.missing)
                                      << (halves ? ", in halves" : "") << ", round " << round);
      round_trip(c, run, round++, false, false, false);
      check_silent_rank(c, run, stop, victim, round++, halves);
      run.workspace().reset();
      for (int after = 0; after < 2; ++after) round_trip(c, run, round++, false, after == 1, false);
      if (HasFailure()) break;
    }
  }
}

// All kernels of a GPU stay away from a half; the ranks of the other GPU miss them.
TEST(FaultsGpu, GpuWithoutAHalf) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  const std::vector<bool> silent{false, false, true, true};
  for (const Case& c : cases()) {
    DeviceRun run(c, 2, deadline);
    int round = 0;
    for (const Stop& stop : stops_of(c.options)) {
      if (!stop.written.empty()) continue;
      SCOPED_TRACE(testing::Message() << title(c.options) << ", steps of " << c.most_tokens() << ": GPU 1 is not launched for "
                                      << phase_of(stop.missing) << ", round " << round);
      round_trip(c, run, round++, false, false, false);
      const std::uint32_t epoch = Silencer(run, c).epoch();
      const Step step{c.most_tokens(), Phase::decode};
      std::vector<Buffer<bf16>> results;
      if (stop.from == From::combine) load_and_dispatch(c, run, round, results);
      expect_fault(run, stop.missing, epoch, silent, [&](Clock::time_point& since) {
        if (stop.from == From::dispatch_receive) {
          run.send(step);
          run.wait();
        }
        since = Clock::now();
        if (stop.from == From::dispatch) run.dispatch_on(0, step);
        if (stop.from == From::dispatch_receive) run.exchange(0, 0).dispatch_receive(run.stream(0));
        if (stop.from == From::combine) run.combine_on(0, results);
      });
      run.workspace().reset();
      for (int after = 1; after < 3; ++after) round_trip(c, run, round + after, false, after == 1, false);
      round += 3;
      if (HasFailure()) break;
    }
  }
}

// A receive half without any send half: every rank misses somebody, and be it itself.
TEST(FaultsGpu, ReceiveHalfWithoutSendHalf) {
  SKIP_WITHOUT_GPU();
  const std::vector<bool> silent(ranks, true);
  for (const Case& c : cases()) {
    if (c.options.way == Way::normal) continue;  // its receive halves do not wait for what a send half does
    DeviceRun run(c, most_gpus(), deadline);
    int round = 0;
    for (const Stop& stop : stops_of(c.options)) {
      // The dispatch of gather waits in its send half.
      if (stop.from != From::combine && c.options.way == Way::gather) continue;
      SCOPED_TRACE(testing::Message() << title(c.options) << ", steps of " << c.most_tokens() << ": only the receive half of "
                                      << phase_of(stop.missing) << ", round " << round);
      round_trip(c, run, round++, false, false, false);
      const std::uint32_t epoch = Silencer(run, c).epoch();
      std::vector<Buffer<bf16>> results;
      if (stop.from == From::combine) load_and_dispatch(c, run, round++, results);
      expect_fault(run, stop.missing, epoch, silent, [&](Clock::time_point& since) {
        since = Clock::now();
        if (stop.from == From::dispatch) run.receive();
        for (std::size_t gpu = 0; stop.from == From::combine && gpu < run.workspace().gpus(); ++gpu)
          run.exchange(0, gpu).combine_receive(run.outputs(gpu, Shared::none), run.stream(gpu));
      });
      run.workspace().reset();
      for (int after = 0; after < 2; ++after) round_trip(c, run, round++, false, after == 1, false);
      if (HasFailure()) break;
    }
  }
}

// A deadline set after the capture holds for replays; the graph outlives the fault.
TEST(FaultsGpu, RankSilentInAReplay) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (const Case& c : cases()) {
    if (c.options.way == Way::normal) continue;
    SCOPED_TRACE(testing::Message() << title(c.options) << ", steps of " << c.most_tokens());
    DeviceRun run(c, most_gpus());
    const Pool pool(run, c, c.most_tokens(), 4, Shared::none, seed);
    Trip trip(run, {0, c.most_tokens(), false, true}, Shared::none);
    Rounds play(run, 4, seed);
    for (int victim = 0; victim < ranks; victim += 3) {
      play.play(trip, pool);
      play.settle();
      run.workspace().set_deadline(deadline);
      const Silencer silencer(run, c);
      std::vector<bool> silent(ranks, false);
      silent[static_cast<std::size_t>(victim)] = true;
      expect_fault(run, stops_of(c.options)[0].missing, silencer.epoch(), silent, [&](Clock::time_point& since) {
        silencer.silence(victim);
        since = Clock::now();
        play.play(trip, pool);
      });
      play.forget();
      run.workspace().reset();
      run.workspace().set_deadline(std::chrono::seconds(20));
    }
    for (int round = 0; round < 8; ++round) play.play(trip, pool);
    play.settle();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace heddle
