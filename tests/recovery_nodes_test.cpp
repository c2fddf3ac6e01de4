// Recovery over several nodes, ranks as processes with sockets between nodes and a store in a directory: nodes and ranks of them
// are killed, stopped and cut off, in every phase of a step and between steps; who is left goes on with the bits of the smaller
// group.
#include "recovery_nodes.hpp"
#include <barrier>

#include "group/era_link.hpp"
#include "group/memory_link.hpp"

namespace heddle::layer_test {
namespace {

constexpr int nodes = 3, inside = 2;

template <class Play>
void over_nodes(const char* what, const Play& play) {
  for (const NodeRoute& route : node_routes()) {
    NodesPlay group(route, nodes, inside, "test.recovery.nodes." + std::string(what) + "." + std::to_string(getpid()));
    SCOPED_TRACE(testing::Message() << text_of(group.scene().c));
    SharedBoard board;
    {
      Cast cast(group.scene(), *board);
      ASSERT_TRUE(cast.all_go_on());
      play(group, cast, *board);
      if (!testing::Test::HasFailure()) cast.end();
    }
    for (const Board::Seat& seat : board->seats) EXPECT_EQ(seat.wrong, 0u);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RecoveryNodes, AKilledRankIsLeftOutAndAnotherProcessTakesItsPlace) {
  over_nodes("rank", [](NodesPlay&, Cast& cast, Board& board) {
    for (const Place place : {Place::verb, Place::gemm, Place::store, Place::between}) {
      SCOPED_TRACE(static_cast<int>(place));
      arm(board.seats[3], place, place == Place::verb || place == Place::store ? 7 : 1, SIGKILL);
      ASSERT_TRUE(cast.wait_for_death(3, SIGKILL));
      ASSERT_TRUE(cast.others_go_on(1u << 3));
      cast.start(3, Entry::late);
      ASSERT_TRUE(cast.all_go_on());
    }
  });
}

TEST(RecoveryNodes, AKilledNodeIsLeftOutAndComesBackAsAWhole) {
  over_nodes("node", [](NodesPlay& group, Cast& cast, Board&) {
    for (int node = 0; node < nodes; ++node) {
      SCOPED_TRACE(node);
      for (int rank = node * inside; rank < (node + 1) * inside; ++rank) cast.send(rank, SIGKILL);
      for (int rank = node * inside; rank < (node + 1) * inside; ++rank) ASSERT_TRUE(cast.wait_for_death(rank, SIGKILL));
      ASSERT_TRUE(cast.others_go_on(group.bits_of_node(node)));
      group.anew() = group.bits_of_node(node);
      for (int rank = node * inside; rank < (node + 1) * inside; ++rank) cast.start(rank, Entry::late);
      ASSERT_TRUE(cast.all_go_on());
      group.anew() = 0;
    }
  });
}

TEST(RecoveryNodes, OneNodeMayBeLeft) {
  over_nodes("last", [](NodesPlay& group, Cast& cast, Board&) {
    for (int rank = inside; rank < nodes * inside; ++rank) cast.send(rank, SIGSTOP);
    ASSERT_TRUE(cast.others_go_on(group.bits_of_node(1) | group.bits_of_node(2)));
    for (int rank = inside; rank < nodes * inside; ++rank) cast.send(rank, SIGCONT);
    ASSERT_TRUE(cast.all_go_on());
  });
}

TEST(RecoveryNodes, ANodeThatIsCutOffFromAllSaysSoAndComesBack) {
  over_nodes("cut", [](NodesPlay& group, Cast& cast, Board& board) {
    for (const int node : {2, 0}) {
      group.switches().no_store = group.bits_of_node(node);
      group.switches().no_network = group.bits_of_node(node);
      ASSERT_TRUE(cast.others_go_on(group.bits_of_node(node)));
      group.switches().no_network = 0;
      group.switches().no_store = 0;
      ASSERT_TRUE(cast.all_go_on());
      for (int place = 0; place < inside; ++place) {
        const Board::Seat& seat = board.seats[static_cast<std::size_t>(node * inside + place)];
        EXPECT_GT(seat.cuts, 0u) << "the store was out of reach of node " << node;
      }
    }
  });
}

// Both sides of a cut reach the store, and all come to every roll call; which side is left out, recovery_agreement_test knows.
TEST(RecoveryNodes, ANodeThatOthersDoNotHearIsLeftOutThoughItReachesTheStore) {
  over_nodes("link", [](NodesPlay& group, Cast& cast, Board& board) {
    for (const int node : {0, 1}) {
      const auto losses = [&] {
        return board.seats[static_cast<std::size_t>(node * inside)].losses +
               board.seats[static_cast<std::size_t>(node * inside + 1)].losses;
      };
      const std::uint32_t before = losses();
      group.switches().no_network = group.bits_of_node(node);
      ASSERT_TRUE(cast.wait_until(std::chrono::seconds(40), [&] { return losses() > before; }));
      // It tries to come back all the while, which does not keep the others from their steps.
      const int other = (node + 1) % nodes * inside;
      const std::uint32_t left_behind = board.seats[static_cast<std::size_t>(other)].steps;
      EXPECT_TRUE(cast.wait_until(std::chrono::seconds(40),
                                  [&] { return board.seats[static_cast<std::size_t>(other)].steps >= left_behind + 20; }))
          << "steps: " << left_behind << ", then " << board.seats[static_cast<std::size_t>(other)].steps;
      group.switches().no_network = 0;
      ASSERT_TRUE(cast.all_go_on());
    }
  });
}

// Ranks as threads: what the store of virtual nodes is, and what a sanitizer can see.
TEST(RecoveryNodes, VirtualNodesArePartedWhereTheirLinkIsCut) {
  for (const NodeRoute& route : node_routes()) {
    Case c = recovery_case(4, {Way::elastic, route.reduce}, 0);
    c.options.mode = route.mode;
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    Wanted wanted(source, c);
    const std::vector<bool> all(4, true), first_node{true, true, false, false};
    const std::vector<std::vector<bf16>> before{wanted.of(0, all, 0), wanted.of(1, all, 0), wanted.of(2, all, 0),
                                                wanted.of(3, all, 0)};
    const std::vector<std::vector<bf16>> after{wanted.of(0, first_node, 0), wanted.of(1, first_node, 0)};
    const auto groups = create_virtual_nodes(2, 2, {std::chrono::milliseconds(60000)});
    std::barrier at_the_cut(4);
    std::vector<std::jthread> threads;
    for (const auto& one : groups) {
      threads.emplace_back([&, group = one.get()] {
        const auto rank = static_cast<std::size_t>(group->rank());
        const Tokens tokens = draw_tokens(c, 0);
        std::vector<bf16> out;
        RecoveryOptions options;
        options.grace = std::chrono::milliseconds(20000);  // both sides suspect each other, and both come
        options.patience = std::chrono::milliseconds(20000);
        RecoveringLayers layers(*group, {{&source, c.placement, c.options}}, options);
        const auto step = [&] { layers.step([&] { out = call(c, layers.layer(0), tokens, group->rank()); }); };
        step();
        EXPECT_EQ(different_bits(out, before[rank]), 0u) << "rank " << rank;
        at_the_cut.arrive_and_wait();
        group->set_deadline(std::chrono::milliseconds(is_sanitized ? 3000 : 500));
        dynamic_cast<MemoryLink&>(dynamic_cast<EraLink&>(*group->link()).inner()).queues().cut(2, 2);
        if (rank >= 2) {
          EXPECT_THROW(step(), LostRankError);
          return;
        }
        for (int i = 0; i < 3; ++i) {
          step();
          EXPECT_EQ(different_bits(out, after[rank]), 0u) << "rank " << rank;
          EXPECT_EQ(layers.members().live, first_node);
        }
      });
    }
  }
}

TEST(RecoveryNodes, APlaceThatIsNoneIsRefusedByItsNumbers) {
  const auto message = [](const NodePlace& mine) -> std::string {
    try {
      join_nodes("test.recovery.nodes.place", mine, create_memory_links(1).front());
    } catch (const InputError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_NE(message({2, 0, 2, 4}).find("rank 0 of node 2: there are 2 nodes of 4 ranks"), std::string::npos);
  EXPECT_NE(message({0, -1, 2, 4}).find("rank -1 of node 0"), std::string::npos);
  EXPECT_NE(message({0, 0, 0, 4}).find("0 nodes of 4 ranks"), std::string::npos);
}

TEST(RecoveryNodes, AGroupWithoutAStoreIsRefusedByName) {
  const std::string name = "test.recovery.nodes.store." + std::to_string(getpid());
  const auto group = join_nodes(name, NodePlace{}, create_memory_links(1).front());
  const Case c = recovery_case(1, {Way::elastic, Reduce::rank}, 0);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  try {
    RecoveringLayers(*group, {{&source, c.placement, c.options}});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("open_directory_store"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace heddle::layer_test
