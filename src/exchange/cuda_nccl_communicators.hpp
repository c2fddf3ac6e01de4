// NCCL's communicators of this process's GPUs. There is nothing here where nccl.h was not found when Heddle was configured.
#pragma once

#include "exchange/cuda_nccl_library.hpp"

#ifdef HEDDLE_NCCL

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/cuda_nccl.hpp"

namespace heddle::nccl {

/// One process's communicators block in NCCL's calls. Those of several do not: NCCL begins what a call asks for, and we look
/// whether it is done, so that a process that is gone is noticed, and end it if not. Then they are not used any more.
class Communicators final : public NcclCommunicators::Impl {
 public:
  static constexpr std::chrono::nanoseconds calls_block{0};
  /// longest: that a call may take until its kernel is on its stream; calls_block: NCCL's calls return then.
  Communicators(const cuda::DeviceMap& ranks, int version_of_nccl, std::chrono::nanoseconds longest);
  ~Communicators() override;
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  /// All ranks are of this process.
  void init_all();
  /// This process's ranks; `id` is the first one's, all processes do so at once. Throws Error if some do not come.
  void init_ranks(const std::string& id);
  /// NCCL connects ranks at their first collective, and then its calls on the host wait for each other. Here one group makes them
  /// for all own GPUs, so that later calls of one GPU need not be grouped with those of the others. Throws Error as above.
  void make_first_calls();

  void grouped(const std::function<void()>& calls) override { group("calls of a group", calls); }
  void all_gather(std::size_t gpu, const void* from, void* to, std::size_t bytes, cudaStream_t stream) override;
  void reduce_scatter(std::size_t gpu, const bf16* from, bf16* to, std::size_t values, cudaStream_t stream) override;
  void connect_pairs() override;
  void swap(std::span<const DeviceSwap> swaps, cudaStream_t stream) override;
  void throw_if_failed() const override;
  void abort() override;
  std::shared_ptr<std::vector<void*>> allocate(std::size_t bytes, bool symmetric) override;

 private:
  bool blocks() const { return longest_ == calls_block; }
  /// As grouped; `what` is told in errors.
  void group(const char* what, const std::function<void()>& calls);
  /// Without waiting until communicators that do not block have begun them.
  void begin_group(const char* what, const std::function<void()>& calls);
  std::vector<int> devices() const;
  ncclComm_t of(std::size_t gpu) const;
  /// Sends and receives of an own rank, within a group.
  void make_swaps(std::span<const DeviceSwap> swaps, cudaStream_t stream);
  void made(std::size_t gpu, const char* what);
  /// Until what was begun for `gpus` GPUs from `first` on is done. Aborts all communicators and throws Error if that fails or takes
  /// longer than a call may.
  void wait(std::size_t first, std::size_t gpus, const char* what);
  void call_everybody(const std::vector<void*>& own, const std::vector<void*>& all, const std::vector<cudaStream_t>& streams);
  /// Until kernels have ended. Throws Error if that takes longer than a call may.
  void await(const std::vector<cudaStream_t>& streams) const;
  /// False if the other processes do not let go of theirs in time.
  bool finalize() noexcept;

  std::chrono::nanoseconds longest_;
  bool in_use_ = false;  ///< everything is made
  std::mutex ending_;    ///< held by a look at a communicator and by abort
  /// Empty after an abort. Windows hold it, too.
  std::shared_ptr<std::vector<ncclComm_t>> communicators_ = std::make_shared<std::vector<ncclComm_t>>();
};

}  // namespace heddle::nccl

#endif
