// One way of a layer on one GPU: a call is dispatch, the experts of each local rank, combine, or the fused kernel; the shared
// expert beside them. What the ways of a layer share lies in LayerParts.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "exchange/cuda_exchange.hpp"
#include "heddle/device_layer.hpp"
#include "layer/cuda_rank_experts.hpp"
#include "layer/cuda_shared_expert.hpp"
#include "layer/token_sizes.hpp"
#include "mega/sm90/cuda_mega.hpp"

namespace heddle {

/// Weights and buffers of a layer on a GPU, for all of its ways.
struct LayerParts {
  DeviceWorkspace& workspace;
  std::size_t gpu;
  TokenSizes sizes;
  int cap;
  std::vector<RankExperts> experts = {};  ///< a local rank, of the chains
  std::unique_ptr<SharedExpertStream> shared = nullptr;
  DeviceArray<int> slice_tokens = {};  ///< [local ranks]
  DeviceArray<bf16> slice_out = {};    ///< [local ranks, cap, H]

  int device() const { return workspace.device(gpu); }
  int local_ranks() const { return workspace.ranks_on(gpu); }
  std::size_t locals() const { return static_cast<std::size_t>(local_ranks()); }
  int rank_of(int local) const { return workspace.first_rank(gpu) + local; }
  bf16* slice_outputs(int local) const {
    return slice_out.data() + static_cast<std::size_t>(local) * static_cast<std::size_t>(cap) * sizes.hidden;
  }
  /// Nobody shall wait for this GPU's results.
  void give_up(DeviceStream stream) const;
};

/// Points of a call that is timed: before dispatch, experts and combine, and behind it.
struct CallMarks {
  DeviceEvent at[4] = {DeviceEvent(true), DeviceEvent(true), DeviceEvent(true), DeviceEvent(true)};
};

class DeviceBody {
 public:
  /// Makes the exchange; of way mega the whole, over `loaded` weights or its own. The parts are filled in before the first call.
  DeviceBody(LayerParts& parts, const LayerOptions& options, const ExchangeMemory& memory, std::span<const LayerWeights> weights,
             const DeviceLayerOptions& device, MegaWeights loaded = {});

  /// marks: null where no times are wanted.
  void begin(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream, const CallMarks* marks);
  void end(std::span<bf16* const> outputs, DeviceStream stream, const CallMarks* marks);

  const ExchangeOptions& settings() const { return settings_; }
  DeviceExchange& exchange() const { return *exchange_; }
  bool host_waits() const { return host_waits_; }
  bool slices_batch() const { return slices_batch_; }
  /// Does the shared expert run on the second stream?
  bool wants_shared() const { return wants_shared_; }
  Chain chain() const;
  /// Of a fused layer that has loaded its weights itself.
  void update_expert(int local_rank, int local, const ExpertWeights& weights, DeviceStream stream) {
    fused_->update_expert(local_rank, local, weights, stream);
  }
  const std::shared_ptr<const sm90::DeviceWeights>& weights(int local_rank) const { return fused_->weights(local_rank); }
  std::size_t weight_bytes() const { return fused_ != nullptr ? fused_->weight_bytes() : 0; }

 private:
  int first_token(int rank) const;
  std::vector<DeviceInput> own_slices(std::span<const DeviceInput> inputs, DeviceStream stream);
  std::vector<const bf16*> run_experts(DeviceStream stream);
  void run_fused(std::span<bf16* const> outputs, DeviceStream stream, const CallMarks* marks);
  std::vector<DeviceOutput> places_of(std::span<bf16* const> outputs) const;

  LayerParts& parts_;
  ExchangeOptions settings_;
  bool host_waits_;    ///< for counts, in the receiving half of dispatch
  bool gathers_;       ///< gather under tensor-parallel attention: every rank has the whole batch
  bool slices_batch_;  ///< tensor-parallel attention by another way: each rank keeps its slice of the batch
  bool wants_shared_;
  Step batch_;  ///< of this call, as given
  Step step_;   ///< of its exchange
  std::unique_ptr<DeviceExchange> exchange_;
  DeviceMega* fused_ = nullptr;  ///< the exchange, where it is the whole layer
};

}  // namespace heddle
