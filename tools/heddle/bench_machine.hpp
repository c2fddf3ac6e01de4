// What every benchmark tells: where and when it ran, what its samples say, a line of a table at once.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_replay.hpp"
#include "heddle/error.hpp"
#include "json_file.hpp"

namespace heddle::tool {

/// The first `gpus` GPUs of this machine. gpus 0: all, at most one a rank; ranks 0: one a GPU; both are then what they mean. Throws
/// InputError, for lack of a GPU in the name of `heddle bench <benchmark>`.
std::vector<int> devices_for(const char* benchmark, int& ranks, int& gpus);

/// Name, number of GPUs and SMs, versions, and clocks and limits as the driver's management library tells them, if it is there.
nlohmann::ordered_json machine_of(const Lanes& lanes);
std::string now_in_utc();
/// This process's command line, as typed.
std::string command_line();

/// median_us, least_us, most_us and samples_us of samples in microseconds.
nlohmann::ordered_json summary(const std::vector<double>& samples);
void print_line(const std::string& line);

/// Where the lanes did not come to an end: saves with what was under way as the failure, says so, and ends the process. Memory
/// that a kernel still uses cannot be given back, so nothing less would end.
[[noreturn]] void end_of_patience(const std::string& under_way, const Lanes& lanes,
                                  const std::function<void(const std::string& failed)>& save);

/// All of a run that has json(), under_way() and all(save, give_up). Its JSON goes to `path` (nowhere if empty) as it grows, and
/// says at last what it failed with. Errors name the configuration, too, except those of what was asked for.
template <class Run>
void run_and_save(Run& run, const Lanes& lanes, const std::string& path) {
  const auto save = [&](const std::string& failed) {
    if (path.empty()) return;
    nlohmann::ordered_json object = run.json();
    if (!failed.empty()) object["failed"] = failed;
    write_json(path, object);
  };
  const auto give_up = [&] { end_of_patience(run.under_way(), lanes, save); };
  try {
    run.all([&] { save(""); }, give_up);
  } catch (const InputError& error) {
    save(error.what());
    throw;
  } catch (const Error& error) {  // which says what was waited for, but not in which configuration
    const std::string message = run.under_way() + ": " + error.what();
    save(message);
    throw Error(error.kind(), message);
  }
  save("");
}

}  // namespace heddle::tool
