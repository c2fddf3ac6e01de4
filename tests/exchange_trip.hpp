// One checked round trip of one rank, in one piece or in halves with other work in between.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "exchange_support.hpp"
#include "heddle/group.hpp"

namespace heddle {

/// How a round trip is made, beside what the case says.
struct TripOptions {
  std::vector<bool> live;                    ///< empty: all
  bool all_outputs = false;                  ///< every rank wants the outputs of all ranks
  bool shared = false;                       ///< a shared expert's rows are added last
  std::function<void(int)> between;          ///< other work after the half of this number (0 to 2)
  std::function<void(const Arrived&)> look;  ///< at what arrived
};

/// Fills everything behind a rank's words with 0xFF before the first call: NaNs and ids out of range for
/// whoever reads what nobody has written.
inline void poison_heap(Workspace& workspace, const ExchangeMemory& memory) {
  const Areas areas = areas_of(memory, workspace.group().ranks());
  std::memset(workspace.view().mine<std::byte>(areas.dispatch), 0xFF, areas.end - areas.dispatch);
  workspace.group().barrier("poisoned heaps");
}

/// Rows [first, first + own) of all ranks' outputs belong to `rank`.
inline int first_output(const Case& c, int rank) {
  int first = 0;
  for (int r = 0; r < rank && !c.tensor_parallel(); ++r) first += c.tokens_of(r);
  return first;
}

/// Dispatch, the stand-ins, combine; outputs are compared bit for bit, and nothing behind them may be
/// touched. Errors of the library pass through.
inline void round_trip(Exchange& exchange, const Case& c, int rank, int round, const TripOptions& trip = {}) {
  SCOPED_TRACE(testing::Message() << title(c.options) << ", rank " << rank << ", round " << round << ", seed " << c.seed);
  const auto hidden = static_cast<std::size_t>(c.options.hidden);
  const RankData data = draw(c, rank, round);
  const auto pass = [&trip](int half) {
    if (trip.between) trip.between(half);
  };
  exchange.dispatch_send(data.input(c.tokens_of(rank)), {c.most_tokens(), Phase::decode});
  pass(0);
  const Arrived arrived = exchange.dispatch_receive();
  ASSERT_EQ(arrived.layout, c.options.arrived);
  if (trip.look) trip.look(arrived);
  const std::vector<bf16> results = run_experts(c, arrived, rank);
  pass(1);
  exchange.combine_send(results.data());
  pass(2);

  const std::vector<bf16> want = expected(c, data, trip.live, trip.shared);
  const std::size_t all = c.tensor_parallel() ? want.size() : static_cast<std::size_t>(first_output(c, c.ranks())) * hidden;
  std::vector<bf16> out(want.size() + 1, poison);
  std::vector<bf16> all_out(all + 1, poison);
  CombineOutput output;
  output.out = out.data();
  output.shared = trip.shared ? data.shared.data() : nullptr;
  if (trip.all_outputs || c.tensor_parallel()) {
    output.all_out = all_out.data();
    output.first = first_output(c, rank);
    output.all_tokens = static_cast<int>(all / hidden);
  }
  exchange.combine_receive(output);
  if (!c.tensor_parallel()) {
    EXPECT_EQ(differences(want, out.data()), 0);
    EXPECT_EQ(out.back().bits, poison.bits);
  }
  if (output.all_out == nullptr) return;
  for (int r = 0; r < (c.tensor_parallel() ? 1 : c.ranks()); ++r) {
    if (!c.tensor_parallel() && !is_live(trip.live, r)) continue;
    const auto begin = static_cast<std::size_t>(first_output(c, r)) * hidden;
    EXPECT_EQ(differences(expected(c, draw(c, r, round), trip.live, trip.shared), all_out.data() + begin), 0)
        << "outputs of rank " << r;
  }
  EXPECT_EQ(all_out.back().bits, poison.bits);
}

}  // namespace heddle
