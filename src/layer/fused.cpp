// The fused layer as a layer's body: its experts, its options, and what it reports.
#include <algorithm>
#include <utility>

#include "layer/body.hpp"
#include "layer/expert_bytes.hpp"
#include "mega/host.hpp"

namespace heddle {

namespace {

PhaseReport phase_of(double seconds, const ExchangeTraffic& traffic) {
  return {seconds, traffic.remote_bytes, traffic.local_bytes};
}

/// The rank's experts, an extra one among them from now on.
const std::vector<ExpertWeights>& routed_experts(LayerWeights& weights, const ExchangeOptions& options) {
  if (options.mega.extra_expert) weights.experts.push_back(weights.shared->weights);
  return weights.experts;
}

class Fused final : public LayerBody {
 public:
  Fused(Workspace& workspace, const ExchangeMemory& memory, LayerWeights given, const LayerOptions& options)
      : LayerBody(
            workspace.group().rank(),
            [&workspace](std::uint64_t expected, std::uint64_t seen) { workspace.refuse(expected, seen); }, std::move(given),
            options),
        experts_(routed_experts(weights_, exchange_options_), weights_.shape.hidden, weights_.shape.intermediate, arithmetic()) {
    if (exchange_options_.mega.shared_intermediate > 0) {
      shared_.emplace(std::vector<ExpertWeights>{weights_.shared->weights}, weights_.shape.hidden, weights_.shared->intermediate,
                      arithmetic());
    }
    mega_.emplace(workspace, exchange_options_, memory, MegaExperts{&experts_, shared_ ? &*shared_ : nullptr});
  }

 private:
  void run(const LayerInput& own, const Step& step, CombineOutput output) override {
    mega_->forward({own.tokens, own.hidden, own.ids, own.weights, {}}, step, output, [&] { return gate_shared(own); });
    note(mega_->report());
  }

  HostExperts& experts() override { return experts_; }

  void note(const MegaReport& done) {
    report_.layout = exchange_options_.arrived;
    report_.dispatch = phase_of(done.dispatch_seconds, done.fetched);
    report_.combine = phase_of(done.sum_seconds, done.pushed);
    report_.gemm1.seconds = done.gemm1_seconds;
    report_.gemm2.seconds = done.gemm2_seconds;
    report_.shared_seconds = done.shared_seconds;
    report_.rows_sent = done.announced;
    report_.rows_received = report_.rows_real = done.fetched.remote_rows + done.fetched.local_rows;
    report_.rows_room = static_cast<std::uint64_t>(done.blocks) * static_cast<std::uint64_t>(exchange_options_.mega.block_rows);
    std::vector<bool> touched;
    for (const int rows : done.rows) touched.push_back(rows > 0);
    add_expert_bytes(report_, weights_, arithmetic(), experts_.intermediate(), touched);
    fuse_activation_bytes(report_, experts_.intermediate());
  }

  HostExperts experts_;
  std::optional<HostExperts> shared_;
  std::optional<HostMega> mega_;
};

}  // namespace

std::unique_ptr<LayerBody> make_fused(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights,
                                      const LayerOptions& options) {
  return std::make_unique<Fused>(workspace, memory, std::move(weights), options);
}

}  // namespace heddle
