// The agreement of survivors in many orders: every access to the store is a point where another rank may go on, a wait may run out
// at any time (so any rank may be taken for dead that is not), and ranks die between any two accesses. Checked in every run: a
// generation has one mask, all who take it over go on at the same step, and no step is run again that somebody has left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "explorer/coroutine.hpp"
#include "recovery/agreement.hpp"

namespace heddle {
namespace {

using explorer::Coroutine;

/// Which of `options` >= 2 possibilities; 0 goes on with who runs.
class Choices {
 public:
  virtual ~Choices() = default;
  virtual std::size_t choose(std::size_t options) = 0;
};

class RandomChoices final : public Choices {
 public:
  explicit RandomChoices(std::uint64_t seed) : random_(seed) {}
  std::size_t choose(std::size_t options) override { return random_() % 3 == 0 ? 0 : random_() % options; }

 private:
  std::mt19937_64 random_;
};

/// All sequences of choices with at most `most` other than 0, one after the other.
class AllChoices final : public Choices {
 public:
  explicit AllChoices(int most) : most_(most) {}
  std::size_t choose(std::size_t options) override {
    if (next_ == taken_.size()) taken_.push_back({0, used_ < most_ ? options : 1});
    const Taken& now = taken_[next_++];
    used_ += now.choice != 0 ? 1 : 0;
    return now.choice;
  }
  /// False after the last one.
  bool advance() {
    next_ = 0;
    used_ = 0;
    while (!taken_.empty() && taken_.back().choice + 1 >= taken_.back().options) taken_.pop_back();
    if (taken_.empty()) return false;
    taken_.back().choice += 1;
    return true;
  }

 private:
  struct Taken {
    std::size_t choice, options;
  };
  int most_, used_ = 0;
  std::vector<Taken> taken_;
  std::size_t next_ = 0;
};

/// Ranks as coroutines over one table of words.
class World {
 public:
  explicit World(Choices& choices) : choices_(choices) {}

  struct Player {
    Coroutine coroutine;
    int rank = 0;
    int accesses_left = -1;  ///< before it dies; negative: it lives
    bool waits = false;
    bool expired = false;
    std::uint64_t seen = 0;  ///< changes when it last looked
  };

  void add(int rank, int accesses_left, const std::function<void(Store&)>& body);
  void run();

  // For the store of a player.
  void pause(Player& player) {
    if (player.accesses_left == 0) return die(player);
    if (player.accesses_left > 0) --player.accesses_left;
    player.coroutine.suspend();
  }
  void sleep(Player& player, std::uint64_t seen) {
    player.waits = true;
    player.seen = seen;
    player.coroutine.suspend();
    player.waits = false;
  }
  std::uint64_t& word(const StoreKey& key) { return words_[{static_cast<int>(key.kind), key.index}]; }
  std::uint64_t changes() const { return changes_; }
  void note_change() { ++changes_; }
  bool is_dead(const Player& player) const { return player.accesses_left == 0; }

 private:
  void die(Player& player) {
    for (;;) player.coroutine.suspend();
  }
  bool ready(const Player& player) const {
    return !player.coroutine.finished() && !is_dead(player) && (!player.waits || player.seen != changes_);
  }
  bool can_expire(const Player& player) const { return !player.coroutine.finished() && !is_dead(player) && player.waits; }

  Choices& choices_;
  std::map<std::pair<int, int>, std::uint64_t> words_;
  std::uint64_t changes_ = 0;
  std::vector<std::unique_ptr<Player>> players_;
};

class ScheduledStore final : public Store {
 public:
  ScheduledStore(World& world, World::Player& player) : world_(world), player_(player) {}
  std::uint64_t get(const StoreKey& key) const override {
    world_.pause(player_);
    return world_.word(key);
  }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    world_.pause(player_);
    std::uint64_t& word = world_.word(key);
    if (word != expected) {
      expected = word;
      return false;
    }
    word = desired;
    world_.note_change();
    return true;
  }
  bool wait(const std::function<bool()>& there, Clock::time_point) override {
    for (player_.expired = false;;) {
      const std::uint64_t seen = world_.changes();
      if (there()) return true;
      if (player_.expired) return false;
      world_.sleep(player_, seen);
    }
  }

 private:
  World& world_;
  World::Player& player_;
};

void World::add(int rank, int accesses_left, const std::function<void(Store&)>& body) {
  Player& player = *players_.emplace_back(std::make_unique<Player>());
  player.rank = rank;
  player.accesses_left = accesses_left;
  player.coroutine.start([this, &player, body] {
    ScheduledStore store(*this, player);
    body(store);
  });
}

void World::run() {
  Player* current = nullptr;
  for (int step = 0; step < 200000; ++step) {
    std::vector<std::pair<Player*, bool>> options;  // and whether its wait runs out
    if (current != nullptr && ready(*current)) options.emplace_back(current, false);
    for (auto& player : players_) {
      if (player.get() != current && ready(*player)) options.emplace_back(player.get(), false);
    }
    for (auto& player : players_) {
      if (can_expire(*player)) options.emplace_back(player.get(), true);
    }
    if (options.empty()) return;
    const auto [chosen, expires] = options[options.size() == 1 ? 0 : choices_.choose(options.size())];
    if (expires) chosen->expired = true;
    current = chosen;
    current->coroutine.resume();
  }
  ADD_FAILURE() << "the ranks come to no end";
}

/// What ranks did, and the judgement of it.
class Journal {
 public:
  void adopted(const Agreement& agreement, int rank, std::uint32_t left_behind) {
    const auto& [generation, live] = agreement.members();
    EXPECT_TRUE(live[static_cast<std::size_t>(rank)]) << "rank " << rank << " took over a mask without it";
    const auto [known, is_new] = masks_.try_emplace(generation, live, agreement.finished());
    EXPECT_EQ(known->second.first, live) << "two masks in generation " << generation;
    EXPECT_EQ(known->second.second, agreement.finished()) << "two steps to go on from in generation " << generation;
    EXPECT_FALSE(static_cast<std::int32_t>(agreement.finished() - left_behind) < 0)
        << "rank " << rank << " is to run a step again that it has left behind";
  }
  void lost(const Agreement& agreement, const LostRankError& error) {
    EXPECT_GE(error.members().generation, agreement.members().generation);
    ++lost_;
  }
  int masks() const { return static_cast<int>(masks_.size()); }
  int losses() const { return lost_; }

 private:
  std::map<std::uint32_t, std::pair<std::vector<bool>, std::uint32_t>> masks_;
  int lost_ = 0;
};

struct Life {
  int rank = 0;
  int ranks = 0;
  int steps = 2;
  std::vector<bool> suspects;  ///< in every roll call that it holds because somebody is late
  bool late = false;           ///< it takes the place of one that died
  int comebacks = 0;           ///< after being lost
  std::optional<int> ranks_a_node = {};
  std::uint32_t unheard = 0;  ///< nodes that it does not hear whenever it meets the others
};

void say_unheard(Store& store, const Life& life, std::uint32_t generation) {
  const StoreKey key{StoreKey::Kind::unheard, life.rank};
  std::uint64_t last = store.get(key);
  while (last >> 32 < generation && !store.compare_set(key, last, std::uint64_t{generation} << 32 | life.unheard)) continue;
}

/// The loop of a rank's steps, as the driver has it. An attempt meets nobody: the steps' calls are not part of this.
void live(Store& store, const Life& life, Journal& journal) {
  Agreement agreement(store, life.rank, life.ranks, life.ranks_a_node);
  std::uint32_t left_behind = 0;
  int comebacks = life.comebacks;
  bool is_in = !life.late;
  int held = 0;
  for (int step = 0; step < life.steps && held < 12;) {
    bool is_out = false;
    try {
      if (!is_in) {
        agreement.join({});
        is_in = true;
        left_behind = agreement.finished();
        journal.adopted(agreement, life.rank, left_behind);
      }
      if (!agreement.should_meet()) {
        if (agreement.finish({}) == Agreement::Finish::all) {
          left_behind = agreement.finished();
          ++step;
          continue;
        }
      }
      ++held;
      const std::uint32_t before = left_behind;
      agreement.call();
      agreement.settle(life.suspects, {});
      journal.adopted(agreement, life.rank, left_behind);
      if (life.unheard != 0) say_unheard(store, life, agreement.members().generation);
      if (agreement.finished() != before) {
        left_behind = agreement.finished();
        ++step;
      }
    } catch (const LostRankError& error) {
      journal.lost(agreement, error);
      is_out = true;
    } catch (const FaultError&) {
      is_out = true;  // nobody held a roll call in time
    }
    if (!is_out) continue;
    if (comebacks-- == 0) return;
    is_in = false;
  }
}

std::vector<bool> nobody(int ranks) { return std::vector<bool>(static_cast<std::size_t>(ranks), false); }

std::uint64_t first_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

/// All orders of two or three ranks with few switches, for a death after every number of accesses.
void explore(int ranks, int most, int deaths_up_to) {
  std::uint64_t runs = 0;
  int masks = 0, losses = 0;
  for (int accesses = -1; accesses < deaths_up_to; ++accesses) {
    AllChoices choices(most);
    do {
      World world(choices);
      Journal journal;
      for (int rank = 0; rank < ranks; ++rank) {
        Life life{rank, ranks, 2, nobody(ranks), false, 1};
        life.suspects[static_cast<std::size_t>((rank + 1) % ranks)] = true;  // everybody suspects somebody else
        world.add(rank, rank == 0 ? accesses : -1, [life, &journal](Store& store) { live(store, life, journal); });
      }
      world.run();
      ++runs;
      masks = std::max(masks, journal.masks());
      losses += journal.losses();
      if (testing::Test::HasFailure()) {
        std::printf("death after %d accesses of rank 0, run %llu\n", accesses, static_cast<unsigned long long>(runs));
        return;
      }
    } while (choices.advance());
  }
  std::printf("%llu runs, up to %d masks, %d losses\n", static_cast<unsigned long long>(runs), masks, losses);
}

TEST(RecoveryAgreement, TwoRanksInAllOrdersWithFewSwitches) { explore(2, 3, 40); }
TEST(RecoveryAgreement, ThreeRanksInAllOrdersWithFewSwitches) { explore(3, 2, 24); }

struct Died {};

/// A store whose rank's process ends before an access.
class Mortal final : public Store {
 public:
  Mortal(Store& inner, int accesses) : inner_(inner), left_(accesses) {}
  std::uint64_t get(const StoreKey& key) const override {
    use();
    return inner_.get(key);
  }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    use();
    return inner_.compare_set(key, expected, desired);
  }
  bool wait(const std::function<bool()>& there, Clock::time_point end) override { return inner_.wait(there, end); }

 private:
  void use() const {
    if (left_-- == 0) throw Died();
  }
  Store& inner_;
  mutable int left_;
};

/// Any number of ranks that live, die, are replaced and come back.
void draw_run(std::uint64_t seed, int ranks, int& masks, int& losses) {
  std::mt19937_64 random(seed);
  RandomChoices choices(random());
  World world(choices);
  Journal journal;
  const bool has_nodes = ranks % 2 == 0 && random() % 2 == 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Life life{rank, ranks, 1 + static_cast<int>(random() % 3), nobody(ranks), false, static_cast<int>(random() % 3)};
    for (int suspect = 0; suspect < ranks; ++suspect) life.suspects[static_cast<std::size_t>(suspect)] = random() % 3 == 0;
    if (has_nodes) {
      life.ranks_a_node = 2;
      life.unheard = random() % 2 == 0 ? static_cast<std::uint32_t>(random()) : 0;
    }
    const bool dies = random() % 3 == 0;
    const int accesses = dies ? static_cast<int>(random() % static_cast<std::uint64_t>(60 * ranks)) : -1;
    if (!dies || random() % 2 == 0) {
      world.add(rank, accesses, [life, &journal](Store& store) { live(store, life, journal); });
      continue;
    }
    // A process that dies, and one that takes its place as soon as it is dead: the same words.
    Life second = life;
    second.late = true;
    world.add(rank, -1, [life, second, accesses, &journal](Store& store) {
      try {
        Mortal mortal(store, accesses);
        live(mortal, life, journal);
      } catch (const Died&) {
      }
      live(store, second, journal);
    });
  }
  world.run();
  masks = std::max(masks, journal.masks());
  losses += journal.losses();
}

void draw_runs(int count, int least, int most) {
  const std::uint64_t seed = first_seed();
  int masks = 0, losses = 0;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t one = seed + static_cast<std::uint64_t>(i);
    draw_run(one, least + static_cast<int>(one % static_cast<std::uint64_t>(most - least + 1)), masks, losses);
    if (testing::Test::HasFailure()) {
      std::printf("failed with HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(one));
      return;
    }
  }
  std::printf("%d runs, up to %d masks, %d losses\n", count, masks, losses);
  EXPECT_GT(losses, 0) << "no rank was ever taken for dead";
}

TEST(RecoveryAgreement, RandomLivesInRandomOrders) { draw_runs(60000, 2, 5); }
// The mask is then decided in more than one word.
TEST(RecoveryAgreement, ManyRanksInRandomOrders) { draw_runs(40, 33, 70); }

}  // namespace
}  // namespace heddle
