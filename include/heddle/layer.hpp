// One MoE layer on one rank: a way, a runner and the experts, as one call from tokens to outputs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/checkpoint.hpp"
#include "heddle/exchange.hpp"
#include "heddle/experts.hpp"
#include "heddle/group.hpp"
#include "heddle/routing.hpp"
#include "heddle/shape.hpp"
#include "heddle/tuning.hpp"

namespace heddle {

/// What happens to the shared expert of a layer that has one. The fused layer (mega) runs it inside, as tasks of its own, alone or
/// fused: the bits are the same.
enum class SharedMode : std::uint8_t {
  alone,  ///< computed by itself on the rank's own tokens
  fused,  ///< one more expert of every rank, an extra choice of every own token that never travels
  extra,  ///< mega only, to compare: one more routed expert of every rank, whose rows go through tables and rings like any other
};

/// What a call does with more tokens than the cap.
enum class Overflow : std::uint8_t {
  error,  ///< throws InputError before anything is written
  split,  ///< runs in as many passes as the largest batch of the step needs, the same on all ranks; the bits of one call
};

/// Which sums a layer of way auto may choose: ways of one kind have equal bits, those of the other round apart (docs/numerics.md).
enum class SumOrder : std::uint8_t {
  any,         ///< the fastest way; the size of a step may change bits
  slots,       ///< low_latency, mega, and elastic with Reduce::home
  two_stages,  ///< gather, normal, one_sided, and elastic with Reduce::rank
};

/// What a layer of Way::automatic chooses from, and by. The same on all ranks.
struct AutoOptions {
  std::shared_ptr<const TuningTable> table;  ///< null: TuningTable::shipped()
  /// What its times are looked up by; empty: the GPU's name, on the host engine host_machine().
  std::string machine;
  /// Candidates; empty: all that do what the options ask for, on GPUs without those whose host waits for counts (normal, elastic
  /// with cpu_sync), which cannot be captured.
  std::vector<Way> ways;
  SumOrder sums = SumOrder::any;
};

/// Everything a layer is created with. The same on all ranks.
struct LayerOptions {
  Way way = Way::low_latency;
  RunnerKind runner = RunnerKind::automatic;  ///< automatic: what the way's layout wants
  int cap = 0;                                ///< most tokens a rank may bring
  std::optional<Activation> activation;       ///< default: bf16 where the weights are bf16, else fp8
  Quantisation quantisation;
  std::optional<Wire> wire;  ///< default: what the runner takes
  Wire combine_wire = Wire::bf16;
  WeightAt weight_at = WeightAt::activation;
  Reduce reduce = Reduce::rank;            ///< elastic only
  NodeMode mode = NodeMode::direct;        ///< elastic on a group of several nodes only
  Combine combine = Combine::slots;        ///< mega only
  bool cpu_sync = false;                   ///< elastic only
  GatherMode gather = GatherMode::padded;  ///< gather only
  std::optional<float> clamp;              ///< L of the SwiGLU clamp; default: the shape's, none if that has none
  SharedMode shared = SharedMode::alone;
  /// Tensor-parallel attention: forward() takes the whole batch on every rank, each rank keeps its slice
  /// for the round trip, and every rank gets all outputs. With gather nothing is sent at all.
  bool tensor_parallel = false;
  /// Tensor-parallel experts (gather, with Placement::everywhere): every rank holds a slice of every expert's intermediate
  /// size, in multiples of 128, and computes it for all tokens; the sums over ranks make the results.
  bool expert_slices = false;
  int workers = 1;       ///< protocol threads a rank (host engine); mega: in each of its roles, and what sizes its live ring
  int block_rows = 128;  ///< mega only: rows of a row block, a multiple of 8, 8 to 256
  RingSize ring = RingSize::live;  ///< mega only
  Overflow overflow = Overflow::error;
  AutoOptions automatic;  ///< Way::automatic only
};

/// Where a layer's weights come from: a checkpoint, or anything that can hand out experts by id.
struct LayerSource {
  LayerShape shape;
  WeightKind kind = WeightKind::bf16;
  std::function<ExpertWeights(int)> expert;  ///< views that stay valid as long as the source's owner
  std::optional<SharedExpert> shared;
};

/// `checkpoint` must outlive what is made of the source.
LayerSource source_of(const LayerCheckpoint& checkpoint);

/// A layer's own router: scores of hidden states (docs/numerics.md, "Router"). Views; their owner must outlive the layer.
struct LayerRouter {
  std::span<const float> weights;  ///< [E, H]
  std::span<const float> bias;     ///< [E], selects only; or empty
  RouterOptions options;
};

/// The checkpoint's. Throws InputError where it has none, or config.json does not say how it scores.
LayerRouter router_of(const LayerCheckpoint& checkpoint);

/// One rank's share of a layer: its own experts in local order, and the shared expert.
struct LayerWeights {
  LayerShape shape;
  WeightKind kind = WeightKind::bf16;
  Placement placement;
  std::vector<ExpertWeights> experts;
  std::optional<SharedExpert> shared;
  std::optional<LayerRouter> router;  ///< for calls without ids

  /// Views into the source, which must outlive the layer. Asks for this rank's experts only.
  static LayerWeights load(const LayerSource& source, const Placement& placement, int rank);
  /// What options and memory follow from, on every rank alike: all but the experts.
  static LayerWeights common(const LayerSource& source, const Placement& placement);
};

/// The exchange that a layer of these weights and options needs. Throws InputError for options that do
/// not fit together or do not fit the weights, and for Way::automatic, which has one a candidate.
ExchangeOptions exchange_options(const LayerWeights& weights, const LayerOptions& options);

/// Heap that a layer needs in every rank's part; of Way::automatic what all of its candidates need, which share it. Nothing is
/// allocated, and of the weights the experts do not matter. Throws InputError as exchange_options.
ExchangeMemory layer_memory(const LayerWeights& weights, const LayerOptions& options);

/// A layer of a context, before there is anything of it.
struct ContextLayer {
  const LayerSource* source = nullptr;
  Placement placement;
  LayerOptions options;
};

/// What layers that share a workspace need, known before anything is allocated.
struct ContextPlan {
  ExchangeMemory memory;       ///< for all that is made in the workspace
  std::size_t heap_bytes = 0;  ///< of every rank's part: what Workspace and DeviceWorkspace take
  std::string configuration;   ///< what ranks compare
};
/// Throws InputError as exchange_options, and where placements have different numbers of ranks.
ContextPlan plan_context(std::span<const ContextLayer> layers);

/// All that ranks must agree on to share a layer, one "name=value" a line: what a Workspace compares.
std::string describe(const LayerWeights& weights, const LayerOptions& options);

/// Seconds and bytes of one phase of a call; remote bytes crossed to another rank.
struct PhaseReport {
  double seconds = 0;
  std::uint64_t remote_bytes = 0;
  std::uint64_t local_bytes = 0;
  std::uint64_t between_bytes = 0;  ///< of the remote ones, to other nodes
};

/// What the last call did on this rank.
struct LayerReport {
  Way way = Way::low_latency;  ///< that it went; of Way::automatic the one chosen
  int passes = 1;              ///< with Overflow::split; all numbers below are sums over them
  PhaseReport dispatch, regroup, gemm1, activation, gemm2, combine;
  double shared_seconds = 0;
  double experts_seconds = 0;  ///< gemm1, activation and gemm2 where they cannot be told apart (on GPUs), else 0
  ArrivedLayout layout = ArrivedLayout::routed;
  bool host_waited = false;
  std::uint64_t rows_sent = 0;      ///< copies of its tokens that this rank delivered, its own included
  std::uint64_t rows_received = 0;  ///< copies that arrived
  std::uint64_t rows_real = 0;      ///< pairs of an arrived row and an expert of this rank
  std::uint64_t rows_room = 0;      ///< rows handed to the runner, padding included
};

/// A batch in this rank's ordinary memory (the whole batch with tensor_parallel).
struct LayerInput {
  int tokens = 0;
  const bf16* hidden = nullptr;       ///< [tokens, H]
  const std::int32_t* ids = nullptr;  ///< [tokens, k], -1: no expert
  const float* weights = nullptr;     ///< [tokens, k]
};

/// The largest batch of any rank and whether any rank has prompt tokens, found by a host exchange.
/// Collective.
Step agree_step(Group& group, int tokens, Phase phase);

/// How a layer gets at its group where that is not a Workspace: one rank's exchange, whatever moves its rows, and what
/// the layer tells the others when it cannot go on.
struct LayerSeat {
  int rank = 0;
  std::unique_ptr<Exchange> exchange;                        ///< made from exchange_options of the layer
  std::function<void(std::uint64_t, std::uint64_t)> refuse;  ///< this rank refused its input: expected, seen
  std::function<void()> fail;                                ///< this rank's call ended by an exception
};

class LayerBodies;  // a body a way: the chain, or the fused layer

/// One layer on one rank. Layers that share a workspace are called one after the other.
class MoeLayer {
 public:
  /// Host engine, any way; mega is the fused layer, without an exchange. With Way::automatic there is a body for every candidate,
  /// over the same weights and workspace. `memory` is what the workspace was sized for (layer_memory of this layer, merged with
  /// that of the other layers that share it). The workspace's configuration should hold describe() of the layer: ranks that would
  /// choose apart are refused there.
  MoeLayer(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights, const LayerOptions& options);
  /// Experts on the host, rows moved by the seat's exchange; of one way, so not Way::automatic (InputError).
  MoeLayer(LayerSeat seat, LayerWeights weights, const LayerOptions& options);
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  /// out [tokens, H]. Every rank calls, also without tokens. `step` is the same on all ranks; with
  /// tensor_parallel step.max_tokens is the whole batch. Errors: InputError before anything is sent,
  /// FaultError when a rank does not answer. A call that is split into passes (Overflow::split) checks numbers of tokens before the
  /// first one, ids pass by pass: outputs of the passes before are then written.
  void forward(const LayerInput& input, const Step& step, bf16* out);
  /// Likewise, the layer's own router choosing: hidden [tokens, H]. InputError, before anything is sent, without
  /// LayerWeights::router.
  void forward(int tokens, const bf16* hidden, const Step& step, bf16* out);
  /// What the router chose in the last such call.
  const Routing& routing() const;
  const LayerReport& report() const;
  /// The way that a call of this step goes, and why: times of the candidates and who says so. Changes nothing and sends nothing.
  WayChoice explain(const Step& step) const;

  /// Puts other weights in the place of this rank's expert number `local`, between calls; views, as in LayerWeights. Throws
  /// InputError for a place that there is not, sizes that do not fit, and with LayerOptions::expert_slices.
  void update_expert(int local, const ExpertWeights& weights);

 private:
  std::unique_ptr<LayerBodies> bodies_;
};

}  // namespace heddle
