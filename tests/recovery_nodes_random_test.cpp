// Random faults over groups of several nodes: ranks and whole nodes are killed, stopped and cut off, from the network, from the
// store or from both, one or two at once, at random times and places, and come back after random times. Never a hang, never a wrong
// answer, never two masks. Nothing here judges by time: a rank that this machine delays too long is one more that is lost.
#include "recovery_nodes.hpp"

namespace heddle::layer_test {
namespace {

constexpr int nodes = 3, inside = 2, ranks = nodes * inside;
constexpr int faults_a_route = is_sanitized ? 3 : 12;

class Injector {
 public:
  Injector(NodesPlay& group, Cast& cast, Board& board, std::uint64_t seed)
      : group_(group), cast_(cast), board_(board), chance_(seed), deadline_(group.scene().deadline) {}

  /// One or two faults at about the same time; in the end all ranks are in again. How many there were.
  int inject() {
    const int faults = chance_.one_in(3) ? 2 : 1;
    const int first = chance_.between(0, nodes - 1);
    for (int i = 0; i < faults; ++i) {
      if (i > 0) sleep_up_to(2 * deadline_);
      hit((first + i) % nodes);
    }
    sleep_up_to(4 * deadline_);
    mend();
    EXPECT_TRUE(cast_.all_go_on()) << "a rank hangs, or does not come back";
    return faults;
  }

 private:
  void hit(int node) {
    const std::uint32_t whole = group_.bits_of_node(node);
    const int place = chance_.between(0, inside - 1);
    const std::uint32_t bits = chance_.one_in(2) ? whole : 1u << (node * inside + place);
    switch (chance_.between(0, 4)) {
      case 0:
        return end(bits, SIGKILL);
      case 1:
        return end(bits, SIGSTOP);
      case 2:
        std::printf("node %d is cut off\n", node);
        group_.switches().no_store |= whole;
        group_.switches().no_network |= whole;
        return;
      case 3:
        std::printf("node %d has no network\n", node);
        group_.switches().no_network |= whole;
        return;
      default:
        std::printf("ranks %x have no store\n", bits);
        group_.switches().no_store |= bits;
    }
  }

  void end(std::uint32_t bits, int signal) {
    std::printf("%s ranks %x", signal == SIGKILL ? "kill" : "stop", bits);
    const bool at_a_place = (bits & (bits - 1)) == 0 && chance_.one_in(2);
    const Place place = chance_.one_of({Place::verb, Place::store, Place::between});
    const int times = chance_.between(1, 60);
    if (at_a_place) std::printf(" at place %d, time %d", static_cast<int>(place), times);
    std::printf("\n");
    sleep_up_to(std::chrono::milliseconds(20));
    each(bits, [&](int rank) {
      at_a_place ? arm(board_.seats[static_cast<std::size_t>(rank)], place, times, signal) : cast_.send(rank, signal);
    });
    each(bits, [&](int rank) {
      const bool came = signal == SIGKILL ? cast_.wait_for_death(rank, SIGKILL) : cast_.wait_for_stop(rank);
      EXPECT_TRUE(came) << "the fault of rank " << rank << " did not come";
    });
    (signal == SIGKILL ? killed_ : stopped_) |= bits;
  }

  void mend() {
    group_.switches().no_network = 0;
    group_.switches().no_store = 0;
    each(stopped_, [&](int rank) { cast_.send(rank, SIGCONT); });
    for (int node = 0; node < nodes; ++node) {
      const std::uint32_t whole = group_.bits_of_node(node);
      if ((killed_ & whole) == whole) group_.anew() |= whole;
    }
    each(killed_, [&](int rank) { cast_.start(rank, Entry::late); });
    stopped_ = killed_ = 0;
    // Who starts reads it once, before it is in.
    EXPECT_TRUE(cast_.all_go_on());
    group_.anew() = 0;
  }

  template <class F>
  static void each(std::uint32_t bits, const F& f) {
    for (int rank = 0; rank < ranks; ++rank) {
      if ((bits >> rank & 1) != 0) f(rank);
    }
  }
  void sleep_up_to(std::chrono::milliseconds longest) {
    std::this_thread::sleep_for(std::chrono::microseconds(chance_.between(0, static_cast<int>(longest.count()) * 1000)));
  }

  NodesPlay& group_;
  Cast& cast_;
  Board& board_;
  Chance chance_;
  std::chrono::milliseconds deadline_;
  std::uint32_t killed_ = 0, stopped_ = 0;
};

TEST(RecoveryNodesRandom, FaultsNeverHangNeverGiveWrongBitsNeverMakeTwoMasks) {
  std::uint64_t seed = announced_seed();
  for (const NodeRoute& route : node_routes()) {
    NodesPlay group(route, nodes, inside, "test.recovery.nodes.random." + std::to_string(getpid()));
    SCOPED_TRACE(testing::Message() << text_of(group.scene().c));
    SharedBoard board;
    Cast cast(group.scene(), *board);
    ASSERT_TRUE(cast.all_go_on());
    Injector injector(group, cast, *board, seed++);
    int faults = 0;
    while (faults < faults_a_route && !testing::Test::HasFailure()) faults += injector.inject();
    if (!testing::Test::HasFailure()) cast.end();
    std::uint32_t losses = 0, comebacks = 0, interruptions = 0, cuts = 0;
    for (const Board::Seat& seat : board->seats) {
      losses += seat.losses;
      cuts += seat.cuts;
      comebacks += seat.comebacks;
      interruptions += seat.interruptions;
      EXPECT_EQ(seat.wrong, 0u);
    }
    std::printf(
        "%d faults, %u ranks learned that they were out, %u that they do not reach the store, %u came back, "
        "%u interruptions, %u steps\n",
        faults, losses, cuts, comebacks, interruptions, static_cast<unsigned>(board->seats[0].steps));
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace heddle::layer_test
