// The exchange on GPUs: a group of ranks on the GPUs of one process or of several, its heap, and each way as kernels
// on a stream. The layouts and protocols are those of the host engine. Built with HEDDLE_CUDA only.
//
// One object drives one GPU and all ranks that live there (virtual ranks share a GPU: they run in one
// launch). Every GPU of the group makes the same calls in the same order; calls return when the kernels
// are queued, except where a way's host waits for sizes (normal, elastic with cpu_sync).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/exchange.hpp"
#include "heddle/group.hpp"

struct CUstream_st;

namespace heddle {

/// A cudaStream_t.
using DeviceStream = CUstream_st*;

class DeviceNodeLink;

/// Where a workspace's group is a node of several (device_nodes.hpp, docs/nodes.md): which one, and what leads to the others. The
/// same numbers on all processes of the node; all nodes have as many ranks.
struct DeviceNodes {
  int node = 0;
  int nodes = 1;
  std::shared_ptr<DeviceNodeLink> link = nullptr;  ///< of this process's ranks
};

/// What one process brings: its GPUs, as it numbers them, and the ranks that live there.
struct DeviceGroupOptions {
  int ranks = 1;                ///< of this process
  std::vector<int> devices{0};  ///< ranks are spread over them evenly, consecutive ranks on one GPU
  std::chrono::milliseconds deadline{30000};
  DeviceNodes nodes{};  ///< ranks are then numbered node after node
};

/// The symmetric heap of one context, with everything kernels need beside it: deadlines, live ranks, and fault records
/// that the host reads without stopping a stream. "GPU number g" is the g-th of this process's GPUs; ranks are numbered over all
/// processes.
class DeviceWorkspace {
 public:
  /// One process over all GPUs of the group. Throws InputError for GPUs that do not exist, cannot reach each other (each
  /// writes to, adds to and reads the memory of every other one here) or lack the memory.
  DeviceWorkspace(const DeviceGroupOptions& options, std::size_t bytes_a_rank);
  /// Several processes of one machine, each with GPUs of its own, which need not see each other's (CUDA_VISIBLE_DEVICES).
  /// Collective over the live members of `processes`, one a process, which must outlive the workspace. Ranks are numbered by
  /// process, then by GPU. `configuration` and `bytes_a_rank` must agree, as in Workspace; GPUs, ranks and the deadline of
  /// kernels may differ. Throws on every process alike: InputError as above, naming both GPUs; FaultError naming the process that
  /// did not come within the group's deadline. Processes that share a GPU take turns on it and are slow.
  DeviceWorkspace(Group& processes, const DeviceGroupOptions& mine, std::size_t bytes_a_rank, const std::string& configuration);
  /// Waits for this process's GPUs. Not collective: what other processes have mapped stays until they let go of it.
  ~DeviceWorkspace();
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;

  int ranks() const;         ///< of all processes, and of all nodes
  std::size_t gpus() const;  ///< of this process, as everything that takes a `gpu`
  int device(std::size_t gpu) const;
  int first_rank(std::size_t gpu) const;
  int ranks_on(std::size_t gpu) const;
  std::size_t bytes() const;             ///< of each rank's part
  HeapView view(std::size_t gpu) const;  ///< all ranks' parts, as that GPU's first rank sees them
  int process_of(int rank) const;        ///< the member of the host group that a rank of this node lives in

  /// The FaultError of the first own rank that gave up or left a call because of a rank that did, perhaps of another process.
  /// Looks at host memory only. May be called from several threads.
  void throw_if_aborted() const;
  /// Longest wait of kernels from now on, also of graphs captured before. This process only.
  void set_deadline(std::chrono::nanoseconds deadline);
  /// Tests: every verb of every warp of this process sleeps now and then, at most so long. 0: never.
  void set_delays(std::chrono::nanoseconds longest, std::uint32_t seed);
  /// After a fault, by every process that goes on: waits for its GPUs, meets the others, clears the own ranks' headers and fault
  /// records, raises every epoch to the same value past any call that was under way, meets again. `live` is by rank and the same
  /// on all processes; ranks that are not live are skipped from now on. The host group is reset along with it: its members go
  /// on that have a live rank. A process with no live rank does not call, and neither does one that is gone; the group's
  /// deadline should be no shorter than the kernels'. A reset that failed may be called again, by all. InputError where there are
  /// several nodes: such a group cannot go on after a fault.
  void reset(const std::vector<bool>& live);
  void reset();                           ///< with the ranks that are live now: masked ones stay masked
  const std::vector<bool>& live() const;  ///< by rank

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// One rank's tokens in its GPU's memory, which stay as they are until combine has run. The number of tokens is read on the
/// device, so a captured graph may be replayed with another one.
struct DeviceInput {
  const int* tokens = nullptr;        ///< one int, at most step.max_tokens
  const bf16* hidden = nullptr;       ///< [tokens, H], 16-byte aligned
  const std::int32_t* ids = nullptr;  ///< [tokens, topk]; a bad one, found on the device, ends the call on all ranks
  const float* weights = nullptr;     ///< [tokens, topk]
  const std::byte* extra[3] = {};     ///< one_sided: extra payloads
};

/// Where a rank's outputs go: as CombineOutput, in device memory; rows are 16-byte aligned.
struct DeviceOutput {
  bf16* out = nullptr;
  const bf16* shared = nullptr;
  const float* shared_factors = nullptr;
  // All outputs for all ranks: this rank's are rows [first, first + tokens) of the all_tokens that every rank wants. A slice
  // that does not fit is an InputError where the host can see it, else a fault. With GatherMode::tensor_parallel all_out [tokens,
  // H] must be there and the rest of this struct but shared and shared_factors is ignored.
  bf16* all_out = nullptr;  ///< [all_tokens, H], or null on all ranks alike
  int first = 0;
  int all_tokens = 0;
};

/// NCCL's communicators, one a GPU, for gather's collectives (DeviceExchangeOptions::nccl). libnccl.so.2 is looked for at run time.
/// Shared by the exchanges of all GPUs of a process; their round trips follow each other on one stream a GPU.
class NcclCommunicators {
 public:
  /// One process: rank r is on devices[r]. Throws InputError where there is no NCCL or a GPU is named twice, Error where NCCL
  /// fails.
  explicit NcclCommunicators(const std::vector<int>& devices);
  /// Several processes of one machine, which need not see each other's GPUs: `devices` are this one's, as it numbers them.
  /// Collective over the live members of `processes`, those of the workspace; ranks are numbered by process, then by GPU, as there.
  /// Throws on every process alike: InputError as above, where processes have different versions of NCCL or one older than 2.14, or
  /// share a GPU; Error where NCCL fails; FaultError naming a process that does not come, within twice the group's deadline. NCCL's
  /// calls do not block then: an exchange's call returns when its kernels are queued, as ever, and throws Error where that takes
  /// half of that deadline. `processes` is not used after this.
  NcclCommunicators(Group& processes, const std::vector<int>& devices);
  /// With several processes waits until all let go of theirs, for half of that deadline at most.
  ~NcclCommunicators();
  NcclCommunicators(const NcclCommunicators&) = delete;
  NcclCommunicators& operator=(const NcclCommunicators&) = delete;

  int ranks() const;    ///< of all processes
  int version() const;  ///< as NCCL counts: 22809 is 2.28.9
  /// NCCL's kernels know no deadline: if a rank does not come, the others wait for ever. These two are what the host
  /// can do about it. Throws Error if NCCL has noticed a failure by itself. Does not wait for the GPUs.
  void throw_if_failed() const;
  /// Makes kernels that wait leave, best effort, and ends the communicators: calls that use them throw from then on. What the
  /// calls under way left behind is not to be used. This process's alone: each calls it.
  void abort();

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct DeviceExchangeOptions {
  /// CTAs a GPU for the transfer, over all its ranks; 0: all SMs, fewer for the smallest batches. Two contexts in flight need
  /// a share each; kernels are then not launched before those ahead of them have ended.
  int sms = 0;
  /// gather (padded, one rank a GPU, combine wire bf16): all-gather and reduce-scatter by NCCL instead of own kernels. Its sums are
  /// rounded to bf16 at every hop (docs/numerics.md), it has no deadline, and no rank may be masked. Null: own kernels.
  std::shared_ptr<NcclCommunicators> nccl = nullptr;
  /// Kernels count what DeviceExchange::counters returns: at the end of a receiving half the first warp of each rank stores
  /// some words to memory of its GPU, which nothing waits for; where rows arrive as routed, CTAs add up the ids that they list
  /// anyway. Not with NCCL (InputError).
  bool counters = false;
  /// Rows that travel as bf16 go by the SMs' copy engines (bulk copies) where they, or the parts that they are divided into for
  /// several warps, have at least so many bytes; results are pulled likewise. Slower wherever it was measured. A CTA then has 128
  /// KiB more of shared memory, so that none of another context fits beside it. The same bits. 0: never. Negative, above 65,535 or
  /// with NCCL: InputError.
  int bulk_bytes = 0;
};

/// What one rank's calls of an exchange moved and waited for. A call counts when its receiving half has ended, in a replayed
/// graph too; one whose first CTA met a fault does not. Nothing is ever set back, not even by a reset.
struct ExchangeCounters {
  struct Count {
    std::uint64_t last = 0;  ///< of the last call
    std::uint64_t sum = 0;   ///< of all calls
  };
  std::uint64_t dispatches = 0;
  std::uint64_t combines = 0;
  std::vector<Count> sent;     ///< [ranks] rows to each rank, itself included; low_latency: a row a pair, else one a token
  std::vector<Count> arrived;  ///< [ranks] rows from each rank, likewise
  /// [local experts] rows of each, in the order of Placement::experts_of; a row counts for each of its experts. Where rows arrive
  /// as routed, counted by the combine behind their dispatch: `last` is then of all dispatches before the last combine and behind
  /// the one before it.
  std::vector<Count> experts;
  /// Nanoseconds in which the rank's first CTA waited for other ranks' words. At normal's queues, through which its rows come in
  /// both directions: in which a warp of the rank had nothing to move, of the warp that waited longest.
  Count dispatch_wait;
  Count combine_wait;
};

/// The largest count over the mean: 1 where all are equal, 0 where nothing was counted.
struct Imbalance {
  double last = 0;
  double sum = 0;
};
/// Of rows by expert or by rank, perhaps gathered from the counters of several ranks.
Imbalance imbalance(std::span<const ExchangeCounters::Count> rows);

/// One way on one GPU, for all ranks that live there. Arrays are by local rank. A dispatch is followed by its combine before
/// the next one: combine uses the call up. Kernels of the caller that are launched before the one before them on the stream
/// has ended (programmatic stream serialization) must wait for that end, also where they do not use what it made.
class DeviceExchange {
 public:
  virtual ~DeviceExchange() = default;
  virtual void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) = 0;
  virtual void dispatch_receive(DeviceStream stream) = 0;
  /// What arrived at a local rank: pointers into device memory. received and real are -1 where only the GPU knows.
  virtual Arrived arrived(int local_rank) const = 0;
  /// Where a local rank's results may be made so that combine need not move them: pass this pointer to combine_send. Room
  /// as arrived().room, valid from this dispatch to the end of combine. Null where the way or its combine wire wants them
  /// elsewhere (gather and one_sided with bf16 have it).
  virtual bf16* result_rows(int) const { return nullptr; }
  /// results: as Exchange::combine_send, 16-byte aligned, in device memory that stays as it is until combine_receive has run.
  virtual void combine_send(std::span<const bf16* const> results, DeviceStream stream) = 0;
  virtual void combine_receive(std::span<const DeviceOutput> outputs, DeviceStream stream) = 0;
  /// Both halves; one kernel where the way allows it.
  virtual void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) = 0;
  virtual void combine(std::span<const bf16* const> results, std::span<const DeviceOutput> outputs, DeviceStream stream) = 0;
  /// A local rank's counters as they are now. May be called at any time from any thread while kernels run, stops no stream and
  /// waits for none. What dispatch counts is of one call throughout, and so is what combine counts; when a round trip is
  /// under way, dispatch may be a call ahead. Throws InputError without DeviceExchangeOptions::counters or for a rank that is
  /// not here.
  virtual ExchangeCounters counters(int local_rank) const;
};

/// A way on GPU number `gpu` of the workspace; `memory` as for create_exchange. Kernels are loaded and
/// checked to fit at once here. Throws InputError.
std::unique_ptr<DeviceExchange> create_device_exchange(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                       const ExchangeMemory& memory, const DeviceExchangeOptions& device = {});

}  // namespace heddle
