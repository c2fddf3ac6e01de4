// Changes of placement where hosts queue calls ahead, as on GPUs: a model in which every member has a stream, a thread that works
// off what its host queued. All switch behind the same call, and no cell is read or written too early (the thread sanitizer looks,
// too).
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "balancing/balancer.hpp"
#include "balancing/migration.hpp"
#include "balancing/pieces.hpp"
#include "balancing_support.hpp"
#include "gtest/gtest.h"
#include "heddle/error.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

using balancing_test::announced_seed;
using balancing_test::random_map;

std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }

/// Works queued in order, one after the other.
class Stream {
 public:
  Stream() : worker_([this] { work(); }) {}
  ~Stream() {
    queue({});
    worker_.join();
  }
  void queue(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !works_.empty(); });
      const std::function<void()> next = std::move(works_.front());
      works_.pop_front();
      lock.unlock();
      if (!next) return;
      next();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  std::thread worker_;
};

/// Which expert each cell holds, of all members, and how far their streams are.
struct Machine {
  struct Member {
    std::vector<int> cells, staged;
    std::atomic<std::int64_t> begun = 0;  ///< calls of its stream
    std::atomic<std::int64_t> ended = 0;  ///< calls, with what was queued behind them before the next one
  };
  std::deque<Member> members;

  explicit Machine(const ReplicaMap& map) : members(index(map.ranks())) {
    for (int rank = 0; rank < map.ranks(); ++rank) {
      const auto own = map.experts_of(rank);
      members[index(rank)].cells.assign(own.begin(), own.end());
    }
  }
};

void wait_for(const std::atomic<std::int64_t>& value, std::int64_t at_least) {
  for (std::int64_t now = value.load(); now < at_least; now = value.load()) value.wait(now);
}

/// One member: its host is the thread that calls.
class ModelEngine final : public BalancingEngine {
 public:
  ModelEngine(Machine& machine, int rank, int experts, int calls_ahead, int most_arrivals, std::uint64_t seed)
      : machine_(machine),
        rank_(rank),
        calls_ahead_(calls_ahead),
        most_arrivals_(most_arrivals),
        random_(seed),
        counts_(index(experts), 0) {
    mine().staged.assign(index(most_arrivals), -1);
  }

  /// Queues call number `call`, which finds these experts in its cells and brings pairs of some of them.
  void queue_call(std::int64_t call, const ReplicaMap& map, std::vector<std::int64_t> pairs) {
    const auto own = map.experts_of(rank_);
    stream_.queue([this, call, pairs, wanted = std::vector<int>(own.begin(), own.end())] {
      mine().begun.store(call);
      mine().begun.notify_all();
      for (const Machine::Member& member : machine_.members) wait_for(member.begun, call);
      EXPECT_EQ(mine().cells, wanted) << "call " << call << " of member " << rank_;
      for (std::size_t expert = 0; expert < pairs.size(); ++expert) counts_[expert] += pairs[expert];
    });
  }

  std::int64_t ended(std::int64_t call) override {
    stream_.queue([this, call] {
      mine().ended.store(call);
      mine().ended.notify_all();
    });
    wait_for(mine().ended, call - calls_ahead_);
    return call - calls_ahead_;
  }
  bool has_all_ranks() const override { return true; }
  int most_arrivals() const override { return most_arrivals_; }
  void put_counts_aside() override {
    stream_.queue([this] {
      aside_ = counts_;
      std::ranges::fill(counts_, 0);
    });
  }
  std::vector<std::int64_t> counts_aside() override { return aside_; }
  void plan(const ReplicaMap& from, const ReplicaMap& to) override {
    departures_.clear();
    const std::vector<bool> all(index(from.ranks()), true);
    for (int rank = 0; rank < from.ranks(); ++rank) {
      const std::vector<Move> moves = moves_of(from, to, rank, 1, all);
      if (rank == rank_) arrivals_ = moves;
      for (std::size_t i = 0; i < moves.size(); ++i) {
        if (moves[i].from_rank == rank_) departures_.push_back({moves[i].from_place, rank, i});
      }
    }
    copies_ = CellCopies(departures_.size(), 1);
  }
  std::uint64_t copy_some(std::size_t bytes) override {
    if (random_() % 3 == 0) return 0;  // others are not held up by one that takes its time
    return copies_.advance(bytes, [this](std::size_t i, std::size_t, std::size_t) {
      const Departure& it = departures_[i];
      machine_.members[index(it.to)].staged.at(it.arrival) = mine().cells[index(it.place)];
    });
  }
  bool has_copied_all() override { return copies_.is_complete(); }
  std::int64_t put_in_place(const ReplicaMap&) override {
    stream_.queue([this, moves = arrivals_] {
      for (std::size_t i = 0; i < moves.size(); ++i) mine().cells[index(moves[i].place)] = mine().staged[i];
    });
    return static_cast<std::int64_t>(arrivals_.size());
  }
  void forget() override {}

 private:
  struct Departure {
    int place, to;
    std::size_t arrival;
  };
  Machine::Member& mine() { return machine_.members[index(rank_)]; }

  Machine& machine_;
  int rank_, calls_ahead_, most_arrivals_;
  std::mt19937_64 random_;
  std::vector<std::int64_t> counts_, aside_;  ///< of the stream; the second one the host's when a call behind it has ended
  std::vector<Move> arrivals_;
  std::vector<Departure> departures_;
  CellCopies copies_{0, 1};
  Stream stream_;
};

/// Not where there is memory for so few experts on their way that there is no way.
void try_to_move(Balancer& balancer, const ReplicaMap& map) {
  try {
    balancer.move_to(settle(map, balancer.map()));
  } catch (const InputError&) {
  }
}

/// Changes one after the other; by every member, which placement was in force in each call.
void expect_changes(std::uint64_t seed, int ranks, int calls_ahead) {
  SCOPED_TRACE(testing::Message() << ranks << " members, " << calls_ahead << " calls ahead, seed " << seed);
  constexpr int experts = 9, calls = 400;
  std::mt19937_64 random(seed);
  const int places = (experts + ranks - 1) / ranks + 1;
  const ReplicaMap maps[] = {random_map(random, experts, ranks, places), random_map(random, experts, ranks, places),
                             random_map(random, experts, ranks, places)};
  const int most_arrivals = 1 + static_cast<int>(seed % static_cast<std::uint64_t>(places));
  Machine machine(maps[0]);
  std::vector<std::vector<std::int64_t>> in_force(index(ranks));
  run_ranks(ranks, {}, [&](Group& group) {
    ModelEngine engine(machine, group.rank(), experts, calls_ahead, most_arrivals, seed + static_cast<std::uint64_t>(group.rank()));
    std::size_t next = 1;
    BalancingOptions options;
    options.copy_bytes = 1 + seed % 3;
    Balancer balancer(group, engine, maps[0], options);
    for (int call = 1; call <= calls; ++call) {
      if (!balancer.is_moving()) try_to_move(balancer, maps[next++ % std::size(maps)]);
      in_force[index(group.rank())].push_back(balancer.report().switches);
      engine.queue_call(call, balancer.map(), {});
      balancer.after_call();
    }
    balancer.close();
  });
  EXPECT_GE(in_force[0].back(), 5);
  for (const auto& each : in_force) EXPECT_EQ(each, in_force.front()) << "members switch behind the same calls";
}

TEST(BalancingAhead, AllSwitchBehindTheSameCall) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < 8 && !::testing::Test::HasFailure(); ++i)
    expect_changes(seed + i, 1 + static_cast<int>((seed + i) % 4), static_cast<int>((seed + i) / 4 % 6));
}

/// Loads that move are followed, some calls late; every count is looked at once.
TEST(BalancingAhead, LooksFollowTheLoad) {
  const std::uint64_t seed = announced_seed();
  constexpr int experts = 8, ranks = 4, calls = 300;
  for (const int calls_ahead : {0, 1, 5}) {
    SCOPED_TRACE(testing::Message() << calls_ahead << " calls ahead");
    const ReplicaMap first = balance_experts(std::vector<double>(experts, 1.0), {ranks, 4, 1, {}});
    Machine machine(first);
    std::vector<ReplicaMap> last(ranks);
    run_ranks(ranks, {}, [&](Group& group) {
      ModelEngine engine(machine, group.rank(), experts, calls_ahead, 2, seed);
      BalancingOptions options;
      options.every = 7;
      Balancer balancer(group, engine, first, options);
      for (int call = 1; call <= calls; ++call) {
        std::vector<std::int64_t> pairs(experts, 10);
        pairs[call <= calls / 2 ? 1 : 6] = 100;  // which then deserves all copies that there are
        engine.queue_call(call, balancer.map(), pairs);
        balancer.after_call();
        if (call == calls / 2) {
          EXPECT_EQ(balancer.map().copies_of(1).size(), 4u);
          EXPECT_GE(balancer.report().switches, 1);
        }
      }
      EXPECT_EQ(balancer.map().copies_of(6).size(), 4u);
      EXPECT_GE(balancer.report().looks, calls / (7 * 3));
      EXPECT_LE(balancer.report().expected, 1.05);
      last[index(group.rank())] = balancer.map();
      balancer.close();
    });
    for (const ReplicaMap& map : last) EXPECT_TRUE(map == last.front());
  }
}

/// Has copied everything at once; a fault may end a call, after which no change can be planned.
class FaultyEngine final : public BalancingEngine {
 public:
  explicit FaultyEngine(bool fails) : fails_(fails) {}
  std::int64_t ended(std::int64_t call) override {
    if (!fails_) return call;
    has_failed_ = true;
    throw Error(ErrorKind::fault, "a call that ends early");
  }
  bool has_all_ranks() const override { return true; }
  int most_arrivals() const override { return 1; }
  void put_counts_aside() override {}
  std::vector<std::int64_t> counts_aside() override { return {}; }
  void plan(const ReplicaMap&, const ReplicaMap&) override {
    if (has_failed_) throw InputError("an expert has no copy on a live rank");
  }
  std::uint64_t copy_some(std::size_t) override { return 0; }
  bool has_copied_all() override { return true; }
  std::int64_t put_in_place(const ReplicaMap& to) override {
    placed = to;
    return 1;
  }
  void forget() override {}

  std::optional<ReplicaMap> placed;

 private:
  bool fails_, has_failed_ = false;
};

/// One member has made the first of two changes and begun the second one, the other missed it.
TEST(BalancingAhead, AResetMakesTheChangeThatOthersMadeAndBeginsNone) {
  const ReplicaMap first = ReplicaMap::from_ranks({{0, 1, 2, 5}, {3, 4, 0, 1}}, 6);
  const ReplicaMap half = ReplicaMap::from_ranks({{3, 1, 2, 5}, {3, 4, 0, 1}}, 6);
  const ReplicaMap goal = ReplicaMap::from_ranks({{3, 4, 2, 5}, {3, 4, 0, 1}}, 6);
  run_ranks(2, {}, [&](Group& group) {
    const bool fails = group.rank() == 1;
    FaultyEngine engine(fails);
    Balancer balancer(group, engine, first, {});
    balancer.move_to(goal);
    group.barrier("all have said that they are ready");
    if (fails) {
      EXPECT_THROW(balancer.after_call(), Error);
    } else {
      balancer.after_call();
      EXPECT_TRUE(balancer.is_moving());
    }
    balancer.reset();
    EXPECT_TRUE(balancer.map() == half);
    EXPECT_TRUE(engine.placed == half);
    EXPECT_EQ(balancer.report().switches, 1);
    EXPECT_FALSE(balancer.is_moving());
    balancer.close();
  });
}

TEST(BalancingPieces, AreOneRunOfBytes) {
  std::mt19937_64 random(announced_seed());
  std::vector<std::vector<int>> pieces(4);
  std::vector<int> all;
  for (auto& piece : pieces) {
    piece.resize(random() % 5);
    for (int& value : piece) all.push_back(value = static_cast<int>(random() % 1000));
  }
  ASSERT_EQ(bytes_of(pieces), all.size());
  for (std::size_t offset = 0; offset <= all.size(); ++offset) {
    for (std::size_t count = 0; offset + count <= all.size(); ++count) {
      std::vector<int> got;
      for_runs(pieces, offset, count, [&](const int* at, std::size_t begin, std::size_t run) {
        EXPECT_EQ(begin, offset + got.size());
        got.insert(got.end(), at, at + run);
      });
      EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin() + static_cast<std::ptrdiff_t>(offset),
                             all.begin() + static_cast<std::ptrdiff_t>(offset + count)));
    }
  }
}

}  // namespace
}  // namespace heddle
