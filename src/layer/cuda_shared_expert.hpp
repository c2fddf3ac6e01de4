// The shared expert on a second stream of a GPU, beside the exchange and the routed experts.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "exchange/cuda_exchange.hpp"
#include "heddle/device_layer.hpp"

namespace heddle {

/// A CUDA event that destroys itself.
class DeviceEvent {
 public:
  explicit DeviceEvent(bool timed);
  DeviceEvent(DeviceEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  DeviceEvent& operator=(DeviceEvent&&) = delete;
  ~DeviceEvent();
  void record(DeviceStream stream) const;
  void make_wait(DeviceStream stream) const;
  // Both of what was recorded last; true where nothing was.
  bool has_happened() const;
  void wait() const;
  /// Until `later`, once both have happened.
  double seconds_until(const DeviceEvent& later) const;

 private:
  cudaEvent_t event_ = nullptr;
};

class SharedExpertStream {
 public:
  /// For `local_ranks` ranks of up to `most_tokens` own tokens each. On the current device, which is `gpu` of CUDA's.
  SharedExpertStream(int gpu, const LayerWeights& weights, const LayerOptions& options, int local_ranks, int most_tokens,
                     const DeviceLayerOptions& device);
  ~SharedExpertStream();
  SharedExpertStream(const SharedExpertStream&) = delete;
  SharedExpertStream& operator=(const SharedExpertStream&) = delete;

  /// The next run begins after what is on `stream` now.
  void fork(DeviceStream stream);
  /// Queues the shared expert over the ranks' own tokens.
  void run(std::span<const DeviceInput> inputs, int max_tokens, bool timed);
  /// What follows on `stream` begins after the shared expert.
  void join(DeviceStream stream);
  /// What combine adds last for a local rank.
  void add_to(DeviceOutput& output, int local) const;

  void throw_if_failed() { expert_.throw_if_failed(); }
  double seconds() const { return began_.seconds_until(ended_); }
  std::shared_ptr<const sm90::DeviceWeights> weights() const { return expert_.weights(); }
  std::size_t weight_bytes() const { return expert_.report().device_bytes; }
  std::size_t buffer_bytes() const { return expert_.buffer_bytes() + bytes_; }

 private:
  bf16* rows_of(int local) const { return rows_.data() + static_cast<std::size_t>(local) * most_tokens_ * hidden_; }
  float* factors_of(int local) const { return factors_.data() + static_cast<std::size_t>(local) * most_tokens_; }

  std::size_t hidden_;
  std::size_t most_tokens_;
  bool gated_;
  int sms_ = 0;
  std::size_t bytes_ = 0;
  DeviceExperts expert_;
  DeviceArray<bf16> rows_;      ///< [local ranks, most_tokens, H]
  DeviceArray<float> factors_;  ///< [local ranks, most_tokens], of a gated one
  DeviceArray<float> gate_;     ///< [H]
  DeviceStream stream_ = nullptr;
  DeviceEvent forked_, joined_, began_, ended_;
};

}  // namespace heddle
