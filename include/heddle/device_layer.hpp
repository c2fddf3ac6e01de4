// One MoE layer on GPUs, from tokens to outputs: the exchange, the experts of every rank and the shared expert as kernels on a
// stream. Built with HEDDLE_CUDA only.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "heddle/device.hpp"
#include "heddle/device_experts.hpp"
#include "heddle/layer.hpp"

namespace heddle {

struct DeviceLayerOptions {
  DeviceExchangeOptions exchange;
  int expert_ctas = 0;  ///< of the routed experts' products, as DeviceExpertsOptions::ctas
  int shared_ctas = 0;  ///< of the shared expert's
  bool fused_activation = true;
  ActivationGrid activation_grid = ActivationGrid::persistent;
  DeviceRowBlocks row_blocks = DeviceRowBlocks::automatic;
  /// mega: a shared expert that the fused kernel can run as tasks of its own (without a gate, of the routed experts' weight kind or
  /// fp8 block beside mxfp4) runs there; otherwise, as any other one, on a second stream before the kernel. The same bits.
  bool shared_inside = true;
  bool step_exponents = false;  ///< mxfp4: as DeviceExpertsOptions'
  bool timed = false;           ///< events around the parts of a call, see DeviceLayer::seconds
};

/// Of the last call on one GPU, all passes of it together.
struct DeviceLayerSeconds {
  double dispatch = 0;
  double experts = 0;  ///< of all its ranks
  double shared = 0;   ///< on the second stream, beside the others; of the last pass
  double combine = 0;  ///< what is left of the shared expert included
};

/// A layer on GPU number `gpu` of a workspace, for all ranks that live there; every GPU of the group has one and makes the same
/// calls in the same order. All memory is taken by the constructor, for a cap's worth of tokens of every rank whatever is routed
/// where. Calls queue kernels and return; where no host waits for row counts (ways other than normal and elastic with cpu_sync)
/// they may be captured in a graph, begin and end together, and replayed with other tokens, routing and numbers. Layers may
/// share a workspace, one call after the other, and a stream with anything else.
///
/// The arithmetic is MoeLayer's (docs/numerics.md). A fused shared expert (SharedMode::fused) is computed like one alone: the bits
/// are the same. With Way::mega a call is one kernel between two short ones, the shared expert inside, and the bits are those of
/// Way::low_latency. Of LayerOptions `workers` sizes that kernel's ring and matters to nothing else.
///
/// With Way::automatic the layer has every candidate's exchange and the fused kernel over one set of weights and buffers, and each
/// call goes the way that the tuning table names for its step: the same on all GPUs, and in a graph the one chosen at capture. Of
/// DeviceExchangeOptions, NCCL is gather's, which is left out where NCCL cannot serve it and while a rank is masked, and counters
/// and bulk copies are the chains'. With Overflow::split the first pass begins
/// in begin(), the others in end(); numbers of tokens are still read on the device, the number of passes follows from the step.
///
/// Where the first rank's LayerWeights have a router, inputs whose ids and weights are both null are routed by it (DeviceRouter),
/// pass by pass and with tensor_parallel on every rank, ahead of their dispatch on the stream. Without a router such inputs are an
/// InputError.
class DeviceLayer {
 public:
  /// `weights`: a local rank's, in order of rank; read here and not needed later. `memory`: what the workspace was sized for
  /// (layer_memory, merged with that of the other layers that share it). `device.exchange` as for create_device_exchange. Throws
  /// InputError for what does not fit together or what GPUs do not compute (by way auto: where no candidate is left): bf16
  /// activations with fp8 block or mxfp4 weights, GPUs other than Hopper, more pairs than 2^25 a rank; by way mega other weights
  /// than mxfp4, fp8 block and bf16, and other activations and wires than theirs (docs/gpu.md, "The fused layer").
  DeviceLayer(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeMemory& memory, std::span<const LayerWeights> weights,
              const LayerOptions& options, const DeviceLayerOptions& device = {});
  ~DeviceLayer();
  DeviceLayer(DeviceLayer&&) noexcept;
  DeviceLayer& operator=(DeviceLayer&&) noexcept;

  /// First part of a call: sends the tokens, and begins with the shared expert on a second stream. inputs: a local rank's, which
  /// stay as they are until the call has run. Where the host waits for counts, every GPU of the process must have begun before
  /// one of them ends. With tensor_parallel every rank brings the whole batch; by other ways than gather it has exactly
  /// step.max_tokens tokens. Throws InputError before a launch.
  void begin(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream);
  /// Second part: experts and outputs, by local rank [tokens, H], 16-byte aligned; null for a rank without tokens, but never with
  /// tensor_parallel, where they are [all tokens, H].
  void end(std::span<bf16* const> outputs, DeviceStream stream);
  void forward(std::span<const DeviceInput> inputs, const Step& step, std::span<bf16* const> outputs, DeviceStream stream) {
    begin(inputs, step, stream);
    end(outputs, stream);
  }

  /// Once the stream has been waited for: throws the FaultError of a rank that gave up, or an Error where experts met a count
  /// that cannot be. Looks at host memory only. After a fault ask the layers of all GPUs: what experts met in a call that was given
  /// up is told by the next question, whenever that is.
  void throw_if_failed();
  /// With DeviceLayerOptions::timed, of the last call, which must have run and not have been captured.
  DeviceLayerSeconds seconds() const;

  /// Puts other weights in the place of expert number `local` of a local rank, in place: calls behind this one on the stream use
  /// them, captured ones too; those on other streams must not be running. `weights` are read here and not needed later. Waits for
  /// the stream, not in graph capture. Throws InputError for what there is not and what does not fit, and for mxfp4 weights that
  /// want step exponents where none were loaded.
  void update_expert(int local_rank, int local, const ExpertWeights& weights, DeviceStream stream);
  /// A local rank's routed experts in the GPU's memory, in local order; there for as long as anybody holds them. By way mega a
  /// shared expert may follow them.
  std::shared_ptr<const sm90::DeviceWeights> weights(int local_rank) const;

  Way way() const;     ///< of the last call; before any the first candidate's
  int passes() const;  ///< of the last call
  /// The way that a call of this step goes, and why. Changes nothing, and may be called while kernels run.
  WayChoice explain(const Step& step) const;
  /// Of the last call's way, as exchange().
  const ExchangeOptions& exchange_options() const;
  /// For what arrived, and for its counters. Way::mega hands nothing over and counts nothing: Arrived::rows is null, received
  /// and real are -1.
  const DeviceExchange& exchange() const;
  std::size_t weight_bytes() const;  ///< of device memory, of all local ranks
  std::size_t buffer_bytes() const;  ///< of device memory beside weights, heap and exchange

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
