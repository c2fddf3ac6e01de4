// The fused layer on one GPU, host side: the weights of its ranks, and the launches of a call: announce, the fused
// kernel, sum.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/cuda_exchange.hpp"
#include "experts/sm90/weights.hpp"
#include "heddle/device_layer.hpp"
#include "mega/sm90/call.hpp"
#include "mega/sm90/kernels.hpp"

namespace heddle {

/// Where a layer's shared expert runs: as tasks of the fused kernel, which takes one without a gate, of the routed experts' kind or
/// fp8 block beside mxfp4; as one more routed expert; or before the kernel, which finds its results (DeviceOutput::shared).
enum class SharedPlace : std::uint8_t { none, inside, extra_expert, module };
SharedPlace shared_place(const LayerWeights& weights, const LayerOptions& layer, const DeviceLayerOptions& device);

/// The weights of a GPU's ranks in its memory. Perhaps those of a layer's chains, which lie in the same order.
struct MegaWeights {
  std::vector<std::shared_ptr<const sm90::DeviceWeights>> routed;  ///< a local rank
  std::shared_ptr<const sm90::DeviceWeights> shared;               ///< of a shared expert inside
};

/// dispatch() takes the call's inputs, combine() launches the whole layer; nothing arrives anywhere in between.
class DeviceMega final : public DeviceExchangeBase {
 public:
  /// `weights`: a local rank's, in order of rank; `loaded`: the same in the GPU's memory, or nothing to load them here. Throws
  /// InputError for what the kernel does not take (refused_by_kernel).
  DeviceMega(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
             const DeviceLayerOptions& device, std::span<const LayerWeights> weights, const LayerOptions& layer,
             MegaWeights loaded = {});

  void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    take_inputs(inputs, step, stream);
  }
  void dispatch_receive(DeviceStream) override {}
  void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    take_inputs(inputs, step, stream);
  }
  Arrived arrived(int local) const override;
  void combine_send(std::span<const bf16* const>, DeviceStream) override {}
  void combine_receive(std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    run(outputs, stream);
    share(stream);
  }
  void combine(std::span<const bf16* const>, std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    combine_receive(outputs, stream);
  }
  /// The whole layer; then, where all ranks want all outputs, their exchange.
  void run(std::span<const DeviceOutput> outputs, DeviceStream stream);
  void share(DeviceStream stream) { share_outputs(stream); }
  std::size_t weight_bytes() const;  ///< that it has loaded itself
  /// Of weights that it has loaded itself. As DeviceLayer's.
  void update_expert(int local, int expert, const ExpertWeights& weights, DeviceStream stream);
  const std::shared_ptr<const sm90::DeviceWeights>& weights(int local) const {
    return weights_.routed[static_cast<std::size_t>(local)];
  }

 private:
  /// The kernel with row blocks of one size, and what it is given.
  struct Variant {
    sm90::MegaKernel kernel;
    sm90::MegaKernelCall call;
    DeviceClamp clamp;
    DeviceArray<sm90::MegaRank> parts;
  };
  void load_weights(std::span<const LayerWeights> weights, bool step_exponents);
  sm90::KernelCalls calls() const;
  Variant make_variant(sm90::RowBlocks blocks, WeightKind kind, WeightKind shared, const DeviceClamp& clamp) const;
  sm90::MegaKnown known_of(const HeapView& heap, const Variant& variant) const;
  sm90::MegaRank part_of(int local, const Variant& variant) const;
  const Variant& variant_for(int max_tokens) const;

  int ctas_ = 1;  ///< a rank
  sm90::MegaAnnounceCall announce_;
  SharedPlace place_;         ///< of the shared expert
  DevicePlacement extended_;  ///< with extra experts; empty without
  MegaWeights weights_;
  std::vector<std::shared_ptr<sm90::DeviceWeights>> own_;  ///< of weights_.routed, what it has loaded itself
  std::size_t loaded_bytes_ = 0;
  sm90::BlockChoice row_blocks_;
  std::optional<Variant> variants_[std::size(sm90::every_row_blocks)];  ///< by sm90::RowBlocks
};

}  // namespace heddle
