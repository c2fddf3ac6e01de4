#include "exchange/nodes/cuda_watch.hpp"

#include <algorithm>
#include <atomic>

namespace heddle {

using cuda::check;
using Clock = std::chrono::steady_clock;

NodeWatch::NodeWatch(DeviceWorkspace& workspace, std::size_t gpu, std::vector<WatchedRank> ranks)
    : workspace_(workspace), device_(workspace.device(gpu)), ranks_(std::move(ranks)), seen_(ranks_.size()) {
  const cuda::DeviceScope scope(device_);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  thread_ = std::thread([this] { look_on(); });
}

NodeWatch::~NodeWatch() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  end_.notify_one();
  thread_.join();
  cudaStreamDestroy(stream_);
}

void NodeWatch::look_on() noexcept {
  constexpr std::chrono::milliseconds pause(5);
  std::unique_lock lock(mutex_);
  while (!end_.wait_for(lock, pause, [this] { return over_; })) {
    const WatchedRank* late = overdue();
    if (late == nullptr) continue;
    try {
      give_up(*late);
    } catch (const std::exception&) {
      // The context is broken; whoever waits for the stream is told by CUDA.
    }
    workspace_.impl().nodes.link->abort();
    return;
  }
}

const WatchedRank* NodeWatch::overdue() {
  const std::chrono::nanoseconds deadline(std::atomic_ref(workspace_.impl().settings.deadline_nanoseconds).load());
  const auto now = Clock::now();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    NodeProgress& progress = *ranks_[i].progress;
    const Word ended = std::atomic_ref(progress.ended).load(std::memory_order_acquire);
    const Word begun = std::atomic_ref(progress.begun).load(std::memory_order_acquire);
    if (begun == ended || begun != seen_[i].begun) {
      seen_[i] = {begun, now};
    } else if (now - seen_[i].since > deadline) {
      return &ranks_[i];
    }
  }
  return nullptr;
}

BatchHead NodeWatch::read(const BatchHead* head) const {
  const cuda::DeviceScope scope(device_);
  BatchHead copy;
  check(cudaMemcpyAsync(&copy, head, sizeof copy, cudaMemcpyDeviceToHost, stream_), "a look at what other nodes sent");
  check(cudaStreamSynchronize(stream_), "a look at what other nodes sent");
  return copy;
}

void NodeWatch::give_up(const WatchedRank& of) {
  const Word begun = std::atomic_ref(of.progress->begun).load(std::memory_order_acquire);
  const auto epoch = static_cast<std::uint32_t>(begun / 2);
  const bool results = begun % 2 == 1;
  std::vector<BatchHead> heads;
  for (const WatchedRank::Peer& peer : of.peers) heads.push_back(read(results ? peer.results : peer.batch));
  const auto missing = std::find_if(heads.begin(), heads.end(), [&](const BatchHead& head) { return head.epoch != epoch; });
  const std::size_t i = missing == heads.end() ? 0 : static_cast<std::size_t>(missing - heads.begin());
  const WordKind kind = results ? WordKind::elastic_node_results : WordKind::elastic_node_rows;
  const WordName name{kind, of.peers[i].rank, of.peers[i].node};
  workspace_.impl().give_up(of.rank, {name, of.rank, pack_word(epoch, 0), pack_word(heads[i].epoch, heads[i].tokens)});
}

}  // namespace heddle
