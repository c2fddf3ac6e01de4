// The experts of one rank on a GPU, over whatever the exchange hands over there.
#pragma once

#include <memory>
#include <span>

#include "exchange/cuda_exchange.hpp"
#include "formats/row_format.hpp"
#include "heddle/device_layer.hpp"
#include "layer/layer_kernels.hpp"
#include "layer/room.hpp"

namespace heddle {

/// An exchange whose arrivals they compute. `in_place`: run() is always told where its results go.
struct Chain {
  ExchangeOptions exchange;
  bool in_place = false;
};

class RankExperts {
 public:
  /// `rank`: which of the placement's. For all of `chains`, at least one, whose rows have one format on the wire: one set of
  /// weights, and buffers for whichever needs most. On the current device, which is `gpu` of CUDA's.
  RankExperts(int gpu, int rank, const LayerWeights& weights, const LayerOptions& options, std::span<const Chain> chains,
              const DeviceLayerOptions& device);

  /// Queues the experts over what arrived; returns where results lie: `in_place`, or where that is null memory of this object.
  /// expected_rows: as DeviceExperts'.
  const bf16* run(const Arrived& arrived, bf16* in_place, int expected_rows, DeviceStream stream);
  void throw_if_failed() { experts_.throw_if_failed(); }
  void update(int expert, const ExpertWeights& weights, DeviceStream stream) { experts_.update(expert, weights, stream); }
  std::shared_ptr<const sm90::DeviceWeights> weights() const { return experts_.weights(); }
  std::size_t weight_bytes() const { return experts_.report().device_bytes; }
  std::size_t buffer_bytes() const;

 private:
  RowView view_of_rows(const Arrived& arrived, DeviceStream stream);
  void run_contiguous(const Arrived& arrived, const ResultRows& out, int expected_rows, DeviceStream stream);

  RowFormat wire_;
  int topk_;
  bool widens_;    ///< rows arrive in a format that the products do not take
  RankRoom room_;  ///< of what lies in this object
  int sms_ = 0;
  DeviceExperts experts_;
  DeviceArray<bf16> results_;
  DeviceArray<bf16> widened_;
  DeviceArray<std::int32_t> begins_, counts_;  ///< of contiguous rows, within their room
};

}  // namespace heddle
