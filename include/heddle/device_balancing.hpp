// Copies of experts on GPUs: which copy each pair takes, chosen by a kernel that can be captured, and a layer whose placement
// follows the load (docs/balancing.md, "On GPUs"). Built with HEDDLE_CUDA only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "heddle/balancing.hpp"
#include "heddle/device.hpp"
#include "heddle/device_layer.hpp"

namespace heddle {

/// For the ranks that live on one GPU. A layer or exchange of physical experts (ReplicaMap::placement) takes what choose() returns:
///
///   layer.forward(copies.choose(inputs, stream), step, outputs, stream);
///
/// Captured calls follow later updates: placements change between replays of a graph.
class DeviceCopies {
 public:
  /// Ranks [first_rank, first_rank + local_ranks) on CUDA's `device`, at most `cap` tokens each in a call, all passes of it
  /// together. One source: all tokens are source 0's (tensor-parallel attention, where every rank brings all). Takes all memory.
  /// Throws InputError for more than 512 experts, 1,024 copies or 256 ranks.
  DeviceCopies(int device, int first_rank, int local_ranks, const ReplicaMap& map, CopyRule rule, int topk, int cap,
               bool one_source = false);
  ~DeviceCopies();
  DeviceCopies(DeviceCopies&&) noexcept;
  DeviceCopies& operator=(DeviceCopies&&) noexcept;

  /// Queues a kernel a rank. The inputs with physical ids in memory of this object, the next call's too. The choices are those of
  /// choose_copies. An id that is none, or that repeats within a token, becomes one that the dispatch refuses, naming
  /// map().physical().
  std::vector<DeviceInput> choose(std::span<const DeviceInput> inputs, DeviceStream stream);
  /// Another placement of the same sizes (InputError), for calls behind this one on the stream, captured ones too. All GPUs change
  /// between the same calls, with their experts' weights (DeviceLayer::update_expert). Not in graph capture. Waits for the update
  /// before it alone.
  void update(const ReplicaMap& map, DeviceStream stream);
  const ReplicaMap& map() const;
  /// Pairs of each logical expert that this GPU's ranks brought since the last such call, and sets them to 0. Waits for the stream.
  std::vector<std::int64_t> take_counts(DeviceStream stream);
  // The same in two halves, the first of which queues and returns, and the second waits for what the first one queued alone.
  void send_counts(DeviceStream stream);
  std::vector<std::int64_t> sent_counts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What a DeviceBalancedLayer has beside BalancingOptions. The same on all processes.
struct DeviceBalancingOptions {
  /// Most calls that the host queues ahead of those that have ended: follow() waits for the end of the call so many before. What
  /// follow() decides is as many calls old. 0: every call is waited for.
  int calls_ahead = 4;
  /// Most tokens that a rank brings to a call; default: the cap, with tensor_parallel the whole batch of caps. More with
  /// Overflow::split.
  std::optional<int> most_tokens;
  /// Experts that can come to a rank in one change, for which each has memory; default: as many as it holds. A placement that
  /// brings more is gone to in several changes, one behind the other and each with every expert somewhere, as far as there is such
  /// a way.
  std::optional<int> staged_experts;
};

/// What a GPU has sent to ranks, its own included.
struct DeviceSent {
  std::uint64_t bytes = 0;
  double seconds = 0;  ///< in which copies of its were under way, beside calls
};

/// A layer on all GPUs of a process whose experts may have copies and change places between calls, without a stop: BalancedLayer
/// for DeviceLayer, of any way, with the same decisions and the same bits. Ids that come in are those of logical experts.
///
///   layer.forward(gpu, inputs, step, outputs, streams[gpu]);    // on every GPU; or a replay of such a call, captured before
///   layer.follow(streams);                                      // once behind each
///
/// A change: a GPU that has an expert writes it into staging memory of the rank that it comes to, over the link, by copies on a
/// stream of its own, `copy_bytes` a call. Calls go on under the old placement. When all have arrived, which every process finds
/// behind the same call, the GPUs copy them into their cells, between two calls on their streams, and the table of copies changes
/// with them. Graphs keep their addresses.
///
/// Memory beside a DeviceLayer's: that of staged_experts experts a rank.
class DeviceBalancedLayer {
 public:
  /// Collective over the processes of the workspace, one object each. `source`: of logical experts, read here and not needed later.
  /// `first`, `memory` and `options` as BalancedLayer's: `memory` is what the workspace was sized for. Of `device`, step_exponents
  /// is switched on where any rank's experts want it. Throws InputError, on all processes alike, for what does not fit together,
  /// differs between them, or has no memory; for expert_slices and several nodes; as DeviceLayer and DeviceCopies.
  DeviceBalancedLayer(DeviceWorkspace& workspace, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
                      const LayerOptions& options, const BalancingOptions& balancing = {}, const DeviceBalancingOptions& ahead = {},
                      const DeviceLayerOptions& device = {});
  /// Waits for copies under way.
  ~DeviceBalancedLayer();
  DeviceBalancedLayer(DeviceBalancedLayer&&) noexcept;
  DeviceBalancedLayer& operator=(DeviceBalancedLayer&&) noexcept;

  // As DeviceLayer's, on GPU number `gpu` of this process; may be captured.
  void begin(std::size_t gpu, std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream);
  void end(std::size_t gpu, std::span<bf16* const> outputs, DeviceStream stream);
  void forward(std::size_t gpu, std::span<const DeviceInput> inputs, const Step& step, std::span<bf16* const> outputs,
               DeviceStream stream) {
    begin(gpu, inputs, step, stream);
    end(gpu, outputs, stream);
  }

  /// Once behind every call, or replay of a captured one, when it has been queued on all GPUs of this process, and before the next
  /// one: counts, looks, copies and switches. `streams`: those of the calls, one a GPU. Queues work on them and returns; waits only
  /// as calls_ahead says. All processes make the same calls. Throws InputError in graph capture, and the FaultError of a rank that
  /// gave up: then reset().
  void follow(std::span<const DeviceStream> streams);

  /// As BalancedLayer's; all processes, between the same calls.
  void move_to(const ReplicaMap& map);
  bool is_moving() const;
  const ReplicaMap& map() const;  ///< in force for the next call
  /// Of this process: experts that came to its ranks, bytes that its GPUs sent. Seconds are the host's, for queueing.
  const BalancingReport& report() const;

  /// Once the streams have been waited for: as DeviceLayer's, of all GPUs of this process.
  void throw_if_failed();
  /// On one GPU, of physical experts: for its reports.
  const DeviceLayer& layer(std::size_t gpu) const;
  std::size_t staging_bytes() const;  ///< of each rank, in its GPU's memory
  /// Of one GPU since the layer was made; seconds of copies that have ended.
  DeviceSent sent(std::size_t gpu);

  /// After a fault, behind DeviceWorkspace::reset, by all processes that go on: as BalancedLayer's.
  void reset();
  /// Collective end: gives the words that processes share back.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
