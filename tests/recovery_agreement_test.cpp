// The agreement under recovery, step by step: what others do meanwhile happens inside a rank's wait.
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <utility>

#include "heddle/error.hpp"
#include "heddle/group.hpp"
#include "recovery/agreement.hpp"

namespace heddle {
namespace {

constexpr Patience none{std::chrono::nanoseconds(0), std::chrono::nanoseconds(0)};

/// A store in which time stands still: a wait is over once `meanwhile` has happened.
class ScriptedStore final : public Store {
 public:
  explicit ScriptedStore(Store& inner) : inner_(inner) {}
  std::uint64_t get(const StoreKey& key) const override { return inner_.get(key); }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    return inner_.compare_set(key, expected, desired);
  }
  bool wait(const std::function<bool()>& there, Clock::time_point) override {
    if (!there() && meanwhile) std::exchange(meanwhile, nullptr)();
    return there();
  }
  std::function<void()> meanwhile;  ///< happens once

 private:
  Store& inner_;
};

// Others hold a roll call, wait for who is in its mask, and give that up about as late as a rank that comes back gives up its own
// wait: one that then waited for the roll call after it would miss every one.
TEST(RollCall, WhoGaveUpWaitingIsInTheRollCallThatItCameTo) {
  const auto groups = create_thread_group(2, {});
  Agreement stayed(groups[0]->store(), 0, 2);
  stayed.settle({false, true}, none);
  ASSERT_EQ(stayed.members().live, (std::vector<bool>{true, false}));

  ScriptedStore store(groups[1]->store());
  Agreement lost(store, 1, 2);
  EXPECT_THROW(lost.join({}), FaultError) << "nobody holds a roll call";
  store.meanwhile = [&] { stayed.settle({false, false}, none); };
  lost.join({});
  EXPECT_EQ(lost.members().generation, 2u);
  EXPECT_EQ(lost.members().live, (std::vector<bool>{true, true}));
  EXPECT_EQ(stayed.members().live, lost.members().live);
}

// The word of a process that has ended stays as it is: who takes its place comes to the next roll call.
TEST(RollCall, AnotherProcessOfTheRankComesToTheNextRollCall) {
  const auto groups = create_thread_group(2, {});
  Agreement stayed(groups[0]->store(), 0, 2);
  stayed.settle({false, true}, none);
  ScriptedStore store(groups[1]->store());
  EXPECT_THROW(Agreement(store, 1, 2).join({}), FaultError);

  Agreement successor(store, 1, 2);
  store.meanwhile = [&] {
    stayed.settle({false, false}, none);  // with its predecessor
    store.meanwhile = [&] { stayed.settle({false, false}, none); };
  };
  successor.join({});
  EXPECT_EQ(successor.members().generation, 3u);
  EXPECT_EQ(stayed.members().live, (std::vector<bool>{true, true}));
}

// However often a rank asks: members that met for it before every step would never end one.
TEST(RollCall, WhoAsksToComeBackComesBehindAStepOfTheOthers) {
  const auto groups = create_thread_group(2, {});
  Agreement stayed(groups[0]->store(), 0, 2);
  stayed.settle({false, true}, none);
  ScriptedStore store(groups[1]->store());
  Agreement lost(store, 1, 2);
  EXPECT_THROW(lost.join({}), FaultError) << "nobody holds a roll call";
  EXPECT_FALSE(stayed.should_meet()) << "no step is finished under this mask";
  EXPECT_EQ(stayed.finish({}), Agreement::Finish::all) << "who asks ends no step";
  EXPECT_TRUE(stayed.should_meet());
  store.meanwhile = [&] { stayed.settle({false, false}, none); };
  lost.join({});
  EXPECT_FALSE(stayed.should_meet());
  // A member's place: the others may be waiting in their step for the process that it had before.
  EXPECT_THROW(Agreement(store, 1, 2).join({}), FaultError);
  EXPECT_TRUE(stayed.should_meet());
  EXPECT_EQ(stayed.finish({}), Agreement::Finish::called);
}

/// What nodes of one rank each say that they did not hear when they met, bits of nodes, and who is in after the next roll call.
struct Cut {
  const char* what;
  std::vector<std::uint32_t> unheard;
  std::vector<bool> live;
};

// All come to both roll calls: nobody is missing, and yet they cannot work together.
TEST(RollCall, NodesThatDoNotHearEachOtherAreParted) {
  const Cut cuts[] = {{"nobody hears node 0", {0b1110, 0b0001, 0b0001, 0b0001}, {false, true, true, true}},
                      {"one link", {0, 0b0100, 0b0010, 0}, {true, true, false, true}},
                      {"two links of one node", {0b0010, 0b1001, 0, 0b0010}, {true, false, true, true}},
                      {"two halves", {0b1100, 0b1100, 0b0011, 0b0011}, {true, true, false, false}},
                      {"only one side says so: it was late", {0b1110, 0, 0, 0}, {true, true, true, true}}};
  for (const Cut& cut : cuts) {
    SCOPED_TRACE(cut.what);
    const auto groups = create_thread_group(4, {});
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        const auto i = static_cast<std::size_t>(rank);
        const Patience patience{std::chrono::seconds(20), std::chrono::seconds(60)};
        const std::vector<bool> nobody(4, false);
        Store& store = groups[i]->store();
        Agreement agreement(store, rank, 4, 1);
        agreement.settle(nobody, patience);
        EXPECT_EQ(agreement.members().live, std::vector<bool>(4, true));
        groups[i]->barrier("nobody is a roll call ahead");
        std::uint64_t none_yet = 0;
        EXPECT_TRUE(store.compare_set({StoreKey::Kind::unheard, rank}, none_yet, std::uint64_t{1} << 32 | cut.unheard[i]));
        groups[i]->barrier("all have spoken");
        if (cut.live[i]) {
          agreement.settle(nobody, patience);
          EXPECT_EQ(agreement.members().live, cut.live);
        } else {
          EXPECT_THROW(agreement.settle(nobody, patience), LostRankError);
        }
      });
    }
  }
}

// A node of which nobody comes is not waited for as long as ranks that no error has named; of one that has lost a rank, the others.
TEST(RollCall, ASuspectsNodeIsGivenUpWhereNobodyOfItComes) {
  const Patience patience{std::chrono::seconds(0), std::chrono::seconds(3600), std::chrono::seconds(0)};
  const auto groups = create_thread_group(4, {});
  Agreement stayed(groups[0]->store(), 0, 4, 2);
  std::jthread second([&] {
    Agreement other(groups[1]->store(), 1, 4, 2);
    other.settle({false, false, true, false}, patience);
    EXPECT_EQ(other.members().live, (std::vector<bool>{true, true, false, false}));
  });
  stayed.settle({false, false, true, false}, patience);
  EXPECT_EQ(stayed.members().live, (std::vector<bool>{true, true, false, false}));
}

}  // namespace
}  // namespace heddle
