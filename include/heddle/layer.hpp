// One MoE layer on one rank: a way, a runner and the experts, as one call from tokens to outputs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heddle/checkpoint.hpp"
#include "heddle/exchange.hpp"
#include "heddle/experts.hpp"
#include "heddle/group.hpp"
#include "heddle/routing.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// What happens to the shared expert of a layer that has one. The fused layer (mega) runs it inside, as tasks of its own, alone or
/// fused: the bits are the same.
enum class SharedMode : std::uint8_t {
  alone,  ///< computed by itself on the rank's own tokens
  fused,  ///< one more expert of every rank, an extra choice of every own token that never travels
  extra,  ///< mega only, to compare: one more routed expert of every rank, whose rows go through tables and rings like any other
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

/// One rank's share of a layer: its own experts in local order, and the shared expert.
struct LayerWeights {
  LayerShape shape;
  WeightKind kind = WeightKind::bf16;
  Placement placement;
  std::vector<ExpertWeights> experts;
  std::optional<SharedExpert> shared;

  /// Views into the source, which must outlive the layer. Asks for this rank's experts only.
  static LayerWeights load(const LayerSource& source, const Placement& placement, int rank);
};

/// The exchange that a layer of these weights and options needs. Throws InputError for options that do
/// not fit together or do not fit the weights.
ExchangeOptions exchange_options(const LayerWeights& weights, const LayerOptions& options);

/// All that ranks must agree on to share a layer, one "name=value" a line: what a Workspace compares.
std::string describe(const LayerWeights& weights, const LayerOptions& options);

/// Seconds and bytes of one phase of a call; remote bytes crossed to another rank.
struct PhaseReport {
  double seconds = 0;
  std::uint64_t remote_bytes = 0;
  std::uint64_t local_bytes = 0;
};

/// What the last call did on this rank.
struct LayerReport {
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

class LayerBody;  // the chain, or the fused layer

/// One layer on one rank. Layers that share a workspace are called one after the other.
class MoeLayer {
 public:
  /// Host engine, any way; mega is the fused layer, without an exchange. `memory` is what the workspace was sized for
  /// (exchange_memory of this layer's exchange, merged with that of the other layers that share it).
  MoeLayer(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights, const LayerOptions& options);
  /// Experts on the host, rows moved by the seat's exchange.
  MoeLayer(LayerSeat seat, LayerWeights weights, const LayerOptions& options);
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  /// out [tokens, H]. Every rank calls, also without tokens. `step` is the same on all ranks; with
  /// tensor_parallel step.max_tokens is the whole batch. Errors: InputError before anything is sent,
  /// FaultError when a rank does not answer.
  void forward(const LayerInput& input, const Step& step, bf16* out);
  const LayerReport& report() const;

 private:
  std::unique_ptr<LayerBody> body_;
};

}  // namespace heddle
