// What the benchmark sends: a batch a rank in device memory, drawn or recorded once at the largest size; smaller
// sizes take its first tokens. Results of experts are random values, too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench_arguments.hpp"
#include "bench_memory.hpp"
#include "bench_replay.hpp"
#include "heddle/device.hpp"
#include "heddle/routing.hpp"

namespace heddle::tool {

/// The routing of all ranks at the largest size: uniform, skewed or recorded.
struct BatchRouting {
  std::vector<Routing> ranks;
  int topk = 0;
  std::string note;  ///< what a reader should know
};
/// Takes the first `tokens` of each rank's batch from `a.trace` (token i of the recording is rank i % ranks's; from the
/// beginning again where it is shorter) or draws them. Throws InputError.
BatchRouting make_routing(const BenchArguments& a, int ranks, int tokens);

class Batch {
 public:
  /// Ranks are spread over the lanes' GPUs as a DeviceWorkspace does it.
  Batch(Lanes& lanes, const BatchRouting& routing, int hidden, std::uint64_t seed);

  int ranks() const { return static_cast<int>(routing_.ranks.size()); }
  int hidden() const { return hidden_; }
  int topk() const { return routing_.topk; }
  int device_of(int rank) const { return seats_[static_cast<std::size_t>(rank)].device; }
  const Routing& routing(int rank) const { return routing_.ranks[static_cast<std::size_t>(rank)]; }

  /// A workspace of at least so many bytes a rank, one at a time: made anew when it must grow, so no exchange may be left then.
  DeviceWorkspace& workspace(std::size_t bytes);

  /// Another routing of the same numbers, while the GPUs are at rest.
  void set_routing(const BatchRouting& routing);
  /// How many tokens each rank brings from now on.
  void set_tokens(int tokens);
  DeviceInput input(int rank) const;
  DeviceOutput output(int rank) const;
  /// At least `rows` rows of results of this rank, random values.
  const bf16* results(int rank, std::size_t rows);
  /// The same values into `rows` rows that lie elsewhere on this rank's GPU.
  void fill_results(int rank, bf16* to, std::size_t rows);
  /// Fills the outputs with what is not finite, so that bad_outputs finds what was not written.
  void poison_outputs();
  /// How many of the outputs of the last call are not finite, over all ranks.
  unsigned long long bad_outputs(int tokens);

 private:
  struct Seat {
    int device = 0;
    std::size_t gpu = 0;
    std::unique_ptr<Block> tokens, hidden, ids, weights, results, out, bad;
  };

  Lanes& lanes_;
  BatchRouting routing_;
  int hidden_;
  std::uint64_t seed_;
  std::vector<Seat> seats_;
  std::unique_ptr<DeviceWorkspace> workspace_;
};

}  // namespace heddle::tool
