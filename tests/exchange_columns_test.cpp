// A warp gives each column of a table a thread, so no protocol may spread a table with more columns than the smallest launch has
// threads: the ranks of a large group are more. The choices of a token never are (a GPU refuses more).
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "exchange/host_exchange.hpp"
#include "exchange/normal/protocol.hpp"

namespace heddle {
namespace {

class Recorder : public HostWorker {
 public:
  using HostWorker::HostWorker;
  template <class F>
  void spread(int rows, int columns, F f) {
    widest = std::max(widest, columns);
    HostWorker::spread(rows, columns, [&](int row, int column) {
      ++cells;
      f(row, column);
    });
  }
  int widest = 0;
  int cells = 0;
};

/// The first half of normal's dispatch on the only live rank of a group, whose tokens all go to itself.
void expect_narrow_tables(int ranks) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks");
  constexpr int tokens = 3;
  NormalLayout layout;
  layout.shape = {ranks, ranks, 1, 1, tokens};
  layout.wire = layout.returned = {Wire::bf16, 64, {}, 1.0f};
  layout.areas = place_areas(ranks, layout.dispatch_bytes(), layout.combine_bytes(), 0);
  std::vector<std::byte> part(layout.areas.end + 128);  // of rank 0: nobody touches another one
  HeapView heap;
  heap.base = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::uintptr_t>(part.data()), 128));
  heap.stride = layout.areas.end;
  heap.ranks = ranks;
  heap.rank = 0;
  std::vector<bool> live(static_cast<std::size_t>(ranks), false);
  live[0] = true;
  HostTeam team;
  team.heap = heap;
  team.deadline = std::chrono::seconds(20);
  team.live = &live;
  Recorder w(team, 0);
  w.start(CallPart::dispatch_send);

  // An expert a rank.
  const Placement placement = Placement::contiguous(ranks, ranks);
  const std::vector<int> experts_on(static_cast<std::size_t>(ranks), 1);
  const PlacementView view{placement.rank_map().data(), placement.local_index_map().data(), experts_on.data(), ranks};
  const std::vector<bf16> hidden(tokens * 64);
  const std::vector<std::int32_t> ids(tokens, 0);
  const std::vector<float> weights(tokens, 1.0f);
  HostNumbering sent(experts_on.size() * tokens, experts_on.size());
  std::vector<std::int32_t> arrived(experts_on.size(), -1);
  std::vector<std::int32_t> listed(experts_on.size() * tokens, -1);
  NormalScratch scratch;
  scratch.sent = sent.view();
  scratch.arrived = arrived.data();
  scratch.tokens = listed.data();
  const SendInput input{tokens, 1, hidden.data(), ids.data(), weights.data()};
  ASSERT_TRUE(normal_exchange_counts(w, layout, input, view, scratch));
  EXPECT_LE(w.widest, most_spread_columns);
  EXPECT_EQ(w.cells, tokens * ranks) << "every token is looked at for every rank";
  EXPECT_EQ(arrived[0], tokens);
  for (int token = 0; token < tokens; ++token) EXPECT_EQ(listed[static_cast<std::size_t>(token)], token);
}

TEST(Columns, AreNeverMoreThanASmallLaunchHasThreads) {
  for (const int ranks : {1, 32, 256, 257, 600, 1024}) expect_narrow_tables(ranks);
}

}  // namespace
}  // namespace heddle
