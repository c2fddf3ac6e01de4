#include <algorithm>
#include <chrono>

#include "exchange/host_exchange.hpp"
#include "exchange/low_latency/protocol.hpp"
#include "trace/recorder.hpp"

namespace heddle {

namespace {

class LowLatencyExchange final : public HostExchange {
 public:
  LowLatencyExchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory)
      : HostExchange(workspace, options, memory), layout_(make_layout<LowLatencyLayout>(options, areas_of(memory, ranks()))) {
    const auto local = static_cast<std::size_t>(local_experts());
    scratch_.block_rows = ranks() * options.cap;
    const std::size_t room = local * static_cast<std::size_t>(scratch_.block_rows);
    sent_ = HostNumbering(static_cast<std::size_t>(options.cap) * static_cast<std::size_t>(options.topk),
                          static_cast<std::size_t>(shape_.experts));
    arrived_ = Array<std::int32_t>(std::max<std::size_t>(local, 1) * static_cast<std::size_t>(ranks()));
    begins_ = Array<std::int32_t>(local + 1);
    counts_ = Array<std::int32_t>(local + 1);
    rows_ = Array<std::byte>(room * layout_.wire.row_bytes() + 1);
    origins_ = Array<PairOrigin>(room + 1);
    weights_ = Array<float>(room + 1);
    for (int e = 0; e < local_experts(); ++e) begins_[static_cast<std::size_t>(e)] = e * scratch_.block_rows;
    scratch_.sent = sent_.view();
    scratch_.arrived = arrived_.data();
    scratch_.rows = rows_.data();
    scratch_.origins = origins_.data();
    scratch_.weights = weights_.data();
    scratch_.counts = counts_.data();
  }

  void dispatch_send(const ExchangeInput& input, const Step& step) override {
    accept(input, step);
    run(CallPart::dispatch_send, [this](HostWorker& w) { return low_latency_send(w, layout_, input_, placement_, scratch_); });
    for (int e = 0; e < shape_.experts; ++e)
      count_rows(placement_.rank_of[e], scratch_.sent.totals[e], layout_.wire.reported_bytes());
  }

  Arrived dispatch_receive() override {
    run(CallPart::dispatch_receive,
        [this](HostWorker& w) { return low_latency_hear(w, layout_, local_experts(), scratch_) != nullptr; });
    const auto since = std::chrono::steady_clock::now();
    const trace::Recorded recorded(trace::Kind::regroup);
    run(CallPart::dispatch_receive, [this](HostWorker& w) {
      low_latency_pack(w, layout_, local_experts(), scratch_.arrived, scratch_);
      return true;
    });
    Arrived arrived;
    arrived.regroup_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    arrived.layout = ArrivedLayout::masked;
    arrived.wire = options_.wire;
    arrived.rows = rows_.data();
    arrived.row_stride = layout_.wire.row_bytes();
    arrived.room = local_experts() * scratch_.block_rows;
    arrived.begins = begins_.data();
    arrived.counts = counts_.data();
    arrived.row_weights = weights_.data();
    arrived.block_rows = scratch_.block_rows;
    for (int e = 0; e < local_experts(); ++e) arrived.real += scratch_.counts[e];
    arrived.received = arrived.real;
    return arrived;
  }

  void combine_send(const bf16* results) override {
    accept_results();
    run(CallPart::combine, [&](HostWorker& w) { return low_latency_return(w, layout_, local_experts(), results, scratch_); });
    for (int region = 0; region < local_experts() * ranks(); ++region) {
      count_rows(region % ranks(), scratch_.arrived[region], layout_.returned.reported_bytes());
    }
  }

  void combine_receive(const CombineOutput& output) override {
    accept(output);
    const bool weighted = options_.weight_at == WeightAt::combine;
    run(CallPart::combine, [&](HostWorker& w) {
      return low_latency_collect(w, layout_, input_, placement_, weighted, shared_rows(output), output.out);
    });
    share_outputs(output);
  }

 private:
  LowLatencyLayout layout_;
  LowLatencyScratch scratch_;
  HostNumbering sent_;
  Array<std::int32_t> arrived_, begins_, counts_;
  Array<std::byte> rows_;
  Array<PairOrigin> origins_;
  Array<float> weights_;
};

}  // namespace

std::unique_ptr<Exchange> create_low_latency(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  return std::make_unique<LowLatencyExchange>(workspace, options, memory);
}

}  // namespace heddle
