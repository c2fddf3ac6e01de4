// A hundred random faults over groups of processes: ranks are killed and stopped at random times and places, one or several at
// once, and are replaced or let go after random times. Never a hang, never a wrong answer, never two masks; who was taken for dead
// and lives, comes back. Nothing here judges by time: a rank that this machine delays too long is one more that is lost.
#include "recovery_processes.hpp"

namespace heddle::layer_test {
namespace {

constexpr int ranks = 4;
constexpr int faults_a_way = is_sanitized ? 4 : 15;  // 7 ways: 105

class Injector {
 public:
  Injector(Cast& cast, Board& board, std::uint64_t seed, std::chrono::milliseconds deadline)
      : cast_(cast), board_(board), chance_(seed), deadline_(deadline) {}

  /// One to three faults at about the same time; in the end all ranks are in again.
  int inject() {
    int victims = chance_.one_in(3) ? chance_.between(2, ranks - 1) : 1;
    int faults = 0;
    std::vector<int> order{0, 1, 2, 3};
    for (int i = 0; i < victims; ++i) {
      std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(chance_.between(i, ranks - 1))]);
      faults += hit(order[static_cast<std::size_t>(i)]);
      // The next one meets the step, the wait for this one's deadline, or the recovery.
      if (i + 1 < victims) sleep_up_to(2 * deadline_);
    }
    for (const int rank : stopped_) {
      sleep_up_to(2 * deadline_);
      cast_.send(rank, SIGCONT);
    }
    for (const int rank : killed_) {
      sleep_up_to(2 * deadline_);
      cast_.start(rank, Entry::late);
    }
    stopped_.clear();
    killed_.clear();
    EXPECT_TRUE(cast_.all_go_on()) << "a rank hangs, or does not come back";
    return faults;
  }

 private:
  int hit(int rank) {
    const bool kills = chance_.one_in(2);
    const int signal = kills ? SIGKILL : SIGSTOP;
    std::printf("%s rank %d", kills ? "kill" : "stop", rank);
    if (chance_.one_in(2)) {  // at a random time
      sleep_up_to(std::chrono::milliseconds(20));
      cast_.send(rank, signal);
    } else {
      const Place place = chance_.one_of({Place::verb, Place::store, Place::between});
      arm(board_.seats[static_cast<std::size_t>(rank)], place, chance_.between(1, 60), signal);
      std::printf(" at place %d", static_cast<int>(place));
    }
    std::printf("\n");
    const bool came = kills ? cast_.wait_for_death(rank, SIGKILL) : cast_.wait_for_stop(rank);
    EXPECT_TRUE(came) << "the fault of rank " << rank << " did not come";
    (kills ? killed_ : stopped_).push_back(rank);
    return 1;
  }
  void sleep_up_to(std::chrono::milliseconds longest) {
    std::this_thread::sleep_for(std::chrono::microseconds(chance_.between(0, static_cast<int>(longest.count()) * 1000)));
  }

  Cast& cast_;
  Board& board_;
  Chance chance_;
  std::chrono::milliseconds deadline_;
  std::vector<int> killed_, stopped_;
};

TEST(RecoveryRandom, AHundredFaultsNeverHangNeverGiveWrongBitsNeverMakeTwoMasks) {
  const std::uint64_t seed = announced_seed();
  in_every_way("random", ranks, [&](Cast& cast, Board& board, int number) {
    Injector injector(cast, board, seed + static_cast<std::uint64_t>(number), scene_deadline);
    int faults = 0;
    while (faults < faults_a_way && !testing::Test::HasFailure()) faults += injector.inject();
    std::uint32_t losses = 0, comebacks = 0, interruptions = 0;
    for (const Board::Seat& seat : board.seats) {
      losses += seat.losses;
      comebacks += seat.comebacks;
      interruptions += seat.interruptions;
      EXPECT_EQ(seat.wrong, 0u);
    }
    std::printf("way %d: %d faults, %u ranks learned that they were out, %u came back, %u interruptions, %u steps\n", number,
                faults, losses, comebacks, interruptions, static_cast<unsigned>(board.seats[0].steps));
  });
}

}  // namespace
}  // namespace heddle::layer_test
