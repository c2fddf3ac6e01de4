// Whole round trips on the GPU: tokens from a pool in device memory, dispatch, the stand-ins, combine, and a comparison
// with what must come home. One can be captured in a graph a GPU; many can be queued before the host looks.
#pragma once

#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device_run.hpp"

namespace heddle {

/// A few draws of tokens a rank for one way, and what must come home of each: a rank's outputs depend on its own
/// tokens alone, so any mixture of draws makes a round.
class Pool {
 public:
  struct Draw {
    int tokens = 0;
    Buffer<int> count;
    Buffer<bf16> hidden;
    Buffer<std::int32_t> ids;
    Buffer<float> weights;
    Buffer<bf16> shared;
    Buffer<float> factors;
    Buffer<bf16> want;
  };

  /// Batches of a whole step, of nothing, and of any number between.
  Pool(const DeviceRun& run, const Case& c, int step, int draws, Shared shared, std::uint64_t seed) : shared_(shared) {
    std::mt19937_64 random = generator(seed, step, draws);
    for (int rank = 0; rank < c.ranks(); ++rank) {
      draws_.emplace_back();
      for (int i = 0; i < draws; ++i) {
        Case now = c;
        const int any = static_cast<int>(random() % static_cast<std::uint64_t>(step + 1));
        now.tokens.assign(static_cast<std::size_t>(c.ranks()), i == 0 ? step : i == 1 ? 0 : any);
        now.seed = seed + static_cast<std::uint64_t>(step);
        now.hot = i % 4 == 3 ? static_cast<int>(random() % static_cast<std::uint64_t>(c.ranks())) : -1;
        add(now, rank, i, run.device_of(rank));
      }
    }
  }

  int draws() const { return static_cast<int>(draws_[0].size()); }
  const Draw& of(int rank, int number) const { return draws_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(number)]; }
  Shared shared() const { return shared_; }

 private:
  void add(const Case& c, int rank, int number, int device) {
    const RankData data = draw(c, rank, number);
    draws_.back().push_back({c.tokens_of(rank), Buffer<int>(device, std::vector<int>{c.tokens_of(rank)}),
                             Buffer<bf16>(device, data.hidden), Buffer<std::int32_t>(device, data.ids),
                             Buffer<float>(device, data.weights), Buffer<bf16>(device, data.shared),
                             Buffer<float>(device, data.factors), Buffer<bf16>(device, expected(c, data, {}, shared_))});
  }

  Shared shared_;
  std::vector<std::vector<Draw>> draws_;  ///< [rank][number]
};

/// How a round trip is made: the step's largest batch; both halves of a call in one kernel or in two.
struct TripPlan {
  std::size_t way = 0;
  int step = 0;
  bool halves = false;
  bool captured = true;
};

/// A round trip of one way of a run. Outputs and results are NaNs before it.
class Trip {
 public:
  Trip(DeviceRun& run, const TripPlan& plan, Shared shared) : run_(run), plan_(plan), shared_(shared) {
    const ExchangeOptions& options = run.the_case(plan.way).options;
    for (int rank = 0; rank < run.ranks(); ++rank) {
      const auto local = options.placement.experts_of(rank);
      experts_.emplace_back(run.device_of(rank), std::vector<int>(local.begin(), local.end()));
      results_.emplace_back(run.device_of(rank), most_results(options));
    }
    if (plan.captured) capture();
  }
  ~Trip() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }
  Trip(const Trip&) = delete;
  Trip& operator=(const Trip&) = delete;

  const TripPlan& plan() const { return plan_; }
  const ExchangeOptions& options() const { return run_.the_case(plan_.way).options; }
  std::string title() const {
    std::ostringstream text;
    text << heddle::title(options()) << " " << name(options().arrived) << ", step " << plan_.step
         << (plan_.captured ? ", captured" : "") << (plan_.halves ? " in halves" : "");
    return text.str();
  }

  /// Queues it on one GPU. One that is not captured is queued on all of them by start().
  void replay(std::size_t gpu) {
    const cuda::DeviceScope scope(run_.workspace().device(gpu));
    check(cudaGraphLaunch(graphs_.at(gpu), run_.stream(gpu)), "replay");
  }
  void start() {
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) {
      if (plan_.captured) {
        replay(gpu);
      } else {
        send(gpu);
      }
    }
    if (plan_.captured) return;
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu)
      run_.exchange(plan_.way, gpu).dispatch_receive(run_.stream(gpu));
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) finish(gpu);
  }

 private:
  /// Values that the results of any call of the way need.
  static std::size_t most_results(const ExchangeOptions& options) {
    const auto rows = static_cast<std::size_t>(options.placement.ranks()) * static_cast<std::size_t>(options.cap);
    const int local = std::max(1, options.placement.max_local_experts());
    const bool slots = options.arrived == ArrivedLayout::routed && options.reduce == Reduce::home;
    const std::size_t room = options.arrived == ArrivedLayout::routed ? rows * static_cast<std::size_t>(slots ? options.topk : 1)
                                                                      : expanded_room(options, local, rows);
    return room * static_cast<std::size_t>(options.hidden);
  }

  void clear(std::size_t gpu) {
    const cuda::DeviceScope scope(run_.workspace().device(gpu));
    for (int local = 0; local < run_.workspace().ranks_on(gpu); ++local) {
      const int rank = run_.workspace().first_rank(gpu) + local;
      const auto nan = [&](const Buffer<bf16>& buffer) {
        check(cudaMemsetAsync(buffer.data(), 0xFF, buffer.size() * sizeof(bf16), run_.stream(gpu)), "poisoning");
      };
      nan(run_.seat(rank).out);
      nan(results_[static_cast<std::size_t>(rank)]);
    }
  }
  void send(std::size_t gpu) {
    clear(gpu);
    run_.exchange(plan_.way, gpu).dispatch_send(run_.inputs(gpu), {plan_.step, Phase::decode}, run_.stream(gpu));
  }
  /// All that follows dispatch.
  void finish(std::size_t gpu) {
    const DeviceWorkspace& workspace = run_.workspace();
    DeviceExchange& exchange = run_.exchange(plan_.way, gpu);
    for (int local = 0; local < workspace.ranks_on(gpu); ++local) {
      const auto rank = static_cast<std::size_t>(workspace.first_rank(gpu) + local);
      const Arrived arrived = exchange.arrived(local);
      const auto needed = static_cast<std::size_t>(arrived.room) * static_cast<std::size_t>(options().hidden) *
                          static_cast<std::size_t>(arrived.slots_wanted ? options().topk : 1);
      if (needed > results_[rank].size()) throw InputError("more rows arrived than the way's cap allows");
      const cuda::DeviceScope scope(workspace.device(gpu));
      run_stand_ins(
          stand_ins_of(options(), wire_format(options()), arrived, experts_[rank].data(), static_cast<int>(experts_[rank].size())),
          results_[rank].data(), run_.stream(gpu));
    }
    const std::vector<const bf16*> results = run_.of_gpu(gpu, DeviceRun::pointers(results_));
    const std::vector<DeviceOutput> outputs = run_.outputs(gpu, shared_);
    if (plan_.halves) {
      exchange.combine_send(results, run_.stream(gpu));
      exchange.combine_receive(outputs, run_.stream(gpu));
    } else {
      exchange.combine(results, outputs, run_.stream(gpu));
    }
  }
  void capture() {
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) {
      const cuda::DeviceScope scope(run_.workspace().device(gpu));
      check(cudaStreamBeginCapture(run_.stream(gpu), cudaStreamCaptureModeRelaxed), "begin of a capture");
      if (plan_.halves) {
        send(gpu);
        run_.exchange(plan_.way, gpu).dispatch_receive(run_.stream(gpu));
      } else {
        clear(gpu);
        run_.exchange(plan_.way, gpu).dispatch(run_.inputs(gpu), {plan_.step, Phase::decode}, run_.stream(gpu));
      }
      finish(gpu);
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(run_.stream(gpu), &graph), "end of a capture");
      cudaGraphExec_t executable = nullptr;
      check(cudaGraphInstantiate(&executable, graph, 0), "instantiation");
      graphs_.push_back(executable);
      check(cudaGraphDestroy(graph), "graph");
      // Now, not at the first replay: that may come while kernels of another context wait for each other.
      check(cudaGraphUpload(executable, run_.stream(gpu)), "upload of a graph");
      check(cudaStreamSynchronize(run_.stream(gpu)), "upload of a graph");
    }
  }

  DeviceRun& run_;
  TripPlan plan_;
  Shared shared_;
  std::vector<Buffer<int>> experts_;
  std::vector<Buffer<bf16>> results_;
  std::vector<cudaGraphExec_t> graphs_;  ///< [GPU]
};

/// Queues rounds, and tells afterwards which of them went wrong where.
class Rounds {
 public:
  Rounds(DeviceRun& run, int most_queued, std::uint64_t seed) : run_(run), random_(seed), most_queued_(most_queued), seed_(seed) {
    for (int rank = 0; rank < run.ranks(); ++rank)
      found_.emplace_back(run.device_of(rank), std::vector<Difference>(static_cast<std::size_t>(most_queued)));
  }

  /// Draws tokens for every rank and queues a round on all GPUs.
  void play(Trip& trip, const Pool& pool) {
    choose(trip, pool);
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) load(gpu, pool);
    trip.start();
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) compare_outputs(gpu, pool);
  }
  /// The same in pieces, for tests that choose which GPU comes first.
  void choose(const Trip& trip, const Pool& pool) {
    if (static_cast<int>(queued_.size()) == most_queued_) settle();
    queued_.push_back({trip.title(), {}});
    for (int rank = 0; rank < run_.ranks(); ++rank)
      queued_.back().draws.push_back(static_cast<int>(random_() % static_cast<std::uint64_t>(pool.draws())));
  }
  void play_on(std::size_t gpu, Trip& trip, const Pool& pool) {
    load(gpu, pool);
    trip.replay(gpu);
    compare_outputs(gpu, pool);
  }

  /// Waits for all that is queued. Throws what went wrong in the exchange.
  void settle() {
    run_.wait();
    for (int rank = 0; rank < run_.ranks(); ++rank) {
      Buffer<Difference>& buffer = found_[static_cast<std::size_t>(rank)];
      const std::vector<Difference> found = buffer.read();
      for (std::size_t i = 0; i < queued_.size(); ++i) expect_none(found[i], rank, queued_[i], done_ + i);
      buffer.write(std::vector<Difference>(static_cast<std::size_t>(most_queued_)));
    }
    done_ += queued_.size();
    queued_.clear();
  }
  /// After a fault: what was queued is forgotten.
  void forget() {
    for (Buffer<Difference>& buffer : found_) buffer.write(std::vector<Difference>(static_cast<std::size_t>(most_queued_)));
    queued_.clear();
  }

 private:
  struct Queued {
    std::string title;
    std::vector<int> draws;  ///< [rank]
  };

  const Pool::Draw& chosen(int rank, const Pool& pool) const {
    return pool.of(rank, queued_.back().draws[static_cast<std::size_t>(rank)]);
  }
  void load(std::size_t gpu, const Pool& pool) {
    const cuda::DeviceScope scope(run_.workspace().device(gpu));
    const auto copy = [&](const auto& to, const auto& from) {
      check(cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(*from.data()), cudaMemcpyDeviceToDevice, run_.stream(gpu)),
            "loading of tokens");
    };
    for (int local = 0; local < run_.workspace().ranks_on(gpu); ++local) {
      const int rank = run_.workspace().first_rank(gpu) + local;
      const Seat& seat = run_.seat(rank);
      const Pool::Draw& draw = chosen(rank, pool);
      copy(seat.tokens, draw.count);
      if (draw.tokens == 0) continue;
      copy(seat.hidden, draw.hidden);
      copy(seat.ids, draw.ids);
      copy(seat.weights, draw.weights);
      copy(seat.shared, draw.shared);
      copy(seat.factors, draw.factors);
    }
  }
  void compare_outputs(std::size_t gpu, const Pool& pool) {
    const cuda::DeviceScope scope(run_.workspace().device(gpu));
    for (int local = 0; local < run_.workspace().ranks_on(gpu); ++local) {
      const int rank = run_.workspace().first_rank(gpu) + local;
      const Buffer<bf16>& out = run_.seat(rank).out;
      const Buffer<bf16>& want = chosen(rank, pool).want;
      compare(out.data(), want.data(), want.size(), out.size(), bf16{0xFFFF},
              found_[static_cast<std::size_t>(rank)].data() + queued_.size() - 1, run_.stream(gpu));
    }
  }
  void expect_none(const Difference& found, int rank, const Queued& round, std::size_t number) const {
    if (found.count == 0) return;
    std::ostringstream draws;
    for (const int draw : round.draws) draws << " " << draw;
    ADD_FAILURE() << round.title << ": round " << number << ", rank " << rank << " has " << found.count
                  << " wrong output values, the first is number " << found.first << " (draws of the ranks:" << draws.str()
                  << "), seed " << seed_;
  }

  DeviceRun& run_;
  std::mt19937_64 random_;
  int most_queued_;
  std::uint64_t seed_;
  std::vector<Buffer<Difference>> found_;
  std::vector<Queued> queued_;
  std::size_t done_ = 0;
};

}  // namespace heddle
