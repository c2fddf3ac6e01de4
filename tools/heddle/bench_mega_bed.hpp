// What `heddle bench mega` measures on: a layer's weights, drawn in seconds, and one way's layers on all GPUs, calls of which go
// through copies of the weights.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "bench_batch.hpp"
#include "bench_mega.hpp"
#include "bench_replay.hpp"
#include "bench_sharing.hpp"
#include "heddle/device_layer.hpp"
#include "layer/synthetic.hpp"

namespace heddle::tool {

/// A whole layer's weights made of the matrices of a few drawn experts, so that drawing takes seconds and little memory. Each of
/// 256 experts still has a gate, up and down of its own that no other has together: a row in the wrong expert shows.
class DrawnLayer {
 public:
  DrawnLayer(const MegaShape& layer, std::uint64_t seed);
  DrawnLayer(const DrawnLayer&) = delete;
  DrawnLayer& operator=(const DrawnLayer&) = delete;

  /// Valid while this object lives.
  const LayerSource& source() const { return source_; }

 private:
  ExpertWeights expert(int id) const;

  SyntheticLayer drawn_;
  std::vector<WeightMatrix> wide_, down_;  ///< gates and ups; downs
  LayerSource source_;
};

/// What a call asks of the busiest GPU at least.
struct MegaLoad {
  int touched = 0;          ///< experts with rows
  double weight_bytes = 0;  ///< of these as they are stored, and of the shared expert
  double operations = 0;    ///< two a multiply-add
};
MegaLoad load_of(const MegaShape& layer, const Batch& batch);

/// A way and, of the fused layer, where its shared expert runs, what becomes of results and how many rows it has room for.
struct LayerWay {
  Way way = Way::mega;
  SharedMode shared = SharedMode::alone;
  bool inside = true;
  Wire combine_wire = Wire::bf16;
  Combine combine = Combine::slots;
  std::shared_ptr<const TuningTable> table = nullptr;  ///< of way auto; null: the shipped one
  RingSize ring = RingSize::live;
};

/// Heap that all the ways need together, in a step of `tokens` a rank. A way that refuses the layer is left out: it says so itself
/// when its layers are made.
ExchangeMemory memory_of(const LayerSource& source, int ranks, const std::vector<LayerWay>& ways, int tokens);

/// Seconds of the parts of a call that is not captured, of the GPU where it took longest.
using MegaParts = DeviceLayerSeconds;

/// Where a bed's calls run.
struct BedPlace {
  SmShare sms = {};
  bool second_stream = false;  ///< of each GPU
};

/// One way's layers. Beds share the batch's workspace, one after the other, with the GPUs at rest in between.
class MegaBed {
 public:
  /// `copies` of the layer on every GPU, or as many as fit. Throws InputError or Error, also for lack of memory for the first.
  MegaBed(Lanes& lanes, Batch& batch, const LayerSource& source, const LayerWay& way, int tokens, const ExchangeMemory& memory,
          int copies, const BedPlace& place = {});

  int copies() const { return static_cast<int>(layers_.size()); }
  /// Of all copies, on the first GPU.
  std::size_t weight_bytes() const;
  /// Does the host wait for counts in every call, so that none can be captured?
  bool is_eager() const { return is_eager_; }
  /// A call of copy `call` % copies on all GPUs. It has begun on all before it ends on one, as an eager one must.
  void queue(int call) { queue(call, seats_); }
  /// The same with another batch of as many tokens.
  void queue_other(int call, const Batch& batch) { queue(call, seats_of(batch)); }
  // The same in two halves; an eager one waits in the second.
  void begin(int call) { begin(call, seats_); }
  void end(int call) { end(call, seats_); }
  /// A call of copy `call` % copies on all GPUs, not captured. Gated: queued whole before the GPUs may begin, so that their times
  /// are not the host's; not for eager calls. Throws what check throws.
  void call(int call, bool gated, const std::function<void()>& give_up);
  /// That the last call went, of way auto the one chosen.
  Way way() const { return layers_.front().front().way(); }
  /// Of the last call().
  MegaParts parts(int call) const;
  /// Throws the FaultError of a rank that gave up, and what experts met.
  void check();

 private:
  /// What ranks bring and where their outputs go, a GPU.
  struct Seats {
    std::vector<std::vector<DeviceInput>> inputs;
    std::vector<std::vector<bf16*>> outputs;
  };

  Seats seats_of(const Batch& batch) const;
  void queue(int call, const Seats& seats);
  void begin(int call, const Seats& seats);
  void end(int call, const Seats& seats);
  cudaStream_t stream(std::size_t gpu) const { return place_.second_stream ? lanes_.second(gpu) : lanes_.stream(gpu); }
  void add_copy(const LayerSource& source, const LayerWay& way, int tokens, const ExchangeMemory& memory);
  DeviceLayer& layer(int call, std::size_t gpu) { return layers_[static_cast<std::size_t>(call) % layers_.size()][gpu]; }

  Lanes& lanes_;
  DeviceWorkspace& workspace_;
  Step step_;
  bool is_eager_;
  BedPlace place_;
  Seats seats_;
  std::vector<std::vector<DeviceLayer>> layers_;  ///< [copies][GPUs]
};

}  // namespace heddle::tool
