#include "job.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <type_traits>

namespace heddle::tool {

namespace {

/// What a rank leaves for the command, in memory that both share.
struct RankOutcome {
  enum class State : int { silent, done, bad_input, fault };
  State state = State::silent;
  bool own_fault = false;  ///< this rank itself gave up, it does not only repeat another's
  double seconds = 0;
  std::size_t heap_bytes = 0;
  LayerReport report;
  char message[1000] = {};
};
static_assert(std::is_trivially_copyable_v<RankOutcome>);

/// Memory that child processes share with this one.
class SharedBlock {
 public:
  explicit SharedBlock(std::size_t bytes) : bytes_(std::max<std::size_t>(bytes, 1)) {
    address_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (address_ == MAP_FAILED)
      throw InputError(fmt::format("cannot map {} bytes for the outputs: {}", bytes_, std::strerror(errno)));
  }
  ~SharedBlock() { munmap(address_, bytes_); }
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  void* address() const { return address_; }

 private:
  std::size_t bytes_;
  void* address_;
};

struct Job {
  const Inputs& inputs;
  LayerOptions options;
  Placement placement;
  std::vector<int> firsts;  ///< first token of each rank
  int most_tokens = 0;
  bf16* output = nullptr;  ///< [T, H]
  RankOutcome* outcomes = nullptr;
};

void compute(const Job& job, Group& group, RankOutcome& outcome) {
  const Inputs& inputs = job.inputs;
  const int rank = group.rank();
  LayerWeights weights = LayerWeights::load(inputs.source, job.placement, rank);
  const ExchangeOptions exchange = exchange_options(weights, job.options);
  const ExchangeMemory memory = exchange_memory(exchange);
  const int ranks = group.ranks();
  Workspace workspace(group, memory.heap_bytes(ranks), describe(weights, job.options));
  outcome.heap_bytes = workspace.bytes();
  MoeLayer layer(workspace, memory, std::move(weights), job.options);

  const bool all = job.options.tensor_parallel;
  const auto hidden = static_cast<std::size_t>(inputs.source.shape.hidden);
  const auto first = all ? std::size_t{0} : static_cast<std::size_t>(job.firsts[static_cast<std::size_t>(rank)]);
  LayerInput input;
  input.tokens = all ? inputs.tokens() : inputs.tokens_per_rank[static_cast<std::size_t>(rank)];
  input.hidden = inputs.hidden_states.data() + first * hidden;
  input.ids = inputs.routing.ids.data() + first * static_cast<std::size_t>(inputs.routing.topk);
  input.weights = inputs.routing.weights.data() + first * static_cast<std::size_t>(inputs.routing.topk);
  // Under tensor-parallel attention every rank has all outputs; rank 0 keeps its own for the command.
  std::vector<bf16> mine(all && rank != 0 ? static_cast<std::size_t>(input.tokens) * hidden : 0);
  bf16* out = all && rank != 0 ? mine.data() : job.output + first * hidden;
  group.barrier("start of the layer");
  const auto since = std::chrono::steady_clock::now();
  layer.forward(input, {all ? inputs.tokens() : job.most_tokens, Phase::decode}, out);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
  outcome.report = layer.report();
  workspace.close();
}

void work(const Job& job, int rank, const std::function<std::unique_ptr<Group>()>& join) {
  RankOutcome& outcome = job.outcomes[rank];
  const auto leave = [&outcome](RankOutcome::State state, const char* message) {
    std::snprintf(outcome.message, sizeof outcome.message, "%s", message);
    outcome.state = state;
  };
  try {
    const auto group = join();
    compute(job, *group, outcome);
    outcome.state = RankOutcome::State::done;
  } catch (const FaultError& error) {
    outcome.own_fault = error.fault().rank == rank;
    leave(RankOutcome::State::fault, error.what());
  } catch (const InputError& error) {
    leave(RankOutcome::State::bad_input, error.what());
  } catch (const std::exception& error) {
    leave(RankOutcome::State::fault, error.what());
  }
}

void run_threads(const Job& job) {
  auto groups = create_thread_group(job.inputs.ranks, {std::chrono::milliseconds(job.inputs.deadline_ms)});
  // No rank begins before all threads are there: it would wait for the missing ones until its deadline.
  std::promise<bool> started;
  const std::shared_future<bool> all_there = started.get_future().share();
  std::vector<std::jthread> threads;
  try {
    for (int rank = 0; rank < job.inputs.ranks; ++rank) {
      threads.emplace_back([&job, &groups, all_there, rank] {
        if (all_there.get()) work(job, rank, [&] { return std::move(groups[static_cast<std::size_t>(rank)]); });
      });
    }
  } catch (const std::system_error& error) {
    started.set_value(false);
    throw InputError(fmt::format("cannot start a thread for rank {} of {}: {}; take fewer ranks, or allow more threads (ulimit -u)",
                                 threads.size(), job.inputs.ranks, error.code().message()));
  }
  started.set_value(true);
}

/// The processes of a job's ranks; those that are left at the end of this object's life are ended.
class Children {
 public:
  explicit Children(const Job& job)
      : job_(job), running_(static_cast<std::size_t>(job.inputs.ranks), 0), signals_(running_.size(), 0) {}
  ~Children() { end(); }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  template <class Body>
  void start(int rank, Body body) {
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child < 0) throw InputError(fmt::format("cannot start the process of rank {}: {}", rank, std::strerror(errno)));
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // who is killed takes its ranks along
      if (getppid() == parent) body();
      _exit(0);
    }
    running_[static_cast<std::size_t>(rank)] = child;
  }

  /// " (the process of rank 2 was ended by signal 9, Killed)" for the first that a signal ended, or nothing.
  std::string killed() const {
    for (std::size_t rank = 0; rank < signals_.size(); ++rank) {
      const int signal = signals_[rank];
      if (signal != 0) return fmt::format(" (the process of rank {} was ended by signal {}, {})", rank, signal, strsignal(signal));
    }
    return "";
  }

  /// Once a rank has failed the others end by their deadlines. One that does not (it was stopped, say) is ended.
  void wait() {
    const auto patience = std::chrono::milliseconds(2 * static_cast<long long>(job_.inputs.deadline_ms) + 1000);
    std::optional<std::chrono::steady_clock::time_point> failed;
    while (reap()) {
      const auto now = std::chrono::steady_clock::now();
      if (!failed && has_failed()) failed = now;
      if (failed && now - *failed > patience) return end();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

 private:
  /// Is any still running?
  bool reap() {
    for (std::size_t rank = 0; rank < running_.size(); ++rank) {
      int status = 0;
      if (running_[rank] == 0 || waitpid(running_[rank], &status, WNOHANG) == 0) continue;
      if (WIFSIGNALED(status)) signals_[rank] = WTERMSIG(status);
      running_[rank] = 0;
    }
    return std::any_of(running_.begin(), running_.end(), [](pid_t child) { return child != 0; });
  }

  bool has_failed() const {
    for (std::size_t rank = 0; rank < running_.size(); ++rank) {
      if (running_[rank] == 0 && job_.outcomes[rank].state != RankOutcome::State::done) return true;
    }
    return false;
  }

  void end() {
    for (pid_t& child : running_) {
      if (child == 0) continue;
      kill(child, SIGKILL);
      while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
      }
      child = 0;
    }
  }

  const Job& job_;
  std::vector<pid_t> running_;  ///< a rank; 0: ended
  std::vector<int> signals_;    ///< a rank: what ended its process; 0: its own exit, or end()
};

/// Returns what should be said of killed processes.
std::string run_processes(const Job& job) {
  const std::string name = fmt::format("run.{}", getpid());
  const GroupOptions options{std::chrono::milliseconds(job.inputs.deadline_ms)};
  Children children(job);
  std::fflush(nullptr);
  for (int rank = 0; rank < job.inputs.ranks; ++rank) {
    children.start(rank, [&] { work(job, rank, [&] { return join_process_group(name, rank, job.inputs.ranks, options); }); });
  }
  children.wait();
  return children.killed();
}

/// The outcome that explains a failed run: bad input first, then a rank's own fault, then any.
void throw_failure(const Job& job, const std::string& killed) {
  const RankOutcome* chosen = nullptr;
  const auto weight = [](const RankOutcome& outcome) {
    switch (outcome.state) {
      case RankOutcome::State::done:
        return 0;
      case RankOutcome::State::silent:
        return 1;
      case RankOutcome::State::fault:
        return outcome.own_fault ? 3 : 2;
      case RankOutcome::State::bad_input:
        return 4;
    }
    return 0;
  };
  for (int rank = 0; rank < job.inputs.ranks; ++rank) {
    const RankOutcome& outcome = job.outcomes[rank];
    if (weight(outcome) > (chosen == nullptr ? 0 : weight(*chosen))) chosen = &outcome;
  }
  if (chosen == nullptr) return;
  const auto rank = chosen - job.outcomes;
  switch (chosen->state) {
    case RankOutcome::State::bad_input:
      throw InputError(chosen->message);
    case RankOutcome::State::silent:
      throw Error(ErrorKind::fault, fmt::format("the process of rank {} ended without a word{}", rank, killed));
    default:
      throw Error(ErrorKind::fault, chosen->message + killed);
  }
}

}  // namespace

PhaseReport JobResult::total(PhaseReport LayerReport::*phase) const {
  PhaseReport sum;
  for (const LayerReport& report : reports) {
    sum.seconds = std::max(sum.seconds, (report.*phase).seconds);
    sum.remote_bytes += (report.*phase).remote_bytes;
    sum.local_bytes += (report.*phase).local_bytes;
  }
  return sum;
}

JobResult run_job(const Inputs& inputs, const LayerOptions& options) {
  const auto ranks = static_cast<std::size_t>(inputs.ranks);
  const auto hidden = static_cast<std::size_t>(inputs.source.shape.hidden);
  const std::size_t values = static_cast<std::size_t>(inputs.tokens()) * hidden;
  const SharedBlock output(values * sizeof(bf16));
  const SharedBlock outcomes(ranks * sizeof(RankOutcome));
  Job job{inputs,
          options,
          Placement::contiguous(inputs.source.shape.experts, inputs.ranks),
          {},
          0,
          static_cast<bf16*>(output.address()),
          static_cast<RankOutcome*>(outcomes.address())};
  for (std::size_t r = 0, first = 0; r < ranks; ++r) {
    job.firsts.push_back(static_cast<int>(first));
    first += static_cast<std::size_t>(inputs.tokens_per_rank[r]);
    job.most_tokens = std::max(job.most_tokens, inputs.tokens_per_rank[r]);
    new (&job.outcomes[r]) RankOutcome();
  }
  JobResult result;
  LayerWeights without_experts;  // what all ranks share, enough for the options
  without_experts.shape = inputs.source.shape;
  without_experts.kind = inputs.source.kind;
  without_experts.placement = job.placement;
  without_experts.shared = inputs.source.shared;
  result.exchange = exchange_options(without_experts, options);
  std::string killed;
  if (inputs.processes) {
    killed = run_processes(job);
  } else {
    run_threads(job);
  }
  throw_failure(job, killed);
  result.output.assign(job.output, job.output + values);
  std::uint64_t sent = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    const RankOutcome& outcome = job.outcomes[r];
    result.reports.push_back(outcome.report);
    result.heap_bytes = outcome.heap_bytes;
    result.seconds = std::max(result.seconds, outcome.seconds);
    sent += outcome.report.rows_sent;
  }
  result.copies = inputs.tokens() == 0 ? 0.0 : static_cast<double>(sent) / inputs.tokens();
  return result;
}

}  // namespace heddle::tool
