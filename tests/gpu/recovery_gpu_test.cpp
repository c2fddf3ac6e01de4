// Layers on GPUs under recovery: a process is killed or stopped, with kernels under way or between steps; the other one goes on
// with the bits of the smaller group, and a new process, or the stopped one, comes back. Two GPUs where there are two; on one the
// processes take turns, each with virtual ranks.
#include <array>
#include <atomic>
#include <thread>

#include "gpu/mega_bed.hpp"
#include "gpu/process_run.hpp"
#include "heddle/device_recovery.hpp"
#include "recovery/moving.hpp"

namespace heddle::layer_test {
namespace {

constexpr int processes = 2;
constexpr int ranks_each = 2;
constexpr std::chrono::milliseconds deadline(3000);

#define SKIP_WITHOUT_GPUS() \
  if (gpus_for_processes() == 0) GTEST_SKIP() << "no GPU here"

enum class Place : int { none, under_way, between };

/// What processes tell the test, and where they are to meet their next fault; zeros at first.
struct Board {
  struct Seat {
    std::atomic<std::uint32_t> steps, live, losses, generation;
    std::atomic<int> place, signal;
    std::array<std::atomic<std::uint32_t>, 256> masks;  ///< bits, by generation
  };
  std::array<Seat, processes> seats;
  std::atomic<std::uint32_t> last_step;
};

std::uint32_t bits_of(const std::vector<bool>& live) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < live.size(); ++i) bits |= live[i] ? 1u << i : 0u;
  return bits;
}

Case case_of(const Route& route) {
  Case c = fused_case(processes * ranks_each, WeightKind::fp8_block);
  c.take(route);
  return c;
}

/// The own ranks' places on this process's GPU.
class Places {
 public:
  Places(const Case& c, int process, int device) : case_(c), process_(process) {
    for (int local = 0; local < ranks_each; ++local)
      places_.emplace_back(device, static_cast<std::size_t>(c.options.cap), hidden(), static_cast<std::size_t>(c.layer.shape.topk));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    load(draw_tokens(c, c.seed));
  }
  ~Places() { cudaStreamDestroy(stream_); }
  Places(const Places&) = delete;

  void queue(DeviceLayer& layer) {
    std::vector<DeviceInput> inputs;
    std::vector<bf16*> outputs;
    for (LayerPlace& place : places_) {
      inputs.push_back({place.tokens.data(), place.hidden.data(), place.ids.data(), place.weights.data(), {}});
      outputs.push_back(place.out.data());
    }
    layer.forward(inputs, step_of(case_), outputs, stream_);
  }
  void wait(DeviceLayer& layer) {
    check(cudaStreamSynchronize(stream_), "a call under recovery");
    layer.throw_if_failed();
  }
  std::vector<bf16> outputs() {
    std::vector<bf16> all;
    for (int local = 0; local < ranks_each; ++local) {
      const std::vector<bf16> out = places_[static_cast<std::size_t>(local)].out.read();
      const auto values = static_cast<std::size_t>(case_.tokens[static_cast<std::size_t>(rank(local))]) * hidden();
      all.insert(all.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(values));
    }
    return all;
  }

 private:
  std::size_t hidden() const { return static_cast<std::size_t>(case_.layer.shape.hidden); }
  int rank(int local) const { return process_ * ranks_each + local; }
  void load(const Tokens& tokens) {
    const auto topk = static_cast<std::size_t>(case_.layer.shape.topk);
    for (int local = 0; local < ranks_each; ++local)
      places_[static_cast<std::size_t>(local)].load(input_of(case_, tokens, rank(local)), hidden(), topk);
    check(cudaDeviceSynchronize(), "copies of inputs");
  }

  const Case& case_;
  int process_;
  std::vector<LayerPlace> places_;
  cudaStream_t stream_ = nullptr;
};

/// One process: steps until the group ends, each compared with what this process computes by itself, as the smaller group.
class Life {
 public:
  Life(const Case& c, Board& board, const std::string& name, int process, Entry entry)
      : board_(board),
        seat_(board.seats[static_cast<std::size_t>(process)]),
        synthetic_(c.layer),
        source_(source_of(synthetic_, c)),
        places_(c, process, 0),
        wanted_(alone(c, process)) {
    const GroupOptions patient{std::chrono::milliseconds(60000)};
    group_ = entry == Entry::late ? rejoin_process_group(name, process, processes, patient)
                                  : join_process_group(name, process, processes, patient);
    layers_.emplace(*group_, DeviceGroupOptions{ranks_each, {0}, deadline},
                    std::vector<ContextLayer>{{&source_, c.placement, c.options}}, RecoveryOptions{}, DeviceLayerOptions{}, entry);
    group_->set_deadline(2 * deadline);
    note();
  }

  void run() {
    while (board_.last_step == 0 || layers_->steps() < board_.last_step) {
      pass(Place::between);
      try {
        layers_->step([&] {
          places_.queue(layers_->layer(0));
          pass(Place::under_way);
          places_.wait(layers_->layer(0));
        });
        EXPECT_EQ(different_bits(places_.outputs(), wanted_), 0u) << "step " << layers_->steps();
      } catch (const LostRankError&) {
        seat_.losses += 1;
        if (!come_back()) return;
      }
      note();
    }
  }

 private:
  std::vector<bf16> alone(const Case& c, int process) {
    std::vector<bool> live(static_cast<std::size_t>(processes * ranks_each), false);
    for (int local = 0; local < ranks_each; ++local) live[static_cast<std::size_t>(process * ranks_each + local)] = true;
    const ContextLayer layer{&source_, without_gaps(spread_over_survivors(c.placement, live), live), c.options};
    const ContextPlan plan = plan_context(std::span(&layer, 1));
    DeviceWorkspace workspace({ranks_each, {0}, deadline}, plan.heap_bytes);
    std::vector<LayerWeights> weights;
    for (int local = 0; local < ranks_each; ++local) weights.push_back(LayerWeights::load(source_, layer.placement, local));
    DeviceLayer one(workspace, 0, plan.memory, weights, c.options);
    places_.queue(one);
    places_.wait(one);
    return places_.outputs();
  }
  void pass(Place place) {
    if (seat_.place != static_cast<int>(place)) return;
    seat_.place = static_cast<int>(Place::none);
    raise(seat_.signal);
  }
  bool come_back() {
    for (;;) {
      try {
        layers_->rejoin();
        return true;
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::fault) throw;
        if (board_.last_step != 0) return false;
      }
    }
  }
  void note() {
    const auto write = [this](const Members& members) {
      seat_.masks[members.generation % seat_.masks.size()] = bits_of(members.live);
    };
    for (; noted_ < layers_->interruptions().size(); ++noted_) {
      const Interruption& one = layers_->interruptions()[noted_];
      write(one.members);
      std::printf("generation %u, mask %u: lost %.0f, agree %.1f, meet %.1f, memory %.1f, experts %.1f, again %.1f ms; %s\n",
                  one.members.generation, bits_of(one.members.live), 1e3 * one.lost, 1e3 * one.agree, 1e3 * one.meet,
                  1e3 * one.memory, 1e3 * one.experts, 1e3 * one.again, one.reason.c_str());
    }
    write(layers_->members());
    seat_.live = bits_of(layers_->members().live);
    seat_.steps = layers_->steps();
  }

  Board& board_;
  Board::Seat& seat_;
  SyntheticLayer synthetic_;
  LayerSource source_;
  Places places_;
  std::vector<bf16> wanted_;
  std::unique_ptr<Group> group_;
  std::optional<RecoveringDeviceLayers> layers_;
  std::size_t noted_ = 0;
};

class Stage {
 public:
  Stage(const Case& c, std::string name)
      : case_(c),
        name_(std::move(name)),
        board_(static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    for (int process = 0; process < processes; ++process) start(process, Entry::together);
  }
  ~Stage() {
    for (const pid_t child : children_) {
      if (child == 0) continue;
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    munmap(board_, sizeof(Board));
  }
  Stage(const Stage&) = delete;

  void start(int process, Entry entry) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) run(process, entry);
    children_[static_cast<std::size_t>(process)] = child;
  }
  /// One loss and its end.
  void lose(int victim, Place place, int signal) {
    SCOPED_TRACE(testing::Message() << "process " << victim << ", place " << static_cast<int>(place) << ", signal " << signal);
    Board::Seat& seat = board_->seats[static_cast<std::size_t>(victim)];
    seat.signal = signal;
    seat.place = static_cast<int>(place);
    int status = 0;
    pid_t& child = children_[static_cast<std::size_t>(victim)];
    ASSERT_TRUE(wait_until([&] { return waitpid(child, &status, WNOHANG | WUNTRACED) != 0; })) << "the fault did not come";
    ASSERT_TRUE(goes_on(3u & ~(1u << victim))) << "the survivor hangs";
    if (signal == SIGKILL) {
      child = 0;
      start(victim, Entry::late);
    } else {
      kill(child, SIGCONT);
    }
    ASSERT_TRUE(goes_on(3u)) << "the process does not come back";
  }
  bool goes_on(std::uint32_t mask) {
    std::uint32_t furthest = 0;
    for (const Board::Seat& seat : board_->seats) furthest = std::max<std::uint32_t>(furthest, seat.steps);
    return wait_until([&] {
      for (std::size_t i = 0; i < processes; ++i) {
        const Board::Seat& seat = board_->seats[i];
        if ((mask >> i & 1) != 0 && (seat.live != mask || seat.steps < furthest + 2)) return false;
      }
      return true;
    });
  }
  void end() {
    std::uint32_t furthest = 0;
    for (const Board::Seat& seat : board_->seats) furthest = std::max<std::uint32_t>(furthest, seat.steps);
    board_->last_step = furthest + 10;
    for (pid_t& child : children_) {
      int status = -1;
      EXPECT_TRUE(wait_until([&] { return waitpid(child, &status, WNOHANG) != 0; })) << "a process hangs";
      EXPECT_EQ(status, 0);
      if (status != -1) child = 0;
    }
    for (std::size_t generation = 0; generation < board_->seats[0].masks.size(); ++generation) {
      const std::uint32_t a = board_->seats[0].masks[generation], b = board_->seats[1].masks[generation];
      EXPECT_TRUE(a == 0 || b == 0 || a == b) << "two masks in generation " << generation;
    }
  }

 private:
  template <class There>
  static bool wait_until(const There& there) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(90);
    while (!there()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  [[noreturn]] void run(int process, Entry entry) {
    int status = 3;
    try {
      see_only_gpu(gpus_for_processes() < processes ? 0 : process);
      Life(case_, *board_, name_, process, entry).run();
      status = testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "process %d: %s\n", process, error.what());
    }
    std::fflush(nullptr);
    _exit(status);
  }

  const Case& case_;
  std::string name_;
  Board* board_;
  std::array<pid_t, processes> children_{};
};

/// Twelve losses in all, of either process, at either place, by either signal.
TEST(RecoveryGpu, AProcessIsLostAndComesBackInEveryWay) {
  SKIP_WITHOUT_GPUS();
  int number = 0;
  for (const Route& route :
       {Route{Way::low_latency, Reduce::rank}, Route{Way::elastic, Reduce::home}, Route{Way::mega, Reduce::rank}}) {
    const Case c = case_of(route);
    SCOPED_TRACE(text_of(c));
    Stage stage(c, "test.gpu.recovery." + std::to_string(getpid()) + "." + std::to_string(number));
    ASSERT_TRUE(stage.goes_on(3u)) << "the first steps";
    for (const int signal : {SIGKILL, SIGSTOP}) {
      stage.lose(number % processes, Place::under_way, signal);
      if (testing::Test::HasFatalFailure()) return;
      stage.lose((number + 1) % processes, Place::between, signal);
      if (testing::Test::HasFatalFailure()) return;
    }
    stage.end();
    ++number;
  }
  EXPECT_EQ(sockets_left("test.gpu.recovery."), 0);
}

}  // namespace
}  // namespace heddle::layer_test
