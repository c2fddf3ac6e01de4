// Round trips of modes that the other programs leave out: outputs of all ranks for all ranks, tensor-parallel attention, and
// rooms of the exact size.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gpu/device_run.hpp"

namespace heddle {

/// How one round trip is made.
struct ModeTrip {
  bool halves = false;
  bool all_outputs = false;  ///< always so under tensor-parallel attention
  Shared shared = Shared::none;
  std::vector<bool> live;  ///< empty: all
};

/// A case on this machine's GPUs, with room a rank for the outputs of all.
class Modes {
 public:
  explicit Modes(const Case& c, std::chrono::milliseconds deadline = std::chrono::seconds(20),
                 const DeviceExchangeOptions& device = {})
      : c_(c), run_({c}, gpus_here(), deadline, device) {
    for (int rank = 0; rank < c.ranks(); ++rank) {
      all_out_.emplace_back(run_.device_of(rank), static_cast<std::size_t>(all_tokens()) * hidden());
      results_.emplace_back(run_.device_of(rank), std::size_t{0});
    }
  }

  DeviceRun& run() { return run_; }
  const Case& the_case() const { return c_; }
  int all_tokens() const { return c_.tensor_parallel() ? c_.tokens[0] : first_row(c_.ranks()); }
  Step step() const { return {c_.most_tokens(), Phase::decode}; }

  std::vector<DeviceOutput> outputs(std::size_t gpu, const ModeTrip& trip) const {
    std::vector<DeviceOutput> all = run_.outputs(gpu, trip.shared);
    for (std::size_t local = 0; local < all.size(); ++local) {
      const int rank = run_.first_rank(gpu) + static_cast<int>(local);
      if (c_.tensor_parallel()) all[local].out = nullptr;  // it is ignored
      if (!trip.all_outputs && !c_.tensor_parallel()) continue;
      all[local].all_out = all_out_[static_cast<std::size_t>(rank)].data();
      all[local].first = first_row(rank);
      all[local].all_tokens = all_tokens();
    }
    return all;
  }
  std::vector<const bf16*> results(std::size_t gpu) const { return run_.of_gpu(gpu, DeviceRun::pointers(results_)); }

  /// Everything up to the experts' results, which are kept for combine.
  void dispatch(int round, const ModeTrip& trip) {
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      run_.load(rank, draw(c_, rank, round));
      all_out_[static_cast<std::size_t>(rank)].poison();
    }
    run_.settle();
    if (trip.halves || c_.options.cpu_sync || c_.options.way == Way::normal) {
      run_.dispatch(step(), false);
    } else {
      run_.dispatch_fused(step());
    }
    run_.wait();
    if (!trip.live.empty()) {
      results_of_arrivals(nullptr, trip.live);
      return;
    }
    const std::vector<HostArrived> host = host_arrivals(c_, round);
    results_of_arrivals(&host, trip.live);
    if (c_.options.cpu_sync) expect_exact_room(host);
  }
  void combine(const ModeTrip& trip) {
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) combine_on(gpu, outputs(gpu, trip), trip.halves);
  }
  void combine_on(std::size_t gpu, const std::vector<DeviceOutput>& outputs, bool halves) {
    DeviceExchange& exchange = run_.exchange(0, gpu);
    if (halves) {
      exchange.combine_send(results(gpu), run_.stream(gpu));
      exchange.combine_receive(outputs, run_.stream(gpu));
    } else {
      exchange.combine(results(gpu), outputs, run_.stream(gpu));
    }
  }
  void expect_outputs(int round, const ModeTrip& trip) const {
    std::vector<std::vector<bf16>> want;  // of each rank; under tensor-parallel attention of the batch
    for (int rank = 0; rank < (c_.tensor_parallel() ? 1 : c_.ranks()); ++rank)
      want.push_back(expected(c_, draw(c_, rank, round), trip.live, trip.shared));
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      if (!is_live(trip.live, rank)) continue;
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", round " << round);
      run_.seat(rank).expect_guards("rank " + std::to_string(rank));
      if (!c_.tensor_parallel()) {
        const std::vector<bf16>& own = want[static_cast<std::size_t>(rank)];
        ASSERT_EQ(differences(own, read(run_.seat(rank).out.data(), own.size()).data()), 0);
        if (!trip.all_outputs) continue;
      }
      const Buffer<bf16>& all = all_out_[static_cast<std::size_t>(rank)];
      all.expect_guards("outputs of all ranks");
      const std::vector<bf16> have = all.read();
      for (std::size_t source = 0; source < want.size(); ++source) {
        const int from = static_cast<int>(source);
        if (!c_.tensor_parallel() && !is_live(trip.live, from)) continue;
        ASSERT_EQ(differences(want[source], have.data() + static_cast<std::size_t>(first_row(from)) * hidden()), 0)
            << "outputs of rank " << source;
      }
    }
  }
  void round_trip(int round, const ModeTrip& trip) {
    dispatch(round, trip);
    if (testing::Test::HasFatalFailure()) return;
    combine(trip);
    run_.wait();
    expect_outputs(round, trip);
  }

 private:
  std::size_t hidden() const { return static_cast<std::size_t>(c_.options.hidden); }
  int first_row(int rank) const {
    int first = 0;
    for (int r = 0; r < rank && !c_.tensor_parallel(); ++r) first += c_.tokens_of(r);
    return first;
  }
  /// Into the same memory as before where that suffices, so that a captured combine finds it.
  void results_of_arrivals(const std::vector<HostArrived>* host, const std::vector<bool>& live) {
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      if (!is_live(live, rank)) continue;
      const HostArrived arrived = run_.arrived(rank);
      if (host != nullptr) expect_same_arrival(c_, arrived, (*host)[static_cast<std::size_t>(rank)]);
      if (testing::Test::HasFatalFailure()) return;
      const std::vector<bf16> values = run_experts(c_, arrived.view, rank);
      keep_results(static_cast<std::size_t>(rank), values);
    }
    run_.settle();
  }
  void keep_results(std::size_t rank, const std::vector<bf16>& values) {
    if (values.size() <= results_[rank].size()) {
      results_[rank].write(values);
      return;
    }
    std::vector<Buffer<bf16>> grown;
    for (std::size_t r = 0; r < results_.size(); ++r) {
      if (r == rank) {
        grown.emplace_back(run_.device_of(static_cast<int>(r)), values);
      } else {
        grown.push_back(std::move(results_[r]));
      }
    }
    results_ = std::move(grown);
  }
  void expect_exact_room(const std::vector<HostArrived>& host) const {
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      const std::size_t gpu = run_.gpu_of(rank);
      const Arrived there = run_.exchange(0, gpu).arrived(rank - run_.first_rank(gpu));
      const Arrived& want = host[static_cast<std::size_t>(rank)].view;
      EXPECT_TRUE(there.host_waited) << "rank " << rank;
      EXPECT_EQ(there.received, want.received) << "rank " << rank;
      EXPECT_EQ(there.room, want.room) << "rank " << rank;
    }
  }

  Case c_;
  DeviceRun run_;
  std::vector<Buffer<bf16>> all_out_, results_;
};

}  // namespace heddle
