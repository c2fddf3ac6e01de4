// heddle bench balance: a layer whose placement follows uneven load, call by call: what calls take before, during and after a
// change, and what the change itself takes (docs/balancing.md, "On GPUs").
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "inputs.hpp"
#include "json_file.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

struct BalanceArguments {
  LayerArguments layer;
  std::vector<int> sizes{64};                    ///< tokens a rank
  std::vector<std::string> ways{"low_latency"};  ///< one layer each
  std::optional<int> extra;                      ///< copies beside one of each expert; default: four a rank
  std::optional<int> staged;                     ///< experts that can come to a rank at once; default: all
  int changes = 2;                               ///< of the load
  int calls = 64;                                ///< between looks at the load, and behind a change
  int copy_mb = 64;                              ///< MiB of weights that a GPU sends between two calls
  int calls_ahead = 4;
  std::string json, commit;
};

void add_balance_flags(CLI::App& command, BalanceArguments& arguments);
/// Everything that can be said before anything runs. Throws InputError.
void check_arguments(const BalanceArguments& arguments);
int extra_of(const BalanceArguments& arguments);

/// Before each change of the load, so that its own calls are not the first.
constexpr int warm_calls = 4;

/// One call, and how things stood behind it.
struct BalanceCall {
  double call_us = 0;     ///< on the GPU where it took longest
  double between_us = 0;  ///< until the next call could begin there
  double follow_us = 0;   ///< of the host, behind it
  bool is_moving = false;
  std::int64_t switches = 0, looks = 0;
};

/// Calls of one load, numbered from 0, in which the placement changed once.
struct BalancePhases {
  std::size_t decided = 0;   ///< behind this call the change began
  std::size_t switched = 0;  ///< behind this one the last of its switches came
  std::size_t end = 0;       ///< the first call behind which another change began, or all calls
};
/// Empty: there was no change, or there is no call behind it.
std::optional<BalancePhases> phases_of(std::span<const BalanceCall> calls);

/// Rows of ranks under a placement.
struct RankRows {
  std::int64_t busiest = 0;
  double over_mean = 0;
};

/// What is known of a change beside its calls.
struct BalanceChange {
  std::int64_t experts = 0;          ///< that came to ranks
  std::vector<double> sent_bytes;    ///< a GPU
  std::vector<double> sent_seconds;  ///< a GPU: in which copies were under way
  double decision_to_switch_us = 0;  ///< on the calls' streams, the switch included
  RankRows before, after;
};

/// The calls of a load without the change, if there was none.
nlohmann::ordered_json balance_calls(std::span<const BalanceCall> calls);
/// What a line says of a change (docs/json.md), to be added to what every line says of itself.
nlohmann::ordered_json balance_entry(std::span<const BalanceCall> calls, const BalancePhases& phases, const BalanceChange& change);
/// A line of the table, of an entry with or without a change.
std::string balance_line(const nlohmann::ordered_json& entry);
std::string balance_title();

/// Measures and gives the JSON (docs/json.md); `save` is called with it as it grows. `status` becomes 1 where outputs are wrong.
/// Throws InputError in a build without CUDA.
nlohmann::ordered_json measure_balance(const BalanceArguments& arguments, const SaveJson& save, int& status);

}  // namespace heddle::tool
