// heddle bench recovery: kills ranks in turn and tells what became of it.
#include "recovery.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "command.hpp"
#include "heddle/error.hpp"
#include "heddle/version.hpp"
#include "provenance.hpp"
#include "shared_block.hpp"
#include "words.hpp"

namespace heddle::tool {

using Json = nlohmann::ordered_json;

namespace {

/// The processes of a group's ranks; those that are left at the end are ended.
class RankProcesses {
 public:
  explicit RankProcesses(const RecoveryBench& bench) : bench_(bench), running_(static_cast<std::size_t>(bench.inputs.ranks), 0) {
    for (int rank = 0; rank < bench.inputs.ranks; ++rank) start(rank, Entry::together);
  }
  ~RankProcesses() {
    for (int rank = 0; rank < bench_.inputs.ranks; ++rank) end(rank);
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  void start(int rank, Entry entry) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child < 0) throw InputError(fmt::format("cannot start a process for rank {}", rank));
    if (child == 0) {
      run_recovering_rank(bench_, rank, entry);
      _exit(0);
    }
    running_[static_cast<std::size_t>(rank)] = child;
  }
  /// Kills the process if it is there; when it died.
  double end(int rank) {
    pid_t& process = running_[static_cast<std::size_t>(rank)];
    const double now = steady_seconds();
    if (process != 0) {
      kill(process, SIGKILL);
      waitpid(process, nullptr, 0);
    }
    process = 0;
    return now;
  }

 private:
  const RecoveryBench& bench_;
  std::vector<pid_t> running_;
};

RecoveryBoard::Seat& seat_of(const RecoveryBench& bench, int rank) { return bench.board->seats[static_cast<std::size_t>(rank)]; }

/// Throws what a rank has failed with, or Error if it takes far longer than deadlines allow.
void wait_until(const RecoveryBench& bench, const std::string& what, const std::function<bool()>& there) {
  const double end = steady_seconds() + 60 + 10 * bench.inputs.deadline_ms / 1000.0;
  while (!there()) {
    for (int rank = 0; rank < bench.inputs.ranks; ++rank) {
      if (seat_of(bench, rank).error[0] != 0) throw Error(ErrorKind::fault, seat_of(bench, rank).error);
    }
    if (steady_seconds() > end) throw Error(ErrorKind::fault, "heddle bench recovery: waited in vain for " + what);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

/// All ranks of `mask` have it and go on.
void wait_for_mask(const RecoveryBench& bench, std::uint32_t mask, const std::string& what) {
  std::uint32_t furthest = 0;
  for (int rank = 0; rank < bench.inputs.ranks; ++rank) furthest = std::max<std::uint32_t>(furthest, seat_of(bench, rank).steps);
  wait_until(bench, what, [&] {
    for (int rank = 0; rank < bench.inputs.ranks; ++rank) {
      if ((mask >> rank & 1) != 0 && (seat_of(bench, rank).live != mask || seat_of(bench, rank).steps < furthest + 5)) return false;
    }
    return true;
  });
}

/// Of the ranks in `mask` the one whose step ended last, from its first record after `before` on.
Json slowest(const RecoveryBench& bench, std::uint32_t mask, const std::vector<std::uint32_t>& before, double since) {
  Json slowest;
  for (int rank = 0; rank < bench.inputs.ranks; ++rank) {
    if ((mask >> rank & 1) == 0) continue;
    const RecoveryBoard::Seat& seat = seat_of(bench, rank);
    if (seat.records == before[static_cast<std::size_t>(rank)]) continue;
    const RecoveryRecord& r = seat.record[before[static_cast<std::size_t>(rank)] % RecoveryBoard::most_records];
    const double ms = 1e3, detect = r.noticed - since;
    const double total = detect + r.agree + r.meet + r.memory + r.experts + r.again;
    if (!slowest.is_null() && slowest["total_ms"].get<double>() >= total * ms) continue;
    slowest = {{"total_ms", total * ms},   {"detect_ms", detect * ms},        {"agree_ms", r.agree * ms},
               {"meet_ms", r.meet * ms},   {"memory_ms", r.memory * ms},      {"experts_ms", r.experts * ms},
               {"again_ms", r.again * ms}, {"experts_moved", r.experts_moved}};
  }
  return slowest;
}

std::vector<std::uint32_t> records(const RecoveryBench& bench) {
  std::vector<std::uint32_t> counts;
  for (int rank = 0; rank < bench.inputs.ranks; ++rank) counts.push_back(seat_of(bench, rank).records);
  return counts;
}

constexpr const char* parts[] = {"total_ms", "detect_ms", "agree_ms", "meet_ms", "memory_ms", "experts_ms", "again_ms"};

void print_row(const std::string& way, const std::string& what, const Json& samples) {
  std::string line = fmt::format("{:<12} {:<6}", way, what);
  for (const char* part : parts) {
    std::vector<double> values;
    for (const Json& sample : samples) values.push_back(sample[part]);
    line += fmt::format(" {:>10.2f}", median(values));
  }
  print_line(line);
}

Json measure_way(const RecoveryBench& bench, const std::string& way, int losses) {
  const std::uint32_t all = bench.inputs.ranks == 32 ? ~0u : (1u << bench.inputs.ranks) - 1;
  RankProcesses processes(bench);
  wait_for_mask(bench, all, "the first steps");
  Json lost = Json::array(), back = Json::array();
  std::vector<double> steps;
  for (int i = 0; i < losses; ++i) {
    const int victim = i % bench.inputs.ranks;
    steps.push_back(seat_of(bench, victim).step_seconds * 1e3);
    auto before = records(bench);
    const double killed = processes.end(victim);
    wait_for_mask(bench, all & ~(1u << victim), "the survivors");
    lost.push_back(slowest(bench, all & ~(1u << victim), before, killed));
    lost.back()["rank"] = victim;
    before = records(bench);
    const double started = steady_seconds();
    processes.start(victim, Entry::late);
    wait_for_mask(bench, all, "the process in the lost one's place");
    back.push_back(slowest(bench, all & ~(1u << victim), before, started));
    back.back()["rank"] = victim;
  }
  print_row(way, "lost", lost);
  print_row(way, "back", back);
  return {{"way", way}, {"step_ms", median(steps)}, {"lost", lost}, {"back", back}};
}

void check_arguments(const RecoveryArguments& a) {
  if (!a.layer.ranks || *a.layer.ranks < 2) throw InputError("give --ranks N, at least 2: one is killed, the others go on");
  if (*a.layer.ranks > RecoveryBoard::most_ranks)
    throw InputError(fmt::format("--ranks {}: heddle bench recovery takes up to {}", *a.layer.ranks, RecoveryBoard::most_ranks));
  if (a.layer.engine != "host")
    throw InputError("heddle bench recovery measures the host engine; on GPUs recovery_gpu_test prints its times");
  if (a.layer.tensor_parallel || a.layer.expert_slices)
    throw InputError(
        "heddle bench recovery has ranks with tokens and experts of their own; leave --tensor-parallel and --expert-slices");
  if (a.losses < 1) throw InputError(fmt::format("--losses {}: at least 1 is needed", a.losses));
  if (a.grace_ms < 0) throw InputError(fmt::format("--grace-ms {}: 0 or more", a.grace_ms));
  for (const std::string& way : a.ways) real_way(way, "--way");
}

}  // namespace

void add_recovery_flags(CLI::App& command, RecoveryArguments& a) {
  a.layer.deadline_ms = 1000;  // a loss takes one
  add_layer_arguments(command, a.layer);
  const char* recovery = "Recovery";
  command.add_option("--way", a.ways, "ways to measure (default: low_latency,elastic,mega)")->delimiter(',')->group(recovery);
  command.add_option("--losses", a.losses, "ranks that are killed, one after the other")
      ->group(recovery)
      ->capture_default_str()
      ->check(whole_number);
  command.add_option("--grace-ms", a.grace_ms, "how long a roll call waits for a rank that an error has named")
      ->group(recovery)
      ->capture_default_str()
      ->check(whole_number);
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(recovery);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(recovery);
}

Json measure_recovery(const RecoveryArguments& a) {
  check_arguments(a);
  const Inputs inputs = load_inputs(a.layer);
  // Drawn here and not by whoever asks first, which would count as loading.
  if (inputs.synthetic) {
    for (int expert = 0; expert < inputs.source.shape.experts; ++expert) inputs.synthetic->expert(expert);
  }
  print_line(
      fmt::format("{} ranks (processes), {} experts of {} x {}, deadline {} ms, grace {} ms; ms of the slowest survivor, medians "
                  "of {}",
                  inputs.ranks, inputs.source.shape.experts, inputs.source.shape.hidden, inputs.source.shape.intermediate,
                  inputs.deadline_ms, a.grace_ms, a.losses));
  print_line(fmt::format("{:<12} {:<6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}", "way", "rank", "total", "detect", "agree",
                         "meet", "memory", "experts", "again"));
  Json rows = Json::array();
  for (const std::string& way : a.ways) {
    const SharedBlock memory(sizeof(RecoveryBoard));
    LayerOptions options = options_of_way(way, a.layer, inputs);
    if (options.way != Way::elastic) options.reduce = Reduce::rank;  // the flag is elastic's
    const RecoveryBench bench{inputs, options, fmt::format("bench.recovery.{}.{}", getpid(), rows.size()), a.grace_ms,
                              static_cast<RecoveryBoard*>(memory.address())};
    rows.push_back(measure_way(bench, way, a.losses));
  }
  const LayerShape& shape = inputs.source.shape;
  return {{"heddle", version},
          {"benchmark", "recovery"},
          {"date", now_in_utc()},
          {"commit", a.commit},
          {"command", command_line()},
          {"machine", host_machine_json()},
          {"ranks", inputs.ranks},
          {"tokens", inputs.tokens()},
          {"hidden", shape.hidden},
          {"intermediate", shape.intermediate},
          {"experts", shape.experts},
          {"topk", shape.topk},
          {"weights", word_of(kinds, inputs.source.kind)},
          {"experts_from", inputs.checkpoint ? "file" : "memory"},
          {"deadline_ms", inputs.deadline_ms},
          {"grace_ms", a.grace_ms},
          {"rows", rows}};
}

}  // namespace heddle::tool
