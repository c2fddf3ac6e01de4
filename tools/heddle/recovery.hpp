// heddle bench recovery: ranks are processes that are killed in turn; what an interruption takes, part by part, and what it takes
// until a process in the lost one's place is in again (docs/recovery.md).
#pragma once

#include <array>
#include <atomic>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "heddle/recovery.hpp"
#include "inputs.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

struct RecoveryArguments {
  LayerArguments layer;
  std::vector<std::string> ways{"low_latency", "elastic", "mega"};
  int losses = 12;
  int grace_ms = 100;
  std::string json, commit;
};

/// An interruption as a rank's process tells it.
struct RecoveryRecord {
  std::uint32_t live = 0;  ///< bits
  double noticed = 0;      ///< seconds of the steady clock, which is the machine's
  double agree = 0, meet = 0, memory = 0, experts = 0, again = 0;
  int experts_moved = 0;
};

/// What the processes of a group tell the command; shared memory, zeros at first.
struct RecoveryBoard {
  static constexpr int most_ranks = 32;
  static constexpr std::uint32_t most_records = 256;
  struct Seat {
    std::atomic<std::uint32_t> steps, live, records;
    std::atomic<double> step_seconds;  ///< of its last step that nothing interrupted
    std::array<RecoveryRecord, most_records> record;
    char error[256];
  };
  std::array<Seat, most_ranks> seats;
  std::atomic<std::uint32_t> last_step;  ///< the group ends with it; 0: not yet
};

/// What a group of processes runs.
struct RecoveryBench {
  const Inputs& inputs;
  LayerOptions options;
  std::string group;
  int grace_ms = 0;
  RecoveryBoard* board = nullptr;
};

double steady_seconds();
/// A rank's process: steps until the group ends.
void run_recovering_rank(const RecoveryBench& bench, int rank, Entry entry);
void add_recovery_flags(CLI::App& command, RecoveryArguments& arguments);
/// Measures, prints a table and gives the JSON (docs/json.md).
nlohmann::ordered_json measure_recovery(const RecoveryArguments& arguments);

}  // namespace heddle::tool
