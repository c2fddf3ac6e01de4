// The experts of one rank on a GPU, over whatever the exchange hands over there.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "formats/row_format.hpp"
#include "heddle/device_layer.hpp"
#include "layer/layer_kernels.hpp"
#include "layer/room.hpp"

namespace heddle {

class RankExperts {
 public:
  /// `rank`: which of the placement's. `in_place`: run() is always told where results go. On the current device, which is `gpu` of
  /// CUDA's.
  RankExperts(int gpu, int rank, const LayerWeights& weights, const LayerOptions& options, const ExchangeOptions& exchange,
              bool in_place, const DeviceLayerOptions& device);

  /// Queues the experts over what arrived; returns where results lie: `in_place`, or where that is null memory of this object.
  /// expected_rows: as DeviceExperts'.
  const bf16* run(const Arrived& arrived, bf16* in_place, int expected_rows, DeviceStream stream);
  void throw_if_failed() { experts_.throw_if_failed(); }
  std::size_t weight_bytes() const { return experts_.report().device_bytes; }
  std::size_t buffer_bytes() const;

 private:
  RowView view_of_rows(const Arrived& arrived, DeviceStream stream);
  void run_contiguous(const Arrived& arrived, const ResultRows& out, int expected_rows, DeviceStream stream);

  RankRoom room_;
  RowFormat wire_;
  int topk_;
  bool widens_;  ///< rows arrive in a format that the products do not take
  int sms_ = 0;
  DeviceExperts experts_;
  DeviceArray<bf16> results_;
  DeviceArray<bf16> widened_;
  DeviceArray<std::int32_t> begins_, counts_;  ///< of contiguous rows, within their room
};

}  // namespace heddle
