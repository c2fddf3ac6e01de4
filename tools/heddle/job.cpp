#include "job.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>

#include "children.hpp"
#include "gpu_job.hpp"
#include "heddle/nodes.hpp"
#include "job_ranks.hpp"
#include "layer/candidates.hpp"
#include "layer/options.hpp"
#include "layer/token_sizes.hpp"
#include "shared_block.hpp"

namespace heddle::tool {

namespace {

void run_on_host(const Job& job, int rank, const std::function<std::unique_ptr<Group>()>& join) {
  attempt(job, rank, [&] {
    const auto group = join();
    LayerWeights weights = LayerWeights::load(job.inputs.source, job.placement, rank);
    const ExchangeMemory memory = layer_memory(weights, job.options);
    Workspace workspace(*group, memory.heap_bytes(group->ranks()), describe(weights, job.options));
    job.outcomes[rank].heap_bytes = workspace.bytes();
    MoeLayer layer(workspace, memory, std::move(weights), job.options);
    call_layer(job, rank, layer, [&] { group->barrier("start of the layer"); });
    workspace.close();
  });
}

void run_threads(const Job& job) {
  const GroupOptions options{std::chrono::milliseconds(job.inputs.deadline_ms)};
  const int nodes = job.inputs.nodes;
  auto groups =
      nodes > 1 ? create_virtual_nodes(nodes, job.inputs.ranks / nodes, options) : create_thread_group(job.inputs.ranks, options);
  run_in_threads(0, job.inputs.ranks,
                 [&](int rank) { run_on_host(job, rank, [&] { return std::move(groups[static_cast<std::size_t>(rank)]); }); });
}

/// Returns what should be said of killed processes.
std::string run_processes(const Job& job) {
  const std::string group = fmt::format("run.{}", getpid());
  const GroupOptions options{std::chrono::milliseconds(job.inputs.deadline_ms)};
  Children children(job.inputs.ranks);
  std::fflush(nullptr);
  for (int rank = 0; rank < job.inputs.ranks; ++rank) {
    children.start(rank,
                   [&] { run_on_host(job, rank, [&] { return join_process_group(group, rank, job.inputs.ranks, options); }); });
  }
  children.wait(job.inputs.deadline_ms, [&](int rank) { return job.outcomes[rank].state != RankOutcome::State::done; });
  return children.killed("the process of rank");
}

std::string run_ranks(const Job& job) {
  if (job.inputs.gpus > 0) return run_on_gpus(job);
  if (job.inputs.processes) return run_processes(job);
  run_threads(job);
  return "";
}

}  // namespace

void call_layer(const Job& job, int rank, MoeLayer& layer, const std::function<void()>& start) {
  const Inputs& inputs = job.inputs;
  const bool all = job.options.tensor_parallel;
  const TokenSizes sizes = TokenSizes::of(inputs.source.shape);
  const int first = all ? 0 : job.firsts[static_cast<std::size_t>(rank)];
  const LayerInput input =
      sizes.from(LayerInput{all ? inputs.tokens() : inputs.tokens_per_rank[static_cast<std::size_t>(rank)],
                            inputs.hidden_states.data(), inputs.routing.ids.data(), inputs.routing.weights.data()},
                 first);
  // Under tensor-parallel attention every rank has all outputs; rank 0 keeps its own for the command.
  std::vector<bf16> mine(all && rank != 0 ? static_cast<std::size_t>(input.tokens) * sizes.hidden : 0);
  bf16* out = all && rank != 0 ? mine.data() : sizes.outputs_from(job.output, first);
  const Step step{all ? inputs.tokens() : job.most_tokens, Phase::decode};
  for (int i = 0; i < job.trace.warm_calls; ++i) layer.forward(input, step, out);
  start();
  std::optional<trace::Attached> lane;
  if (job.trace.recorder != nullptr) lane.emplace(*job.trace.recorder, trace::LaneName{rank, trace::Role::rank});
  const auto since = std::chrono::steady_clock::now();
  layer.forward(input, step, out);
  job.outcomes[rank].seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
  job.outcomes[rank].report = layer.report();
  if (job.options.way == Way::automatic) note_choice(job.outcomes[rank], layer.explain(step));
}

void note_choice(RankOutcome& outcome, const WayChoice& choice) {
  std::snprintf(outcome.choice, sizeof outcome.choice, "%s", choice.text().c_str());
}

void run_in_threads(int first, int count, const std::function<void(int)>& body) {
  // No rank begins before all threads are there: it would wait for the missing ones until its deadline.
  std::promise<bool> started;
  const std::shared_future<bool> all_there = started.get_future().share();
  std::vector<std::jthread> threads;
  try {
    for (int rank = first; rank < first + count; ++rank) {
      threads.emplace_back([&body, all_there, rank] {
        if (all_there.get()) body(rank);
      });
    }
  } catch (const std::system_error& error) {
    started.set_value(false);
    throw InputError(fmt::format("cannot start a thread for rank {} of {}: {}; take fewer ranks, or allow more threads (ulimit -u)",
                                 threads.size(), count, error.code().message()));
  }
  started.set_value(true);
}

PhaseReport JobResult::total(PhaseReport LayerReport::*phase) const {
  PhaseReport sum;
  for (const LayerReport& report : reports) {
    sum.seconds = std::max(sum.seconds, (report.*phase).seconds);
    sum.remote_bytes += (report.*phase).remote_bytes;
    sum.between_bytes += (report.*phase).between_bytes;
    sum.local_bytes += (report.*phase).local_bytes;
  }
  return sum;
}

double JobResult::slowest(double LayerReport::*part) const {
  double most = 0;
  for (const LayerReport& report : reports) most = std::max(most, report.*part);
  return most;
}

JobResult run_job(const Inputs& inputs, const LayerOptions& options, const JobTrace& trace) {
  const auto ranks = static_cast<std::size_t>(inputs.ranks);
  const auto hidden = static_cast<std::size_t>(inputs.source.shape.hidden);
  const std::size_t values = static_cast<std::size_t>(inputs.tokens()) * hidden;
  const SharedBlock output(values * sizeof(bf16));
  const SharedBlock outcomes(ranks * sizeof(RankOutcome));
  Job job{inputs,
          options,
          default_placement(inputs.source.shape, inputs.ranks, options),
          {},
          0,
          static_cast<bf16*>(output.address()),
          static_cast<RankOutcome*>(outcomes.address()),
          trace};
  for (std::size_t r = 0, first = 0; r < ranks; ++r) {
    job.firsts.push_back(static_cast<int>(first));
    first += static_cast<std::size_t>(inputs.tokens_per_rank[r]);
    job.most_tokens = std::max(job.most_tokens, inputs.tokens_per_rank[r]);
    new (&job.outcomes[r]) RankOutcome();
  }
  JobResult result;
  const LayerWeights common = LayerWeights::common(inputs.source, job.placement);
  const Candidates candidates = candidates_of(common, options, inputs.host_experts ? Engine::host : Engine::gpus);
  for (const LayerOptions& one : candidates.options) exchange_options(common, one);  // what does not fit is said before ranks start
  const std::string killed = run_ranks(job);
  throw_failure({job.outcomes, ranks}, "", killed);
  const Way way = job.outcomes[0].report.way;
  result.options =
      *std::find_if(candidates.options.begin(), candidates.options.end(), [&](const LayerOptions& one) { return one.way == way; });
  result.exchange = exchange_options(common, result.options);
  result.choice = job.outcomes[0].choice;
  result.output.assign(job.output, job.output + values);
  std::uint64_t sent = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    const RankOutcome& outcome = job.outcomes[r];
    result.reports.push_back(outcome.report);
    result.heap_bytes = outcome.heap_bytes;
    result.seconds = std::max(result.seconds, outcome.seconds);
    result.kernels += outcome.kernels;
    sent += outcome.report.rows_sent;
  }
  result.copies = inputs.tokens() == 0 ? 0.0 : static_cast<double>(sent) / inputs.tokens();
  return result;
}

}  // namespace heddle::tool
