// Groups of processes under recovery that are killed and stopped: what a rank's process does, and the board on which the test sees
// it.
#pragma once

#include <array>
#include <thread>

#include "exchange/host_exchange.hpp"
#include "processes.hpp"
#include "recovery_support.hpp"

namespace heddle::layer_test {

/// Where a rank's process meets its fault.
enum class Place : int {
  none,
  verb,     ///< before a verb of a protocol: dispatch and combine
  gemm,     ///< at the first read of an expert's weights: rows are laid out, the products begin
  store,    ///< before an access to the store: the agreement, the end of a step
  experts,  ///< before an expert is loaded: while experts move
  between,  ///< between two steps
};

constexpr int most_ranks = 6;
constexpr int most_generations = 4096;

/// Shared by the test and all processes; all zeros at first.
struct Board {
  struct Seat {
    std::atomic<std::uint32_t> steps;
    std::atomic<std::uint32_t> live;  ///< bits: its mask
    std::atomic<std::uint32_t> wrong, losses, interruptions, comebacks;
    // The next fault: at which place, which time it comes there, by which signal.
    std::atomic<int> place, countdown, signal;
    std::array<std::atomic<std::uint32_t>, most_generations> masks;  ///< bits, by generation
  };
  std::array<Seat, most_ranks> seats;
  std::atomic<std::uint32_t> last_step;  ///< the group ends with it; 0: not yet known
};

/// A board that forks share.
class SharedBoard {
 public:
  SharedBoard()
      : board_(static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedBoard() { munmap(board_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board* operator->() const { return board_; }
  Board& operator*() const { return *board_; }

 private:
  Board* board_;
};

inline std::uint32_t bits_of(const std::vector<bool>& live) {
  std::uint32_t bits = 0;
  for (std::size_t rank = 0; rank < live.size(); ++rank) bits |= live[rank] ? 1u << rank : 0u;
  return bits;
}

/// Ends or stops this process if its turn has come.
inline void pass(Board::Seat& seat, Place place) {
  if (seat.place != static_cast<int>(place) || --seat.countdown != 0) return;
  seat.place = static_cast<int>(Place::none);
  raise(seat.signal);
}

/// The words of a group, with places for faults.
class FaultyStore final : public Store {
 public:
  FaultyStore(Store& inner, Board::Seat& seat) : inner_(inner), seat_(seat) {}
  std::uint64_t get(const StoreKey& key) const override {
    pass(seat_, Place::store);
    return inner_.get(key);
  }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    pass(seat_, Place::store);
    return inner_.compare_set(key, expected, desired);
  }
  bool wait(const std::function<bool()>& there, Clock::time_point end) override { return inner_.wait(there, end); }

 private:
  Store& inner_;
  Board::Seat& seat_;
};

class FaultyGroup final : public Group {
 public:
  FaultyGroup(std::unique_ptr<Group> inner, Board::Seat& seat) : inner_(std::move(inner)), store_(inner_->store(), seat) {}
  int rank() const override { return inner_->rank(); }
  int ranks() const override { return inner_->ranks(); }
  std::chrono::nanoseconds deadline() const override { return inner_->deadline(); }
  void set_deadline(std::chrono::nanoseconds deadline) override { inner_->set_deadline(deadline); }
  void barrier(const std::string& what) override { inner_->barrier(what); }
  std::vector<std::string> exchange(const std::string& mine, const std::string& what) override {
    return inner_->exchange(mine, what);
  }
  HeapMapping create_heap(std::size_t bytes) override { return inner_->create_heap(bytes); }
  void release_heap(const HeapMapping& heap) override { inner_->release_heap(heap); }
  void reset(const std::vector<bool>& live) override { inner_->reset(live); }
  void begin_era(std::uint32_t era, const std::vector<bool>& live) override { inner_->begin_era(era, live); }
  const std::vector<bool>& live() const override { return inner_->live(); }
  Store& store() override { return store_; }
  void abandon_heap(const HeapMapping& heap) override { inner_->abandon_heap(heap); }
  void answer_door() override { inner_->answer_door(); }

 private:
  std::unique_ptr<Group> inner_;
  FaultyStore store_;
};

/// Expert weights in pages that can be closed: who reads them then gets the fault.
class GuardedWeights {
 public:
  /// `shape` of the experts in `source`; all are copied.
  explicit GuardedWeights(const LayerSource& source) : source_(source) {
    for (int id = 0; id < source.shape.experts; ++id) bytes_ += room(source.expert(id));
    bytes_ = align_up(bytes_, 4096);
    pages_ = static_cast<std::byte*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::size_t used = 0;
    for (int id = 0; id < source.shape.experts; ++id) {
      experts_.push_back(source.expert(id));
      for (WeightMatrix* matrix : {&experts_.back().gate, &experts_.back().up, &experts_.back().down}) {
        matrix->values = keep(matrix->values, used);
        matrix->scales = keep(matrix->scales, used);
      }
    }
    source_.expert = [this](int id) {
      if (seat_ != nullptr) pass(*seat_, Place::experts);
      return experts_[static_cast<std::size_t>(id)];
    };
  }
  ~GuardedWeights() { munmap(pages_, bytes_); }
  GuardedWeights(const GuardedWeights&) = delete;
  GuardedWeights& operator=(const GuardedWeights&) = delete;

  const LayerSource& source() const { return source_; }
  void watch(Board::Seat& seat) {
    seat_ = &seat;
    guarded() = this;
    struct sigaction action {};
    action.sa_handler = [](int) { guarded()->opened(); };
    sigaction(SIGSEGV, &action, nullptr);
  }
  /// Before a step: closes the pages if the next fault is to be in a product.
  void close_pages() {
    if (seat_->place == static_cast<int>(Place::gemm)) mprotect(pages_, bytes_, PROT_NONE);
  }

 private:
  static GuardedWeights*& guarded() {
    static GuardedWeights* the_one = nullptr;
    return the_one;
  }
  static std::size_t room(const ExpertWeights& expert) {
    std::size_t bytes = 0;
    for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down})
      bytes += align_up(matrix->values.size(), 64) + align_up(matrix->scales.size(), 64);
    return bytes;
  }
  std::span<const std::byte> keep(std::span<const std::byte> from, std::size_t& used) {
    std::byte* to = pages_ + used;
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    used += align_up(from.size(), 64);
    return {to, from.size()};
  }
  void opened() {
    mprotect(pages_, bytes_, PROT_READ | PROT_WRITE);
    pass(*seat_, Place::gemm);
  }

  LayerSource source_;
  std::vector<ExpertWeights> experts_;
  std::byte* pages_ = nullptr;
  std::size_t bytes_ = 0;
  Board::Seat* seat_ = nullptr;
};

/// What a group of processes runs.
struct Scene {
  std::string name;
  Case c;
  GuardedWeights* weights = nullptr;
  std::map<std::uint32_t, std::vector<std::vector<bf16>>> wanted;  ///< by mask * batches + batch, then by rank
  std::chrono::milliseconds deadline{300};
  std::chrono::milliseconds grace{80};
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
    RecoveryOptions options;
    options.grace = scene.grace;
    layers_.emplace(group_, std::vector<ContextLayer>{{&scene.weights->source(), scene.c.placement, scene.c.options}}, options,
                    entry);
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
      }
      note();
    }
  }

 private:
  FaultyGroup join(Entry entry) const {
    const GroupOptions options{std::chrono::milliseconds(20000)};
    const int ranks = scene_.c.ranks();
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
  template <class There>
  static bool wait_until(std::chrono::seconds longest, const There& there) {
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!there()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
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
