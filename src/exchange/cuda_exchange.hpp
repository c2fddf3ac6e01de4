// What the five ways share on a GPU, host side: the inputs of all its ranks in one launch, scratch memory
// a rank, and how kernels are launched. The device side is cuda_call.cuh.
#pragma once

#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#include "exchange/all_gather.hpp"
#include "exchange/arrivals.hpp"
#include "exchange/call_order.hpp"
#include "exchange/cuda_counters.hpp"
#include "exchange/host_exchange.hpp"
#include "group/cuda_workspace.hpp"
#include "heddle/device.hpp"

namespace heddle {

constexpr int max_local_ranks = 32;
constexpr int threads_a_cta = 512;               ///< at most; small batches have half
constexpr int most_choices = threads_a_cta / 2;  ///< of a token: a CTA looks at the choices of whole tokens, one a thread
constexpr std::size_t squad_bytes = 96 * 1024;

/// A rank's pointers in one launch.
struct DeviceRank {
  DeviceInput input;
  DeviceOutput output;
  const bf16* results = nullptr;
};

/// What every kernel is given, whatever the way. `halves`: which of the two a launch does.
struct DeviceCall {
  DeviceTeam team;
  PlacementView placement;
  TallyPlan tally_plan;          ///< of team.tallies
  Word* routed_pairs = nullptr;  ///< [local ranks, tally_plan.experts] listed and not yet counted; null: not counted by listing
  int experts = 0;
  int topk = 1;
  int max_tokens = 0;
  bool send = true;
  bool receive = true;
  std::uint16_t bulk_bytes = 0;    ///< rows from this size on go by bulk copies; 0: none
  std::size_t squad_bytes = 0;     ///< shared memory of a CTA, without that of bulk copies
  std::size_t scratch_stride = 0;  ///< bytes between the scratch of two local ranks
  DeviceRank ranks[max_local_ranks];
};

/// The launch behind combine where all ranks want all outputs.
struct AllGatherCall : DeviceCall {
  AllGatherLayout layout;
  /// The first local rank's sums of its slice of the batch, in its scratch, where every rank has the whole batch; null: a
  /// rank's rows are its outputs.
  const bf16* slices = nullptr;
};
const void* all_gather_kernel(bool bulk);

/// Memory of a device that frees itself.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(int device, std::size_t size) {
    const cuda::DeviceScope scope(device);
    void* address = nullptr;
    cuda::check(cudaMalloc(&address, std::max<std::size_t>(size, 1) * sizeof(T)), "device memory");
    values_ = std::shared_ptr<T>(static_cast<T*>(address), [](T* old) { cudaFree(old); });
  }
  T* data() const { return values_.get(); }
  const std::shared_ptr<T>& share() const { return values_; }

 private:
  std::shared_ptr<T> values_;
};

/// A placement in the memory of a GPU. Copies of the view are good as long as this is there.
struct DevicePlacement {
  DeviceArray<int> memory;
  PlacementView view;

  DevicePlacement() = default;
  DevicePlacement(int device, const Placement& placement, int ranks);
};

/// Lays arrays of one rank's scratch behind each other; the same offsets for every local rank.
class ScratchPlan {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t at = bytes_;
    bytes_ = align_up(bytes_ + bytes, 128);
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

/// Where the memory of a numbering begins.
struct NumberingPlan {
  std::size_t numbers = 0, totals = 0, before = 0;
};

/// Chunks of `chunk` items that n items fill, at least one.
constexpr std::size_t chunks_of(int n, int chunk) { return static_cast<std::size_t>(n / chunk + 1); }

/// Is what comes on this stream captured in a graph, to run later?
bool is_captured(DeviceStream stream);

class DeviceExchangeBase : public DeviceExchange {
 public:
  DeviceExchangeBase(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                     const DeviceExchangeOptions& device);

  ExchangeCounters counters(int local_rank) const override;

 protected:
  int ranks() const { return workspace_.ranks(); }
  int local_ranks() const { return workspace_.ranks_on(gpu_); }
  int device() const { return workspace_.device(gpu_); }
  int rank_of(int local) const { return workspace_.first_rank(gpu_) + local; }
  int experts_of(int local) const { return static_cast<int>(options_.placement.experts_of(rank_of(local)).size()); }
  Areas areas() const { return areas_of(memory_, ranks()); }
  /// Numbers of `items` in some classes, cut into chunks of `chunk`.
  NumberingPlan plan_numbering(ScratchPlan& plan, std::size_t numbers, std::size_t classes, int items, int chunk) const {
    return {plan.take(numbers * sizeof(std::int32_t)), plan.take(classes * sizeof(std::int32_t)),
            plan.take(chunks_of(items, chunk) * classes * sizeof(std::int32_t))};
  }

  /// Throws InputError where the stream is being captured: `what`'s host waits for row counts.
  static void refuse_capture(DeviceStream stream, std::string_view what, std::string_view instead);
  void take_inputs(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream);
  void take_results(std::span<const bf16* const> results, DeviceStream stream);
  void take_outputs(std::span<const DeviceOutput> outputs, DeviceStream stream);
  /// Behind the receiving half of combine: gives all outputs to all ranks where take_outputs was told to.
  void share_outputs(DeviceStream stream);
  /// Whether SMs were set apart for this exchange (DeviceExchangeOptions::sms). Then no launch overtakes the one before it.
  bool has_share_of_sms() const { return fixed_ctas_; }
  bool tensor_parallel() const { return options_.way == Way::gather && options_.gather == GatherMode::tensor_parallel; }

  /// Scratch of `plan` for every local rank; afterwards at<T>(offset, local).
  void allocate_scratch(const ScratchPlan& plan);
  template <class T>
  T* at(std::size_t offset, int local = 0) const {
    return reinterpret_cast<T*>(scratch_.data() + offset + static_cast<std::size_t>(local) * call_.scratch_stride);
  }
  Numbering at(const NumberingPlan& plan) const {
    return {at<std::int32_t>(plan.numbers), at<std::int32_t>(plan.totals), at<std::int32_t>(plan.before)};
  }

  /// Loads the kernel now and checks that all CTAs of a launch are resident at once.
  void prepare(const void* kernel);
  /// Which halves a launch does. independent: its CTAs wait for no other one of this GPU that has work to do before it
  /// speaks, so they need not be resident together.
  struct Halves {
    bool send = true;
    bool receive = true;
    bool independent = false;
    bool early = false;  ///< behind one of ours that lets the next kernel launch, and waits for it
  };
  void launch(const void* kernel, const void* parameters, Halves halves, DeviceStream stream);

  DeviceWorkspace& workspace_;
  std::size_t gpu_;
  ExchangeOptions options_;
  ExchangeMemory memory_;
  DeviceCall call_;
  AllGatherCall all_gather_;
  dim3 grid_;  ///< the largest launch: CTAs a rank, ranks

 private:
  struct Shape {
    unsigned ctas = 1;  ///< a rank
    unsigned threads = threads_a_cta;
    bool cooperative = true;
    bool early = false;  ///< may be launched before the kernel before it has ended
  };
  /// The launch for the batch at hand: a cluster where few CTAs are enough, because it meets in hardware.
  Shape shape_for(int tokens, const Halves& halves) const;
  bool is_cluster(unsigned ctas) const;
  void make_counters();
  /// Throws InputError where some ranks' outputs are shared and some are not, or slices do not fit the batch.
  void check_shared(std::span<const DeviceOutput> outputs) const;
  /// `attributes` has room for three.
  cudaLaunchConfig_t configuration(const Shape& shape, cudaLaunchAttribute* attributes, DeviceStream stream) const;
  void find_largest_cluster(const void* kernel);
  const void* all_gather() const { return all_gather_kernel(call_.bulk_bytes > 0); }
  unsigned largest_cluster_ = 16;  ///< CTAs of a cluster that all ranks' kernels can have at once
  bool fixed_ctas_ = false;        ///< the caller chose
  std::size_t shared_bytes_ = 0;   ///< of a CTA
  CallOrder order_;
  DevicePlacement placement_;
  DeviceArray<TeamCounters> team_counters_;
  std::unique_ptr<DeviceTallies> tallies_;  ///< null: nothing is counted
  DeviceArray<Word> routed_pairs_;
  DeviceArray<std::byte> scratch_;
};

/// A way of two kernels, each of which can do one half or both. Call begins with a DeviceCall.
template <class Call>
class DeviceWay : public DeviceExchangeBase {
 public:
  /// A kernel for any wire, and two for bf16 alone, without and with bulk copies.
  struct Kernels {
    void (*any)(Call);
    void (*plain)(Call);
    void (*bulk)(Call);
    const void* of(Wire wire, const DeviceExchangeOptions& options) const {
      return reinterpret_cast<const void*>(wire != Wire::bf16 ? any : options.bulk_bytes > 0 ? bulk : plain);
    }
  };
  DeviceWay(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
            const DeviceExchangeOptions& device_options, Kernels dispatch, Kernels combine)
      : DeviceExchangeBase(workspace, gpu, options, memory, device_options),
        dispatch_kernel_(dispatch.of(options.wire, device_options)),
        combine_kernel_(combine.of(options.combine_wire, device_options)) {
    prepare(dispatch_kernel_);
    prepare(combine_kernel_);
  }

  void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    take_inputs(inputs, step, stream);
    launch(dispatch_kernel(), &parameters_, {true, false}, stream);
  }
  void dispatch_receive(DeviceStream stream) override { launch(dispatch_kernel(), &parameters_, {false, true}, stream); }
  void combine_send(std::span<const bf16* const> results, DeviceStream stream) override {
    take_results(results, stream);
    launch(combine_kernel(), &parameters_, {true, false}, stream);
  }
  void combine_receive(std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    take_outputs(outputs, stream);
    launch(combine_kernel(), &parameters_, {false, true}, stream);
    share_outputs(stream);
  }
  void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    take_inputs(inputs, step, stream);
    launch(dispatch_kernel(), &parameters_, {}, stream);
  }
  void combine(std::span<const bf16* const> results, std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    take_results(results, stream);
    take_outputs(outputs, stream);
    // Then one CTA speaks at once for its rank, and all others only listen; other kernels send.
    bool in_place = combine_kernel() == combine_kernel_;
    for (std::size_t i = 0; i < results.size(); ++i)
      in_place &= results[i] != nullptr && results[i] == result_rows(static_cast<int>(i));
    launch(combine_kernel(), &parameters_, {true, true, in_place}, stream);
    share_outputs(stream);
  }

 protected:
  /// For the call at hand, whose inputs have been taken.
  virtual const void* dispatch_kernel() const { return dispatch_kernel_; }
  virtual const void* combine_kernel() const { return combine_kernel_; }

  Call parameters_;
  const void* dispatch_kernel_;
  const void* combine_kernel_;
};

std::unique_ptr<DeviceExchange> create_device_gather(DeviceWorkspace&, std::size_t, const ExchangeOptions&, const ExchangeMemory&,
                                                     const DeviceExchangeOptions&);
std::unique_ptr<DeviceExchange> create_device_normal(DeviceWorkspace&, std::size_t, const ExchangeOptions&, const ExchangeMemory&,
                                                     const DeviceExchangeOptions&);
std::unique_ptr<DeviceExchange> create_device_low_latency(DeviceWorkspace&, std::size_t, const ExchangeOptions&,
                                                          const ExchangeMemory&, const DeviceExchangeOptions&);
std::unique_ptr<DeviceExchange> create_device_elastic(DeviceWorkspace&, std::size_t, const ExchangeOptions&, const ExchangeMemory&,
                                                      const DeviceExchangeOptions&);
std::unique_ptr<DeviceExchange> create_device_one_sided(DeviceWorkspace&, std::size_t, const ExchangeOptions&,
                                                        const ExchangeMemory&, const DeviceExchangeOptions&);

}  // namespace heddle
