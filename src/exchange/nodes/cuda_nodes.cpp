#include "exchange/nodes/cuda_nodes.hpp"

#include <fmt/format.h>

#include "exchange/nodes/cuda_call.hpp"
#include "exchange/nodes/cuda_watch.hpp"
#include "group/cuda_pinned.hpp"

namespace heddle {

namespace {

using cuda::check;

void check_nodes_options(const ExchangeOptions& options, const DeviceExchangeOptions& device) {
  const auto refuse = [](const char* text) { throw InputError(std::string("elastic on GPUs of several nodes ") + text); };
  if (options.reduce == Reduce::home) refuse("returns a row a rank: take reduce = rank; on the host engine both are there");
  if (options.cpu_sync) refuse("sends batches of the step's size and waits for no count on the host: leave cpu_sync out");
  if (device.bulk_bytes != 0) refuse("has no bulk copies: leave DeviceExchangeOptions::bulk_bytes out");
}

/// A rank's memory for what it gives to other nodes and gets from them.
struct MailPlan {
  explicit MailPlan(const BatchLayout& layout) {
    const auto peers = static_cast<std::size_t>(layout.peers());
    stride = align_up(layout.batch_bytes(layout.nodes.elastic.shape.cap), 128);
    out = plan.take(stride);
    arrived = plan.take(peers * stride);
    results = plan.take(layout.result(layout.strangers(), 0));
    results_head = plan.take(sizeof(BatchHead));
    results_heads = plan.take(peers * sizeof(BatchHead));
  }

  ScratchPlan plan;
  std::size_t stride = 0, out = 0, arrived = 0, results = 0, results_head = 0, results_heads = 0;
};

class DeviceNodesExchange final : public DeviceElastic {
 public:
  DeviceNodesExchange(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                      const DeviceExchangeOptions& device_options)
      : DeviceElastic(workspace, gpu, options, memory, device_options), link_(workspace.impl().nodes.link) {
    static_cast<ElasticCall&>(nodes_) = parameters_;
    nodes_.batches.nodes = {parameters_.layout, workspace.impl().map.nodes, options.mode};
    for (const NodesKernel which :
         {NodesKernel::send, NodesKernel::receive, NodesKernel::give_back, NodesKernel::hear, NodesKernel::collect})
      prepare(nodes_kernel(which));
    const cuda::DeviceScope scope(device());
    check(load_head_kernel(), "loading of kernels");
    allocate_mail();
    watch_ = std::make_unique<NodeWatch>(workspace, gpu, watched());
  }
  /// What is still queued has its deadline from the watch, so that one goes last. Freeing memory would wait for it without.
  ~DeviceNodesExchange() override {
    int before = 0;  // the caller's device is current again afterwards
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    if (cudaSetDevice(device()) == cudaSuccess) cudaDeviceSynchronize();
    if (known) cudaSetDevice(before);
  }
  DeviceNodesExchange(const DeviceNodesExchange&) = delete;
  DeviceNodesExchange& operator=(const DeviceNodesExchange&) = delete;

  void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    take_inputs(inputs, step, stream);
    launch(nodes_kernel(NodesKernel::send), &nodes_, {true, false}, stream);
  }
  void dispatch_receive(DeviceStream stream) override {
    swap(batch_swaps(), false, stream);
    launch(nodes_kernel(NodesKernel::receive), &nodes_, {false, true}, stream);
  }
  void combine_send(std::span<const bf16* const> results, DeviceStream stream) override {
    take_results(results, stream);
    launch(nodes_kernel(NodesKernel::give_back), &nodes_, {true, false}, stream);
  }
  void combine_receive(std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    for (const DeviceOutput& output : outputs) {
      if (output.all_out != nullptr)
        throw InputError("outputs for all ranks (tensor-parallel attention) are not gathered across nodes; leave all_out null");
    }
    take_outputs(outputs, stream);
    launch(nodes_kernel(NodesKernel::hear), &nodes_, {false, true}, stream);
    swap(result_swaps(), true, stream);
    launch(nodes_kernel(NodesKernel::collect), &nodes_, {false, true}, stream);
  }
  void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    dispatch_send(inputs, step, stream);
    dispatch_receive(stream);
  }
  void combine(std::span<const bf16* const> results, std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    combine_send(results, stream);
    combine_receive(outputs, stream);
  }

 private:
  void allocate_mail() {
    const MailPlan plan(nodes_.batches);
    nodes_.mail_stride = align_up(plan.plan.bytes(), 128);
    const std::size_t bytes = nodes_.mail_stride * static_cast<std::size_t>(local_ranks());
    mail_ = DeviceArray<std::byte>(device(), bytes);
    // Heads of no call; and what is behind the tokens of a batch travels, too.
    check(cudaMemset(mail_.data(), 0, bytes), "zeroing of memory for other nodes");
    check(cudaDeviceSynchronize(), "zeroing of memory for other nodes");
    std::byte* base = mail_.data();
    nodes_.mail = {base + plan.out,
                   base + plan.arrived,
                   plan.stride,
                   base + plan.results,
                   reinterpret_cast<BatchHead*>(base + plan.results_head),
                   reinterpret_cast<BatchHead*>(base + plan.results_heads)};
    progress_ = {static_cast<std::size_t>(local_ranks()), "pinned memory for the watch over other nodes"};
    nodes_.progress = progress_.data();
  }

  template <class T>
  T* of_local(T* first, int local) const {
    const std::size_t shift = static_cast<std::size_t>(local) * nodes_.mail_stride;
    return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(first) + shift);
  }
  std::byte* arrived_batch(int local, int peer) const {
    return of_local(nodes_.mail.arrived, local) + static_cast<std::size_t>(peer) * nodes_.mail.stride;
  }

  std::vector<WatchedRank> watched() const {
    std::vector<WatchedRank> all;
    for (int local = 0; local < local_ranks(); ++local) {
      WatchedRank& one = all.emplace_back(WatchedRank{rank_of(local), progress_.data() + local, {}});
      for (int i = 0; i < nodes_.batches.peers(); ++i) {
        const int peer = nodes_.batches.peer(one.rank, i);
        one.peers.push_back({peer, nodes_.batches.nodes.node_of(peer), reinterpret_cast<BatchHead*>(arrived_batch(local, i)),
                             of_local(nodes_.mail.results_heads, local) + i});
      }
    }
    return all;
  }

  void swap(const std::vector<DeviceSwap>& swaps, bool results, DeviceStream stream) {
    const cuda::DeviceScope scope(device());
    static_cast<DeviceCall&>(nodes_) = call_;
    check(launch_heads(nodes_, local_ranks(), results, stream), "launch of a kernel that speaks to other nodes");
    try {
      link_->swap(swaps, stream);
    } catch (const Error&) {
      workspace_.throw_if_aborted();  // says more, where the link was aborted after a fault
      throw;
    }
  }

  std::vector<DeviceSwap> batch_swaps() const {
    std::vector<DeviceSwap> swaps;
    const std::size_t bytes = nodes_.batches.batch_bytes(call_.max_tokens);
    for (int local = 0; local < local_ranks(); ++local) {
      for (int i = 0; i < nodes_.batches.peers(); ++i) {
        const int rank = rank_of(local);
        swaps.push_back({rank, nodes_.batches.peer(rank, i), of_local(nodes_.mail.out, local), arrived_batch(local, i), bytes});
      }
    }
    return swaps;
  }

  std::vector<DeviceSwap> result_swaps() const {
    const BatchLayout& batches = nodes_.batches;
    const HeapView heap = workspace_.view(gpu_);
    const std::size_t bytes = static_cast<std::size_t>(call_.max_tokens) * parameters_.layout.returned.row_bytes();
    std::vector<DeviceSwap> swaps;
    for (int local = 0; local < local_ranks(); ++local) {
      const int rank = rank_of(local);
      for (int i = 0; i < batches.peers(); ++i) {
        swaps.push_back({rank, batches.peer(rank, i), of_local(nodes_.mail.results_head, local),
                         of_local(nodes_.mail.results_heads, local) + i, sizeof(BatchHead)});
      }
      for (int i = 0; bytes > 0 && i < batches.strangers(); ++i) {
        const int region = batches.stranger(rank, i);
        swaps.push_back({rank, batches.peer_of_region(rank, region),
                         heap.at<std::byte>(rank, parameters_.layout.summed_row(region, 0)),
                         of_local(nodes_.mail.results, local) + batches.result(i, 0), bytes});
      }
    }
    return swaps;
  }

  std::shared_ptr<DeviceNodeLink> link_;
  NodesCall nodes_;
  DeviceArray<std::byte> mail_;
  cuda::PinnedArray<NodeProgress> progress_;
  std::unique_ptr<NodeWatch> watch_;  // last: it looks at the others
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_elastic_nodes(DeviceWorkspace& workspace, std::size_t gpu,
                                                            const ExchangeOptions& options, const ExchangeMemory& memory,
                                                            const DeviceExchangeOptions& device) {
  check_nodes_options(options, device);
  return std::make_unique<DeviceNodesExchange>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
