#include "mega/host.hpp"

#include <algorithm>
#include <chrono>

#include "signal/fault.hpp"
#include "trace/recorder.hpp"

namespace heddle {

namespace {

/// Whatever `work` gives, as a span.
template <class Work>
bool recorded(trace::Kind kind, const Work& work) {
  const trace::Recorded now(kind);
  return work();
}

trace::Kind kind_of(MegaStep step) {
  switch (step) {
    case MegaStep::announce:
      return trace::Kind::announce;
    case MegaStep::count:
      return trace::Kind::count;
    case MegaStep::fetch:
      break;
  }
  return trace::Kind::fetch;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

HostMega::HostMega(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory, const MegaExperts& experts)
    : HostRank(workspace, options, memory),
      layout_(make_mega_layout(options, options.workers, areas_of(memory, ranks()))),
      all_experts_(mega_placement(options)),
      experts_(experts) {
  for (int r = 0; r < ranks(); ++r) experts_each_.push_back(static_cast<int>(all_experts_.experts_of(r).size()));
  const auto local = static_cast<std::size_t>(std::max(call().local_experts, 1));
  sent_ = HostNumbering(static_cast<std::size_t>(options.cap) * static_cast<std::size_t>(layout_.shape.topk),
                        static_cast<std::size_t>(layout_.shape.experts));
  arrived_ = Array<std::int32_t>(local * static_cast<std::size_t>(ranks()));
  rows_ = Array<std::int32_t>(local);
  ends_ = Array<std::int32_t>(local);
  row_ends_ = Array<std::int32_t>(local);
}

MegaCall HostMega::call() const {
  return {layout_,
          input_,
          {all_experts_.rank_map().data(), all_experts_.local_index_map().data(), experts_each_.data(), all_experts_.experts()},
          experts_each_[static_cast<std::size_t>(rank())],
          {sent_.view(), arrived_.data(), rows_.data(), ends_.data(), row_ends_.data()}};
}

/// One thread of the second role.
struct HostMega::TaskWorker {
  HostWorker worker;
  HostProducts products;
  double sum_seconds = 0;

  TaskWorker(const HostTeam& team, int index, const MegaCall& call, const MegaExperts& experts)
      : worker(team, index), products(call.layout, experts, call.input.hidden) {}

  bool run(const MegaCall& call, const float* shared_factors, bf16* out) {
    worker.start(CallPart::dispatch_send);
    if (!MegaTasks(worker, call, products).run()) return false;
    const auto begin = std::chrono::steady_clock::now();
    const bool summed = recorded(trace::Kind::sum, [&] { return mega_sum(worker, call, {nullptr, shared_factors}, out); });
    sum_seconds = seconds_since(begin);
    return summed;
  }
};

bool HostMega::dispatch(HostWorker& w, const MegaCall& call, double& seconds) {
  const auto begin = std::chrono::steady_clock::now();
  w.start(CallPart::dispatch_send);
  const bool done = mega_dispatch(w, call, [](MegaStep step, const auto& work) { return recorded(kind_of(step), work); });
  seconds = seconds_since(begin);
  return done;
}

const float* HostMega::ask(const SharedFactors& factors) const {
  try {
    return factors();
  } catch (...) {
    raise_abort(workspace_.view(), {{WordKind::failed, -1, -1}, rank(), 0, 0});  // nobody shall wait for this rank
    throw;
  }
}

void HostMega::forward(const ExchangeInput& input, const Step& step, const CombineOutput& output, const SharedFactors& factors) {
  accept(input, step);
  accept(output);
  const float* shared_factors = ask(factors);
  report_ = {};
  const MegaCall now = call();
  const auto workers = static_cast<std::size_t>(options_.workers);
  std::vector<double> dispatching(workers, 0.0);
  std::vector<TaskWorker> tasks;
  tasks.reserve(workers);
  for (int i = 0; i < options_.workers; ++i) tasks.emplace_back(team(), i, now, experts_);
  const trace::Context traced = trace::context();
  run_side_by_side(2 * workers, [&](std::size_t i) {
    const bool dispatches = i < workers;
    const std::size_t number = dispatches ? i : i - workers;
    const trace::Attached lane(traced, dispatches ? trace::Role::dispatch : trace::Role::tasks, static_cast<int>(number));
    return dispatches ? dispatch(worker(number), now, dispatching[number]) : tasks[number].run(now, shared_factors, output.out);
  });
  worker(0).start(CallPart::combine);  // the call's epoch is used up
  for (const TaskWorker& one : tasks) {
    report_.gemm1_seconds = std::max(report_.gemm1_seconds, one.products.gemm1_seconds());
    report_.gemm2_seconds = std::max(report_.gemm2_seconds, one.products.gemm2_seconds());
    report_.shared_seconds = std::max(report_.shared_seconds, one.products.shared_seconds());
    report_.sum_seconds = std::max(report_.sum_seconds, one.sum_seconds);
  }
  report_.dispatch_seconds = *std::max_element(dispatching.begin(), dispatching.end());
  note(now);
  share_outputs(output);
  const ExchangeTraffic shared = take_counts();
  report_.pushed.remote_rows += shared.remote_rows;
  report_.pushed.local_rows += shared.local_rows;
  report_.pushed.remote_bytes += shared.remote_bytes;
  report_.pushed.local_bytes += shared.local_bytes;
}

/// Every row that arrived was fetched from its source, and its result pushed back.
void HostMega::note(const MegaCall& call) {
  const auto count = [&](std::size_t bytes_a_row) {
    for (int region = 0; region < call.local_experts * ranks(); ++region)
      count_rows(region % ranks(), call.scratch.arrived[region], bytes_a_row);
    return take_counts();
  };
  report_.fetched = count(layout_.wire.reported_bytes());
  report_.pushed = count(layout_.returned.reported_bytes());
  for (int e = 0; e < layout_.shape.experts; ++e) {
    if (workspace_.live()[static_cast<std::size_t>(call.placement.rank_of[e])])
      report_.announced += static_cast<std::uint64_t>(call.scratch.sent.totals[e]);
  }
  report_.rows.assign(call.scratch.rows, call.scratch.rows + call.local_experts);
  report_.blocks = call.blocks().count();
}

}  // namespace heddle
