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

Scene scene_of(const Route& route, GuardedWeights& weights, const std::string& name) {
  Scene scene;
  scene.c = recovery_case(3, route, 0);
  scene.weights = &weights;
  scene.name = name;
  scene.deadline = std::chrono::milliseconds(is_sanitized ? 1500 : 250);
  scene.grace = std::chrono::milliseconds(is_sanitized ? 500 : 60);
  compute_wanted(scene);
  return scene;
}

void arm(Board::Seat& seat, Place place, int countdown, int signal) {
  seat.countdown = countdown;
  seat.signal = signal;
  seat.place = static_cast<int>(place);
}

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

/// All ways' groups at once: they mostly wait for deadlines.
template <class Play>
void in_every_way(const char* what, const Play& play) {
  std::vector<Route> routes;
  for (const Route& route : host_routes) {
    if (!is_sanitized || sums_slots(recovery_case(3, route, 0).options)) routes.push_back(route);
  }
  std::vector<std::unique_ptr<SyntheticLayer>> layers;
  std::vector<std::unique_ptr<GuardedWeights>> weights;
  std::vector<Scene> scenes;
  for (const Route& route : routes) {
    layers.push_back(std::make_unique<SyntheticLayer>(recovery_case(3, route, 0).layer));
    weights.push_back(std::make_unique<GuardedWeights>(layers.back()->source()));
    scenes.push_back(
        scene_of(route, *weights.back(),
                 "test.recovery." + std::string(what) + "." + std::to_string(getpid()) + "." + std::to_string(scenes.size())));
  }
  const std::size_t files = files_left();
  // A process a way plays it, so that none of them has threads when it forks ranks.
  const std::vector<int> statuses = run_processes(static_cast<int>(scenes.size()), [&](int number) {
    const Scene& scene = scenes[static_cast<std::size_t>(number)];
    SCOPED_TRACE(text_of(scene.c));
    SharedBoard board;
    Cast cast(scene, *board);
    ASSERT_TRUE(cast.all_go_on());
    play(cast, *board, number);
    if (!testing::Test::HasFailure()) cast.end();
  });
  EXPECT_EQ(statuses, std::vector<int>(statuses.size(), 0));
  EXPECT_EQ(files_left(), files);
  EXPECT_EQ(sockets_left("test.recovery." + std::string(what)), 0);
}

TEST(RecoveryPhases, AKilledRankIsReplacedInEveryWayAndPhase) {
  in_every_way("killed", [](Cast& cast, Board& board, int number) {
    for (const Phase& phase : phases) {
      if (is_sanitized && phase.place == Place::gemm) continue;  // the sanitizer keeps the signal for itself
      lose(cast, board, number % 3, phase, SIGKILL);
      if (testing::Test::HasFailure()) return;
    }
  });
}

TEST(RecoveryPhases, AStoppedRankComesBackInEveryWayAndPhase) {
  in_every_way("stopped", [](Cast& cast, Board& board, int number) {
    for (const Phase& phase : phases) {
      if (is_sanitized && phase.place == Place::gemm) continue;
      lose(cast, board, (number + 1) % 3, phase, SIGSTOP);
      if (testing::Test::HasFailure()) return;
    }
  });
}

// A second rank is lost while the others are busy with the first: in their agreement, while experts move.
TEST(RecoveryPhases, ASecondRankIsLostDuringTheRecovery) {
  in_every_way("second", [](Cast& cast, Board& board, int number) {
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
