// Groups of processes under recovery that are killed and stopped: what a rank's process does, and the board on which the test sees
// it.
#pragma once

#include <array>
#include <thread>

#include "exchange/host_exchange.hpp"
#include "processes.hpp"
#include "recovery_faults.hpp"

namespace heddle::layer_test {

/// What a group of processes runs.
struct Scene {
  std::string name;
  Case c;
  GuardedWeights* weights = nullptr;
  std::map<std::uint32_t, std::vector<std::vector<bf16>>> wanted;  ///< by mask * batches + batch, then by rank
  std::chrono::milliseconds deadline{300};
  std::chrono::milliseconds grace{80};
  /// Over several nodes: how a rank's process gets its group.
  std::function<std::unique_ptr<Group>(int rank, Entry entry, const GroupOptions& options)> join;
  static constexpr std::uint32_t batches = 2;
};

/// Fills in what every mask must compute. Before any process is forked.
inline void compute_wanted(Scene& scene) {
  Wanted wanted(scene.weights->source(), scene.c);
  const int ranks = scene.c.ranks();
  for (std::uint32_t mask = 1; mask < 1u << ranks; ++mask) {
    std::vector<bool> live;
    for (int rank = 0; rank < ranks; ++rank) live.push_back((mask >> rank & 1) != 0);
    for (std::uint32_t batch = 0; batch < Scene::batches; ++batch) {
      for (int rank = 0; rank < ranks; ++rank) scene.wanted[mask * Scene::batches + batch].push_back(wanted.of(rank, live, batch));
    }
  }
}

/// A rank's process: steps until the group ends, each compared with the smaller group's bits; comes back when it was lost.
class RankLife {
 public:
  RankLife(const Scene& scene, Board& board, int rank, Entry entry)
      : scene_(scene), board_(board), seat_(board.seats[static_cast<std::size_t>(rank)]), rank_(rank), group_(join(entry)) {
    scene.weights->watch(seat_);
    set_verb_hook([this] { pass(seat_, Place::verb); });
    enter(entry);
    group_.set_deadline(scene.deadline);
    note();
  }

  void run() {
    while (!ended()) {
      pass(seat_, Place::between);
      scene_.weights->close_pages();
      try {
        step();
      } catch (const LostRankError&) {
        seat_.losses += 1;
        if (!come_back()) return;
      } catch (const Error& error) {
        // Over several nodes the store itself may be out of reach, which has a name, too.
        if (std::string(error.what()).find("the store cannot be reached") == std::string::npos) throw;
        seat_.cuts += 1;
        if (!come_back()) return;
      }
      note();
    }
  }

 private:
  void enter(Entry entry) {
    RecoveryOptions options;
    options.grace = scene_.grace;
    const std::vector<ContextLayer> layers{{&scene_.weights->source(), scene_.c.placement, scene_.c.options}};
    if (scene_.join && entry == Entry::late) group_.set_deadline(scene_.deadline);
    for (;;) {
      try {
        layers_.emplace(group_, layers, options, entry);
        return;
      } catch (const Error& error) {
        // Who comes late, and meets another loss on the way in, is lost once more.
        if (!scene_.join || entry != Entry::late || error.kind() != ErrorKind::fault || board_.last_step != 0) throw;
      }
    }
  }

  FaultyGroup join(Entry entry) const {
    const GroupOptions options{std::chrono::milliseconds(20000)};
    const int ranks = scene_.c.ranks();
    if (scene_.join) return FaultyGroup(scene_.join(rank_, entry, options), seat_);
    return FaultyGroup(entry == Entry::late ? rejoin_process_group(scene_.name, rank_, ranks, options)
                                            : join_process_group(scene_.name, rank_, ranks, options),
                       seat_);
  }

  bool ended() const {
    const std::uint32_t last = board_.last_step;
    return last != 0 && layers_->steps() >= last;
  }

  void step() {
    std::uint32_t used = 0, batch = 0;
    std::vector<bf16> out;
    layers_->step([&] {
      used = bits_of(layers_->members().live);
      batch = layers_->steps() % Scene::batches;
      out = call(scene_.c, layers_->layer(0), draw_tokens(scene_.c, batch), rank_);
    });
    const auto& wanted = scene_.wanted.at(used * Scene::batches + batch)[static_cast<std::size_t>(rank_)];
    if (different_bits(out, wanted) == 0) return;
    seat_.wrong += 1;
    ADD_FAILURE() << "rank " << rank_ << ": wrong bits in step " << layers_->steps() << " with mask " << used;
  }

  /// False where the group has ended without this rank.
  bool come_back() {
    for (;;) {
      try {
        layers_->rejoin();
        seat_.comebacks += 1;
        return true;
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::fault) throw;
        if (board_.last_step != 0) return false;
      }
    }
  }

  /// Onto the board: this rank's mask under its generation, and all that it had before.
  void note() {
    const auto write = [this](const Members& members) {
      const auto generation = members.generation % most_generations;
      const std::uint32_t bits = bits_of(members.live), before = seat_.masks[generation].exchange(bits);
      EXPECT_TRUE(before == 0 || before == bits) << "rank " << rank_ << " had two masks in generation " << members.generation;
    };
    const auto& interruptions = layers_->interruptions();
    for (; noted_ < interruptions.size(); ++noted_) write(interruptions[noted_].members);
    write(layers_->members());
    seat_.interruptions = static_cast<std::uint32_t>(interruptions.size());
    seat_.live = bits_of(layers_->members().live);
    seat_.steps = layers_->steps();
  }

  const Scene& scene_;
  Board& board_;
  Board::Seat& seat_;
  int rank_;
  FaultyGroup group_;
  std::optional<RecoveringLayers> layers_;
  std::size_t noted_ = 0;
};

/// The processes of a group as the test sees them: one a rank at a time.
class Cast {
 public:
  Cast(const Scene& scene, Board& board) : scene_(scene), board_(board), processes_(static_cast<std::size_t>(scene.c.ranks()), 0) {
    for (int rank = 0; rank < scene.c.ranks(); ++rank) start(rank, Entry::together);
  }
  ~Cast() {
    for (const pid_t process : processes_) {
      if (process <= 0) continue;
      kill(process, SIGKILL);
      waitpid(process, nullptr, 0);
    }
  }
  Cast(const Cast&) = delete;
  Cast& operator=(const Cast&) = delete;

  void start(int rank, Entry entry) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) run(rank, entry);
    processes_[static_cast<std::size_t>(rank)] = child;
  }
  void send(int rank, int signal) { kill(processes_[static_cast<std::size_t>(rank)], signal); }
  /// Waits until a signal has ended the process; false where it is something else that ended it, or nothing did in time.
  bool wait_for_death(int rank, int signal, std::chrono::seconds longest = std::chrono::seconds(30)) {
    int status = 0;
    if (!wait_until(longest, [&] { return waitpid(processes_[static_cast<std::size_t>(rank)], &status, WNOHANG) != 0; }))
      return false;
    processes_[static_cast<std::size_t>(rank)] = 0;
    return WIFSIGNALED(status) && WTERMSIG(status) == signal;
  }
  bool wait_for_stop(int rank, std::chrono::seconds longest = std::chrono::seconds(30)) {
    int status = 0;
    const pid_t process = processes_[static_cast<std::size_t>(rank)];
    return wait_until(longest, [&] { return waitpid(process, &status, WNOHANG | WUNTRACED) != 0; }) && WIFSTOPPED(status);
  }
  /// All ranks are in and have gone on by some steps. False where that does not come in time: a hang.
  bool all_go_on(std::chrono::seconds longest = std::chrono::seconds(40)) { return go_on((1u << scene_.c.ranks()) - 1, longest); }
  /// The others go on without those in `lost` (bits).
  bool others_go_on(std::uint32_t lost, std::chrono::seconds longest = std::chrono::seconds(40)) {
    return go_on(((1u << scene_.c.ranks()) - 1) & ~lost, longest);
  }
  /// Ends the group; every process must leave by itself with status 0.
  void end() {
    std::uint32_t furthest = 0;
    for (const Board::Seat& seat : board_.seats) furthest = std::max<std::uint32_t>(furthest, seat.steps);
    board_.last_step = furthest + 10;
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      if (processes_[rank] == 0) continue;
      int status = -1;
      EXPECT_TRUE(wait_until(std::chrono::seconds(40), [&] { return waitpid(processes_[rank], &status, WNOHANG) != 0; }))
          << "rank " << rank << " hangs";
      EXPECT_EQ(status, 0) << "rank " << rank;
      if (status != -1) processes_[rank] = 0;
    }
    expect_one_mask();
  }

  template <class There>
  static bool wait_until(std::chrono::seconds longest, const There& there) {
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!there()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  /// The ranks in `mask` have exactly that mask, and have gone on by some steps.
  bool go_on(std::uint32_t mask, std::chrono::seconds longest) const {
    std::uint32_t furthest = 0;
    for (const Board::Seat& seat : board_.seats) furthest = std::max<std::uint32_t>(furthest, seat.steps);
    return wait_until(longest, [&] {
      for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
        const Board::Seat& seat = board_.seats[rank];
        if ((mask >> rank & 1) != 0 && (seat.live != mask || seat.steps < furthest + 2)) return false;
      }
      return true;
    });
  }
  void expect_one_mask() const {
    for (std::size_t generation = 0; generation < most_generations; ++generation) {
      std::uint32_t mask = 0;
      for (const Board::Seat& seat : board_.seats) {
        const std::uint32_t theirs = seat.masks[generation];
        EXPECT_TRUE(mask == 0 || theirs == 0 || mask == theirs)
            << "two masks in generation " << generation << ": " << mask << " and " << theirs;
        mask = mask == 0 ? theirs : mask;
      }
    }
  }
  [[noreturn]] void run(int rank, Entry entry) const {
    int status = 3;
    try {
      RankLife(scene_, board_, rank, entry).run();
      status = testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    std::fflush(nullptr);
    _exit(status);
  }

  const Scene& scene_;
  Board& board_;
  std::vector<pid_t> processes_;
};

constexpr std::chrono::milliseconds scene_deadline(is_sanitized ? 1500 : 250);

inline Scene scene_of(const Route& route, int ranks, GuardedWeights& weights, const std::string& name) {
  Scene scene;
  scene.c = recovery_case(ranks, route, 0);
  scene.weights = &weights;
  scene.name = name;
  scene.deadline = scene_deadline;
  scene.grace = std::chrono::milliseconds(is_sanitized ? 500 : 60);
  compute_wanted(scene);
  return scene;
}

/// The rank's next fault: which time it comes to a place.
inline void arm(Board::Seat& seat, Place place, int countdown, int signal) {
  seat.countdown = countdown;
  seat.signal = signal;
  seat.place = static_cast<int>(place);
}

/// All ways' groups at once: they mostly wait for deadlines.
template <class Play>
void in_every_way(const char* what, int ranks, const Play& play) {
  std::vector<Route> routes;
  for (const Route& route : host_routes) {
    if (!is_sanitized || sums_slots(recovery_case(ranks, route, 0).options)) routes.push_back(route);
  }
  std::vector<std::unique_ptr<SyntheticLayer>> layers;
  std::vector<std::unique_ptr<GuardedWeights>> weights;
  std::vector<Scene> scenes;
  for (const Route& route : routes) {
    layers.push_back(std::make_unique<SyntheticLayer>(recovery_case(ranks, route, 0).layer));
    weights.push_back(std::make_unique<GuardedWeights>(layers.back()->source()));
    scenes.push_back(
        scene_of(route, ranks, *weights.back(),
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

}  // namespace heddle::layer_test
