// elastic on a GPU, host side: what its kernels are given, and its ordinary memory. Over several nodes (exchange/nodes/cuda.cu) the
// same with kernels of its own.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "exchange/elastic/protocol.hpp"

namespace heddle {

struct ElasticCall : DeviceCall {
  ElasticLayout layout;
  ElasticScratch scratch;  ///< all pointers here: of the first local rank
  // Memory for what arrives, arrivals_stride bytes a local rank.
  std::size_t arrivals_stride = 0;
  ExpertLayout experts_layout;
  std::byte* rows = nullptr;  ///< arrival order
  bf16* sums = nullptr;
  int room = 0;  ///< rows that are listed at least, "no expert" where none arrived
  bool by_expert = true;
  bool weighted = false;
};

class DeviceElastic : public DeviceWay<ElasticCall> {
 public:
  DeviceElastic(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                const DeviceExchangeOptions& device_options);
  Arrived arrived(int local) const override;

 protected:
  /// Memory for up to `rows` arrived rows a local rank. Only grows: freeing memory waits for all of this GPU's kernels,
  /// perhaps for those of others.
  void make_room(std::size_t rows);

  std::size_t arrived_ = 0;  ///< where in a rank's scratch the rows from each rank are counted

 private:
  int most_experts() const { return std::max(1, parameters_.layout.shape.max_local_experts); }
  template <class T>
  const T* of_rank(const T* first, int local) const {
    const std::size_t shift = static_cast<std::size_t>(local) * parameters_.arrivals_stride;
    return reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(first) + shift);
  }

  DeviceArray<std::byte> arrivals_;
  std::size_t arrivals_bytes_ = 0;
};

}  // namespace heddle
