// The agreement under recovery, step by step: what others do meanwhile happens inside a rank's wait.
#include <gtest/gtest.h>

#include <functional>
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

}  // namespace
}  // namespace heddle
