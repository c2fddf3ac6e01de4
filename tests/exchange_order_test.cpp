// Calls in the wrong order are told so, and calls that only take their time are not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "exchange/call_order.hpp"
#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// What an exchange on a GPU knows of calls that were captured: a replay may have come before any combine.
TEST(Order, CapturedCallsAreTakenOnTrust) {
  const auto refused = ThrowsMessage<InputError>(HasSubstr("combine without a dispatch"));
  CallOrder order;
  EXPECT_THAT([&] { order.need_dispatch(false, "normal"); }, refused);
  EXPECT_NO_THROW(order.need_dispatch(true, "normal")) << "a captured combine runs later";
  order.dispatch(false);
  order.combine(true);
  EXPECT_NO_THROW(order.need_dispatch(false, "normal")) << "a captured combine has not run";
  order.combine(false);
  EXPECT_THAT([&] { order.need_dispatch(false, "normal"); }, refused);
  order.dispatch(false);
  order.fail();
  EXPECT_THAT([&] { order.need_dispatch(false, "normal"); }, refused);
  order.dispatch(true);
  for (int replay = 0; replay < 3; ++replay) {
    EXPECT_NO_THROW(order.need_dispatch(false, "normal"));
    order.combine(false);
  }
}

TEST(Order, CombineWithoutADispatchIsNamedAndHarmsNothing) {
  constexpr int ranks = 2;
  for (const ExchangeOptions& options : every_way(64, 6, ranks, 2, 5)) {
    Case c;
    c.options = options;
    c.tokens = {5, 3};
    run_ranks(ranks, {}, [&](Group& group) {
      const ExchangeMemory memory = exchange_memory(c.options);
      Workspace workspace(group, memory.heap_bytes(ranks), describe(c.options));
      const auto exchange = create_exchange(workspace, c.options, memory);
      const std::vector<bf16> rows(static_cast<std::size_t>(64 * 64 * c.options.topk));
      const auto expect_refused = [&](const char* when) {
        SCOPED_TRACE(testing::Message() << title(options) << ", rank " << group.rank() << ", " << when);
        const auto refused = ThrowsMessage<InputError>(HasSubstr("combine without a dispatch before it"));
        std::vector<bf16> out(rows.size());
        CombineOutput output;
        output.out = output.all_out = out.data();
        EXPECT_THAT([&] { exchange->combine_send(rows.data()); }, refused);
        EXPECT_THAT([&] { exchange->combine_receive(output); }, refused);
      };
      expect_refused("before the first dispatch");
      for (int round = 0; round < 3; ++round) {
        round_trip(*exchange, c, group.rank(), round);
        expect_refused("after a combine");
      }
      workspace.close();
    });
    if (testing::Test::HasFailure()) return;
  }
}

// One worker moves all rows of normal and is slow about it, so that the transfer lasts several deadlines; its fellow has none to
// move and waits for it. Rows keep moving, so nobody may give up.
TEST(Order, ATransferLongerThanTheDeadlineIsNoFaultWhileRowsMove) {
  constexpr std::chrono::milliseconds deadline(sanitized ? 1000 : 400);
  constexpr std::chrono::milliseconds pause(sanitized ? 5 : 2);
  constexpr int ranks = 2;
  constexpr int rows = 150;
  Case c;
  c.options = options_for(Way::normal, 64, 4, ranks, 1, rows);
  c.options.workers = 2;
  c.options.queue_rows = 8;
  c.options.chunk_rows = 1;
  c.tokens = {rows, 0};
  c.none = 0;
  c.hot = 1;
  run_ranks(ranks, {deadline}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(ranks), describe(c.options));
    if (group.rank() == 0) set_verb_hook([&] { std::this_thread::sleep_for(pause); });
    const auto exchange = create_exchange(workspace, c.options, memory);
    set_verb_hook({});
    const auto since = std::chrono::steady_clock::now();
    round_trip(*exchange, c, group.rank(), 0);
    EXPECT_GT(std::chrono::steady_clock::now() - since, 3 * deadline) << "the transfer was too short to show anything";
    workspace.close();
  });
}

}  // namespace
}  // namespace heddle
