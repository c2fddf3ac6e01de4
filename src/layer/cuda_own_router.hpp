// The router inside a layer on a GPU: choices for inputs that come without.
#pragma once

#include <span>

#include "heddle/device_router.hpp"
#include "layer/cuda_body.hpp"

namespace heddle {

class OwnRouter {
 public:
  /// For all local ranks, of a pass's tokens each. Throws InputError as check_router and DeviceRouter.
  OwnRouter(const LayerParts& parts, const LayerWeights& weights, const LayerOptions& options);

  /// Queues the choices of inputs without ids and weights, and puts them there; the memory is the next pass's, too.
  void choose(std::span<DeviceInput> inputs, int max_tokens, DeviceStream stream) const;

  std::size_t weight_bytes() const { return router_.weight_bytes(); }
  std::size_t buffer_bytes() const;

 private:
  std::size_t locals_, choices_a_rank_;
  DeviceRouter router_;
  DeviceArray<std::int32_t> ids_;  ///< [local ranks, most tokens, topk]
  DeviceArray<float> weights_;     ///< likewise
};

/// Of a layer without a router. Throws InputError for inputs with tokens and without ids.
void refuse_missing_ids(std::span<const DeviceInput> inputs);

}  // namespace heddle
