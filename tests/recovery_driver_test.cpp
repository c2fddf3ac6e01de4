// The loop around the agreement, with an engine that only fails: whom an error of a step makes suspect, and when it gives up.
#include "recovery/driver.hpp"

#include "layer_support.hpp"

namespace heddle {
namespace {

using std::chrono::seconds;

RecoveryOptions options_of(std::chrono::nanoseconds patience) {
  RecoveryOptions options;
  options.grace = std::chrono::milliseconds(10);
  options.patience = std::chrono::duration_cast<std::chrono::milliseconds>(patience);
  return options;
}

FaultError names(int rank, int peer) { return FaultError({rank, peer, "test", "word", 1, 0}); }

/// A step that names nobody every time.
void expect_given_up(RecoveryDriver& driver) {
  try {
    driver.step([&] { throw names(driver.rank(), -1); });
    ADD_FAILURE() << "the step ended";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::fault);
    EXPECT_NE(std::string(error.what()).find("8 roll calls in a row lost no rank"), std::string::npos) << error.what();
  }
}

/// A rank that the others were ahead of goes through two at once, and makes things for the second alone.
void expect_eight_roll_calls(const RecoveryDriver& driver, int made) {
  EXPECT_GE(driver.members().generation, 8u);
  EXPECT_GE(made, 1);
  EXPECT_LE(made, 8);
}

// Members that bring two ranks each: member 2 is gone, and errors name its rank 4 or 5. Who waits for its whole patience has not
// understood whose rank that is.
TEST(RecoveryDriver, ErrorsOfAStepNameRanksOfTheWorkspace) {
  constexpr seconds patience(60);
  run_ranks(3, {}, [&](Group& group) {
    if (group.rank() == 2) return;
    RecoveryDriver driver(group, options_of(patience),
                          {[] {}, [](const Members&, Interruption&) {}, [](int rank) { return rank / 2; }});
    driver.start(Entry::together);
    driver.step([&] {
      if (driver.members().live[2]) throw names(2 * group.rank(), 4 + group.rank());
    });
    EXPECT_EQ(driver.members().live, (std::vector<bool>{true, true, false}));
    ASSERT_EQ(driver.interruptions().size(), 1u);
    EXPECT_LT(driver.interruptions().front().agree, std::chrono::duration<double>(patience).count() / 2);
  });
}

TEST(RecoveryDriver, GivesUpWhereRollCallsLoseNobodyAndNothingCanBeMade) {
  run_ranks(2, {}, [&](Group& group) {
    bool is_whole = true;
    int tried = 0;
    RecoveryDriver driver(group, options_of(seconds(20)),
                          {[] {},
                           [&](const Members&, Interruption&) {
                             if (is_whole) return;
                             ++tried;
                             throw names(group.rank(), -1);
                           },
                           [](int rank) { return rank; }});
    driver.start(Entry::together);
    is_whole = false;
    expect_given_up(driver);
    expect_eight_roll_calls(driver, tried);
    is_whole = true;
    bool ran = false;
    driver.step([&] { ran = true; });  // what could not be made then is made now
    EXPECT_TRUE(ran);
  });
}

// What a roll call does not mend need not be in what it makes: a step may fail every time that it is run.
TEST(RecoveryDriver, GivesUpWhereAStepFailsEveryTimeAndNobodyIsLost) {
  run_ranks(2, {}, [&](Group& group) {
    int made = -1;  // once at the start
    RecoveryDriver driver(group, options_of(seconds(20)),
                          {[] {}, [&](const Members&, Interruption&) { ++made; }, [](int rank) { return rank; }});
    driver.start(Entry::together);
    expect_given_up(driver);
    expect_eight_roll_calls(driver, made);
    bool ran = false;
    driver.step([&] { ran = true; });
    EXPECT_TRUE(ran);
  });
}

}  // namespace
}  // namespace heddle
