// A rank's process is killed, or stopped and let go again, in every phase of a step and of a recovery: the others go on with the
// bits of the smaller group, nobody hangs, no generation has two masks; a new process takes the place of a killed one, a stopped
// one comes back.
#include "recovery_processes.hpp"

namespace heddle::layer_test {
namespace {

struct Phase {
  const char* name;
  Place place;
  int countdown;  ///< which time it comes there
};

/// Verbs 3 and 9 of the few that a rank without much to send has lie in dispatch, later ones in combine; accesses to the store are
/// those at the end of a step, then, as nobody answers any more, those of the agreement.
constexpr Phase phases[] = {{"dispatch", Place::verb, 3},           {"dispatch, later", Place::verb, 9},
                            {"the products", Place::gemm, 1},       {"combine", Place::verb, 25},
                            {"the end of a step", Place::store, 4}, {"between steps", Place::between, 2}};

/// One fault of rank `victim` and its end: all ranks are in again.
void lose(Cast& cast, Board& board, int victim, const Phase& phase, int signal) {
  SCOPED_TRACE(testing::Message() << "rank " << victim << ", " << phase.name << ", signal " << signal);
  arm(board.seats[static_cast<std::size_t>(victim)], phase.place, phase.countdown, signal);
  if (signal == SIGKILL) {
    ASSERT_TRUE(cast.wait_for_death(victim, SIGKILL)) << "the fault did not come";
    ASSERT_TRUE(cast.others_go_on(1u << victim)) << "the survivors hang";
    cast.start(victim, Entry::late);
  } else {
    ASSERT_TRUE(cast.wait_for_stop(victim)) << "the fault did not come";
    ASSERT_TRUE(cast.others_go_on(1u << victim)) << "the survivors hang";
    cast.send(victim, SIGCONT);
  }
  ASSERT_TRUE(cast.all_go_on()) << "the rank does not come back";
}

TEST(RecoveryPhases, AKilledRankIsReplacedInEveryWayAndPhase) {
  in_every_way("killed", 3, [](Cast& cast, Board& board, int number) {
    for (const Phase& phase : phases) {
      if (is_sanitized && phase.place == Place::gemm) continue;  // the sanitizer keeps the signal for itself
      lose(cast, board, number % 3, phase, SIGKILL);
      if (testing::Test::HasFailure()) return;
    }
  });
}

TEST(RecoveryPhases, AStoppedRankComesBackInEveryWayAndPhase) {
  in_every_way("stopped", 3, [](Cast& cast, Board& board, int number) {
    for (const Phase& phase : phases) {
      if (is_sanitized && phase.place == Place::gemm) continue;
      lose(cast, board, (number + 1) % 3, phase, SIGSTOP);
      if (testing::Test::HasFailure()) return;
    }
  });
}

// A second rank is lost while the others are busy with the first: in their agreement, while experts move.
TEST(RecoveryPhases, ASecondRankIsLostDuringTheRecovery) {
  in_every_way("second", 3, [](Cast& cast, Board& board, int number) {
    const int first = number % 3, second = (number + 1) % 3;
    for (const Phase& phase : {Phase{"agreement", Place::store, 3}, Phase{"agreement, later", Place::store, 30},
                               Phase{"experts move", Place::experts, 2}}) {
      for (const int signal : {SIGKILL, SIGSTOP}) {
        SCOPED_TRACE(testing::Message() << phase.name << ", signal " << signal);
        // The first is gone: nobody finishes a step any more, so what the second meets next belongs to the recovery.
        cast.send(first, SIGKILL);
        ASSERT_TRUE(cast.wait_for_death(first, SIGKILL));
        arm(board.seats[static_cast<std::size_t>(second)], phase.place, phase.countdown, signal);
        ASSERT_TRUE(signal == SIGKILL ? cast.wait_for_death(second, SIGKILL) : cast.wait_for_stop(second))
            << "the fault did not come";
        ASSERT_TRUE(cast.others_go_on(1u << first | 1u << second)) << "the last one hangs";
        if (signal == SIGKILL) cast.start(second, Entry::late);
        if (signal == SIGSTOP) cast.send(second, SIGCONT);
        cast.start(first, Entry::late);
        ASSERT_TRUE(cast.all_go_on()) << "the ranks do not come back";
      }
    }
  });
}

}  // namespace
}  // namespace heddle::layer_test
