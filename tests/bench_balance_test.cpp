// What `heddle bench balance` makes of the calls of a load, on made-up ones: its phases, what it says of a change, and lines.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "balance.hpp"

namespace heddle::tool {
namespace {

BalanceCall call(double call_us, double between_us, bool is_moving, std::int64_t switches) {
  return {call_us, between_us, 3 * call_us, is_moving, switches, 0};
}

/// Two calls before, three during (with a switch on the way to the goal), two after; behind the last one something else begins.
std::vector<BalanceCall> one_change() {
  return {call(10, 1, false, 4), call(12, 1, true, 4),  call(14, 2, true, 4), call(20, 9, true, 5),
          call(16, 7, false, 6), call(11, 1, false, 6), call(13, 1, true, 6), call(99, 1, true, 6)};
}

TEST(BalancePhases, AreFoundBetweenDecisionAndLastSwitch) {
  const auto phases = phases_of(one_change());
  ASSERT_TRUE(phases.has_value());
  EXPECT_EQ(phases->decided, 1u);
  EXPECT_EQ(phases->switched, 4u);
  EXPECT_EQ(phases->end, 7u) << "the call behind which the next change began still ran under the placement of this one";
}

TEST(BalancePhases, AreNoneWithoutAWholeChange) {
  std::vector<BalanceCall> calls(3, call(10, 1, false, 0));
  EXPECT_FALSE(phases_of(calls)) << "nothing changed";
  EXPECT_FALSE(phases_of({}));
  calls.push_back(call(10, 1, true, 0));
  EXPECT_FALSE(phases_of(calls)) << "it has not come to its end";
  calls.push_back(call(10, 1, false, 1));
  EXPECT_FALSE(phases_of(calls)) << "there is no call behind it";
  calls.push_back(call(10, 1, false, 1));
  EXPECT_TRUE(phases_of(calls));
}

TEST(BalanceReport, SaysWhatAChangeTook) {
  const std::vector<BalanceCall> calls = one_change();
  BalanceChange change;
  change.experts = 5;
  change.sent_bytes = {3e6, 8e6, 1e6};
  change.sent_seconds = {1e-3, 2e-3, 0.0};
  change.decision_to_switch_us = 77;
  change.before = {90, 1.8};
  change.after = {60, 1.2};
  auto entry = balance_entry(calls, *phases_of(calls), change);
  EXPECT_EQ(entry["changed"], true);
  EXPECT_EQ(entry["before"]["samples_us"], (std::vector<double>{10, 12}));
  EXPECT_EQ(entry["during"]["samples_us"], (std::vector<double>{14, 20, 16}));
  EXPECT_EQ(entry["during"]["median_us"], 16.0);
  EXPECT_EQ(entry["during"]["most_us"], 20.0);
  EXPECT_EQ(entry["during"]["calls"], 3);
  EXPECT_EQ(entry["before"]["between"]["samples_us"], (std::vector<double>{1}));
  EXPECT_EQ(entry["during"]["between"]["samples_us"], (std::vector<double>{1, 2, 9, 7})) << "with that behind the decision's call";
  EXPECT_EQ(entry["after"]["samples_us"], (std::vector<double>{11, 13}));
  EXPECT_EQ(entry["switches"], 2);
  EXPECT_EQ(entry["switches_us"], (std::vector<double>{9, 7}));
  EXPECT_EQ(entry["switch_us"], 9.0);
  EXPECT_EQ(entry["calls_to_switch"], 3);
  EXPECT_EQ(entry["decision_to_switch_us"], 77.0);
  EXPECT_EQ(entry["decision_host_us"], 36.0);
  EXPECT_EQ(entry["usual_host_us"], 36.0);
  EXPECT_EQ(entry["decision_between_us"], 1.0);
  EXPECT_EQ(entry["later_switches"], 0);
  EXPECT_DOUBLE_EQ(entry["copy_bytes_per_second"].get<double>(), 4e9) << "of the GPU that copied longest";
  EXPECT_EQ(entry["rows_before"]["busiest"], 90);
  EXPECT_EQ(entry["rows_after"]["max_over_mean"], 1.2);

  entry.update({{"tokens", 64}, {"way", "mega"}, {"load", 2}});
  const std::string line = balance_line(entry);
  for (const char* part :
       {"64 mega", "12.00     12.00", "16.00     20.00", "13.00     13.00", " 12.0 ", " 77.0 ", "4.0", "1.800 to 1.200"})
    EXPECT_NE(line.find(part), std::string::npos) << "'" << part << "' in " << line;
}

TEST(BalanceReport, CopiesThatTookNoTimeHaveNoRate) {
  const std::vector<BalanceCall> calls = one_change();
  auto entry = balance_entry(calls, *phases_of(calls), {0, {0.0}, {0.0}, 1, {1, 1}, {1, 1}});
  EXPECT_TRUE(entry["copy_bytes_per_second"].is_null());
  entry.update({{"tokens", 1}, {"way", "gather"}, {"load", 1}});
  EXPECT_NE(balance_line(entry).find(" - "), std::string::npos) << balance_line(entry);
}

TEST(BalanceReport, AChangeThatBeginsWithTheFirstCallHasNothingBetweenCallsBeforeIt) {
  const std::vector<BalanceCall> calls{call(12, 1, true, 0), call(14, 2, false, 1), call(11, 1, false, 1)};
  const auto entry = balance_entry(calls, *phases_of(calls), {});
  EXPECT_EQ(entry["before"]["calls"], 1);
  EXPECT_TRUE(entry["before"]["between"]["least_us"].is_null());
  EXPECT_TRUE(entry["before"]["between"]["samples_us"].empty());
}

TEST(BalanceReport, SaysThatNothingChanged) {
  auto entry = balance_calls(std::vector<BalanceCall>(3, call(10, 1, false, 0)));
  EXPECT_EQ(entry["changed"], false);
  entry.update({{"tokens", 8}, {"way", "normal"}, {"load", 1}, {"imbalance", 1.01}, {"expected", 1.005}});
  EXPECT_NE(balance_line(entry).find("no change: max/mean of rows 1.010, and 1.005 by the best"), std::string::npos)
      << balance_line(entry);
}

}  // namespace
}  // namespace heddle::tool
