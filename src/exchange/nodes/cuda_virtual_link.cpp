#include <fmt/format.h>

#include <atomic>
#include <map>

#include "exchange/cuda_exchange.hpp"
#include "exchange/nodes/virtual_link.hpp"
#include "group/cuda_pinned.hpp"
#include "heddle/device_nodes.hpp"

namespace heddle {

namespace {

using cuda::check;

/// What the nodes share: slots [from, to, number of the swap].
class SwapBoard {
 public:
  SwapBoard(int nodes, int ranks_a_node, int device)
      : ranks(nodes * ranks_a_node), swaps_a_pair(ranks_a_node + 1), device_(device), slots_(device, count()) {
    const cuda::DeviceScope scope(device);
    check(cudaMemset(slots_.data(), 0, count() * sizeof(SwapSlot)), "zeroing of slots");
    check(cudaDeviceSynchronize(), "zeroing of slots");
    check(load_swap_kernel(), "loading of kernels");
  }
  SwapSlot* slot(int from, int to, int number) const {
    return slots_.data() +
           (static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(to)) *
               static_cast<std::size_t>(swaps_a_pair) +
           number;
  }
  int device() const { return device_; }

  const int ranks;
  const int swaps_a_pair;  ///< at most: heads and a region a rank of the node

 private:
  std::size_t count() const {
    return static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks) * static_cast<std::size_t>(swaps_a_pair);
  }
  int device_;
  DeviceArray<SwapSlot> slots_;
};

class VirtualLink final : public DeviceNodeLink {
 public:
  explicit VirtualLink(std::shared_ptr<SwapBoard> board)
      : board_(std::move(board)), turns_(board_->device(), 1), stop_(1, "pinned memory for a link") {
    const cuda::DeviceScope scope(board_->device());
    check(cudaMemset(turns_.data(), 0, sizeof(Word)), "zeroing of turns");
    check(cudaDeviceSynchronize(), "zeroing of turns");
  }

  int ranks() const override { return board_->ranks; }
  void swap(std::span<const DeviceSwap> swaps, DeviceStream stream) override {
    if (std::atomic_ref(*stop_.data()).load() != 0) throw Error(ErrorKind::fault, "the link between virtual nodes was aborted");
    if (swaps.size() > SwapCall::most)
      throw InputError(fmt::format("{} swaps at once; virtual nodes on one GPU can make {}", swaps.size(), SwapCall::most));
    int device = -1;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (device != board_->device())
      throw InputError(fmt::format("virtual nodes share GPU {}, ranks {} and following are on GPU {}", board_->device(),
                                   swaps.empty() ? 0 : swaps[0].rank, device));
    SwapCall call;
    call.turns = turns_.data();
    call.stop = stop_.data();
    std::map<std::pair<int, int>, int> made;
    for (const DeviceSwap& swap : swaps) {
      const int number = made[{swap.rank, swap.peer}]++;
      if (number >= board_->swaps_a_pair)
        throw InputError(fmt::format("more than {} swaps of a pair of ranks", board_->swaps_a_pair));
      call.entries[call.count++] = {board_->slot(swap.rank, swap.peer, number), board_->slot(swap.peer, swap.rank, number),
                                    swap.from, swap.to, swap.bytes};
    }
    check(launch_swaps(call, stream), "launch of swaps");
  }
  void abort() noexcept override { std::atomic_ref(*stop_.data()).store(1); }

 private:
  std::shared_ptr<SwapBoard> board_;
  DeviceArray<Word> turns_;
  cuda::PinnedArray<Word> stop_;
};

}  // namespace

std::vector<std::shared_ptr<DeviceNodeLink>> create_virtual_device_links(int nodes, int ranks_a_node, int device) {
  if (nodes < 1 || ranks_a_node < 1)
    throw InputError(fmt::format("{} nodes of {} ranks: at least one of each is wanted", nodes, ranks_a_node));
  const auto board = std::make_shared<SwapBoard>(nodes, ranks_a_node, device);
  std::vector<std::shared_ptr<DeviceNodeLink>> links;
  for (int node = 0; node < nodes; ++node) links.push_back(std::make_shared<VirtualLink>(board));
  return links;
}

}  // namespace heddle
