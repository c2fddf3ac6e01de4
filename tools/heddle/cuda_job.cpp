#include "cuda_job.hpp"

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <numeric>
#include <optional>

#include "children.hpp"
#include "cuda_layer_job.hpp"
#include "gpu_job.hpp"
#include "group/cuda_workspace.hpp"
#include "heddle/device_nodes.hpp"
#include "layer/cuda_ranks.hpp"

namespace heddle::tool {

namespace {

int count_in_child() {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    _exit(std::min(count, 250));
  }
  int status = 0;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace

int gpus_present() {
  static const int count = count_in_child();  // later this process may use CUDA, and its children could not
  return count;
}

namespace {

/// With experts on the host engine.
void run_rank(const Job& job, DeviceRanks& ranks, int rank) {
  attempt(job, rank, [&] {
    try {
      MoeLayer layer(ranks.seat(rank), LayerWeights::load(job.inputs.source, job.placement, rank), job.options);
      call_layer(job, rank, layer, [&] { ranks.meet(rank, "start of the layer"); });
    } catch (...) {
      ranks.give_up(rank, WordKind::failed, 0, 0);  // nobody shall wait for this rank
      throw;
    }
  });
}

/// The ranks of one process, on its GPUs; alone where there is no group. `nodes`: of a virtual node, all of them, a member each.
void run_process(const Job& job, Group* processes, const DeviceGroupOptions& mine, Group* nodes = nullptr) {
  const LayerWeights weights = LayerWeights::common(job.inputs.source, job.placement);
  const ExchangeMemory memory = layer_memory(weights, job.options);
  const std::size_t bytes = memory.heap_bytes(job.inputs.ranks);
  std::optional<DeviceWorkspace> workspace;
  if (processes == nullptr) {
    workspace.emplace(mine, bytes);
  } else {
    workspace.emplace(*processes, mine, bytes, describe(weights, job.options));
  }
  if (!job.inputs.host_experts)
    return run_device_layers(job, *workspace, memory, nodes != nullptr ? *nodes : workspace->impl().processes);
  DeviceRanks ranks(*workspace, exchange_options(weights, job.options), memory, mine.deadline);
  run_in_threads(ranks.first_rank(), ranks.ranks(), [&](int rank) {
    job.outcomes[rank].heap_bytes = workspace->bytes();
    run_rank(job, ranks, rank);
  });
  job.outcomes[ranks.first_rank()].kernels = ranks.kernels_launched();
}

/// Whatever keeps a process from running its ranks is its first rank's story.
void attempt_process(const Job& job, int first_rank, const std::function<void()>& run) {
  try {
    return run();
  } catch (...) {
    attempt(job, first_rank, [] { throw; });
  }
}

/// Virtual nodes that share one GPU, a thread each.
void run_nodes(const Job& job, std::chrono::milliseconds deadline) {
  // Before CUDA begins: streams that share a hardware queue would wait for each other, and nodes wait for each other in theirs.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const int nodes = job.inputs.nodes;
  const int inside = job.inputs.ranks / nodes;
  std::vector<std::shared_ptr<DeviceNodeLink>> links;
  attempt_process(job, 0, [&] {
    if (job.trace.recorder != nullptr) throw InputError("a trace is of one node; leave --nodes, or --engine cuda");
    links = create_virtual_device_links(nodes, inside);
  });
  if (links.empty()) return;
  const auto together = create_thread_group(nodes, {deadline});
  run_in_threads(0, nodes, [&](int node) {
    const auto index = static_cast<std::size_t>(node);
    attempt_process(job, node * inside, [&] {
      run_process(job, nullptr, {inside, {0}, deadline, {node, nodes, links[index]}}, together[index].get());
    });
  });
}

}  // namespace

std::string run_on_gpus(const Job& job) {
  const int gpus = job.inputs.gpus;
  const std::chrono::milliseconds deadline(job.inputs.deadline_ms);
  if (job.inputs.nodes > 1) {
    run_nodes(job, deadline);
    return "";
  }
  if (!job.inputs.processes) {
    DeviceGroupOptions all{job.inputs.ranks, std::vector<int>(static_cast<std::size_t>(gpus)), deadline};
    std::iota(all.devices.begin(), all.devices.end(), 0);
    attempt_process(job, 0, [&] { run_process(job, nullptr, all); });
    return "";
  }
  const std::string name = fmt::format("run.{}", getpid());
  const auto first_of = [&](int process) {
    return process * (job.inputs.ranks / gpus) + std::min(process, job.inputs.ranks % gpus);
  };
  Children children(gpus);
  std::fflush(nullptr);
  for (int process = 0; process < gpus; ++process) {
    const int first = first_of(process);
    const DeviceGroupOptions mine{first_of(process + 1) - first, {process}, deadline};
    children.start(process, [&] {
      attempt_process(job, first, [&] {
        const auto group = join_process_group(name, process, gpus, {deadline});
        run_process(job, group.get(), mine);
      });
    });
  }
  children.wait(job.inputs.deadline_ms, [&](int process) {
    for (int rank = first_of(process); rank < first_of(process + 1); ++rank) {
      if (job.outcomes[rank].state != RankOutcome::State::done) return true;
    }
    return false;
  });
  return children.killed("the process of GPU");
}

}  // namespace heddle::tool
