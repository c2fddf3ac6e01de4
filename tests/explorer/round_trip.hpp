// Round trips of one way as a scenario: every rank makes a few calls (dispatch, experts, combine) with
// checked arrivals and outputs. To add a way, write a Trip (see trips.hpp) and name it in the tests.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <string>
#include <vector>

#include "exchange/areas.hpp"
#include "explorer/batches.hpp"
#include "explorer/worker.hpp"

namespace heddle::explorer {

template <class T>
bool same_bytes(const std::vector<T>& expected, const void* seen) {
  return expected.empty() || std::memcmp(expected.data(), seen, expected.size() * sizeof(T)) == 0;
}

/// Ends the run if bytes are not what they should be.
template <class W, class T>
void expect_bytes(W& w, const std::vector<T>& expected, const void* seen, const std::string& what) {
  if (!same_bytes(expected, seen))
    w.machine().violate(fmt::format("wrong data: {} on rank {} in call {}", what, w.heap().rank, w.epoch()));
}

template <class W>
void expect_equal(W& w, int expected, int seen, const std::string& what) {
  if (expected != seen) {
    w.machine().violate(
        fmt::format("wrong data: {} on rank {} in call {} is {}, not {}", what, w.heap().rank, w.epoch(), seen, expected));
  }
}

/// Copies heap bytes that the experts read; they have no worker of their own here.
template <class W>
std::vector<std::byte> fetch(W& w, const std::byte* from, std::size_t bytes) {
  std::vector<std::byte> to(bytes);
  w.complete(w.copy_bytes(to.data(), from, bytes));
  return to;
}

/// Trip: Trip(const Batches&); areas(); begin(); and, for one worker of one rank in one call,
/// dispatch(w, call), experts(w, call) by worker 0 between launches, combine(w, call, out).
template <class Trip, class W = ExplorerWorker>
class RoundTrips : public Scenario {
 public:
  explicit RoundTrips(const Problem& problem)
      : batches_(problem), trip_(batches_), outputs_(static_cast<std::size_t>(problem.ranks)) {}

  std::string name() const override { return fmt::format("{} ({})", Trip::name, batches_.problem().name()); }
  int ranks() const override { return batches_.problem().ranks; }
  int workers_a_rank() const override { return batches_.problem().workers; }
  bool live(int rank) const override { return batches_.live(rank); }
  std::size_t part_bytes() const override { return trip_.areas().end; }
  std::size_t poisoned() const override { return trip_.areas().dispatch; }
  void begin() override { trip_.begin(); }

  void work(Machine& machine, int rank, int index) override {
    W w(machine, rank, index);
    std::vector<bf16>& out = outputs_[static_cast<std::size_t>(rank)];
    for (int call = 0; call < batches_.calls(); ++call) {
      w.start();
      if (index == 0) out.assign(static_cast<std::size_t>(batches_.shape().cap * batches_.problem().hidden), bf16{0xFFFF});
      w.end_launch();
      must(w, trip_.dispatch(w, call));
      w.end_launch();
      if (index == 0) trip_.experts(w, call);
      w.end_launch();
      must(w, trip_.combine(w, call, out.data()));
      must(w, w.team_barrier());
      if (index == 0) {
        expect_bytes(w, batches_.outputs(call, rank), out.data(), "the output");
        w.end_call();
      }
      w.end_launch();
    }
  }

  std::string describe(std::size_t offset) const override {
    const Areas areas = trip_.areas();
    if (offset < areas.words) return fmt::format("header+{}", offset);
    if (offset < areas.dispatch) return fmt::format("word {}", (offset - areas.words) / sizeof(Word));
    if (offset < areas.combine) return fmt::format("dispatch+{}", offset - areas.dispatch);
    if (offset < areas.outputs) return fmt::format("combine+{}", offset - areas.combine);
    return fmt::format("outputs+{}", offset - areas.outputs);
  }

 private:
  static void must(W& w, bool went_on) {
    if (!went_on) w.machine().violate(fmt::format("rank {} gave up in call {}", w.heap().rank, w.epoch()));
  }

  Batches batches_;
  Trip trip_;
  std::vector<std::vector<bf16>> outputs_;
};

}  // namespace heddle::explorer
