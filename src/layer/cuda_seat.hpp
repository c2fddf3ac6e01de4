// One rank whose rows travel between GPUs, as the host engine's layer sees it.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "exchange/host_exchange.hpp"
#include "layer/cuda_ranks.hpp"

namespace heddle {

/// Memory of a device that grows and is then kept; what was in it is lost.
template <class T>
class DeviceRoom {
 public:
  explicit DeviceRoom(int device) : device_(device) {}
  T* grow(std::size_t size) {
    if (size > size_) {
      memory_ = {};
      memory_ = DeviceArray<T>(device_, size);
      size_ = size;
    }
    return memory_.data();
  }

 private:
  int device_;
  std::size_t size_ = 0;
  DeviceArray<T> memory_;
};

class DeviceSeat final : public Exchange {
 public:
  DeviceSeat(DeviceRanks& all, int rank);
  void dispatch_send(const ExchangeInput& input, const Step& step) override;
  Arrived dispatch_receive() override;
  void combine_send(const bf16* results) override;
  void combine_receive(const CombineOutput& output) override;
  ExchangeTraffic take_traffic() override { return std::exchange(traffic_, {}); }

 private:
  using Offer = DeviceRanks::Offer;
  [[noreturn]] void refuse(const InputError& error, int expected, int seen);
  void accept(const ExchangeInput& input, const Step& step);
  void accept(const CombineOutput& output);
  template <class T>
  const T* upload(DeviceRoom<T>& to, const T* from, std::size_t size);
  template <class T>
  void download(T* to, const T* from, std::size_t size) const;
  void settle() const;
  /// What arrived, copied to the host: of rows by expert only those that are there.
  void fetch_routed(const Arrived& there);
  void fetch_by_expert(const Arrived& there);
  Offer& offer() const;
  bool tensor_parallel() const { return options_.way == Way::gather && options_.gather == GatherMode::tensor_parallel; }
  int all_rows() const { return options_.placement.ranks() * options_.cap; }
  int most_tokens() const { return tensor_parallel() ? all_rows() : options_.cap; }
  std::size_t hidden() const { return static_cast<std::size_t>(options_.hidden); }

  DeviceRanks& all_;
  const ExchangeOptions& options_;
  int rank_;
  std::size_t gpu_ = 0;
  int local_ = 0;
  int device_ = 0;
  DeviceStream stream_ = nullptr;
  std::size_t local_experts_ = 0;
  int tokens_ = 0;
  DeviceRoom<int> tokens_there_;
  DeviceRoom<bf16> hidden_, results_, shared_, out_, all_out_;
  DeviceRoom<std::int32_t> ids_;
  DeviceRoom<float> weights_, factors_;
  Arrived arrived_;  ///< of the last dispatch, in this rank's arrays:
  Array<std::byte> rows_;
  std::vector<std::int32_t> begins_, counts_, local_ids_;
  Array<float> row_weights_;
  std::vector<float> pair_weights_;
  ExchangeTraffic traffic_;
};

}  // namespace heddle
