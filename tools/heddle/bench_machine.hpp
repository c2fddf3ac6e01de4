// What every benchmark on GPUs tells: which they are and how they are set; and how a run is saved, however it ends.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_replay.hpp"
#include "heddle/error.hpp"
#include "json_file.hpp"
#include "provenance.hpp"

namespace heddle::tool {

/// The first `gpus` GPUs of this machine. gpus 0: all, at most one a rank; ranks 0: one a GPU; both are then what they mean. Throws
/// InputError, for lack of a GPU in the name of `heddle bench <benchmark>`.
std::vector<int> devices_for(const char* benchmark, int& ranks, int& gpus);

/// Name, number of GPUs and SMs, versions, and clocks and limits as the driver's management library tells them, if it is there.
nlohmann::ordered_json machine_of(const Lanes& lanes);

/// Where the lanes did not come to an end: saves with what was under way as the failure, says so, and ends the process. Memory
/// that a kernel still uses cannot be given back, so nothing less would end.
[[noreturn]] void end_of_patience(const std::string& under_way, const Lanes& lanes,
                                  const std::function<void(const std::string& failed)>& save);

/// All of a run that has under_way(), all(save, give_up) and json(). `save` gets that as it grows, and at last whole, as it is
/// returned, or with what it `failed` with. Errors name the configuration, too, except those of what was asked for.
template <class Run>
nlohmann::ordered_json run_and_save(Run& run, const Lanes& lanes, const SaveJson& save) {
  const std::function<void(const std::string&)> save_failed = [&](const std::string& message) {
    nlohmann::ordered_json object = run.json();
    object["failed"] = message;
    save(object);
  };
  try {
    run.all([&] { save(run.json()); }, [&] { end_of_patience(run.under_way(), lanes, save_failed); });
  } catch (const InputError& error) {
    save_failed(error.what());
    throw;
  } catch (const Error& error) {  // which says what was waited for, but not in which configuration
    const std::string message = run.under_way() + ": " + error.what();
    save_failed(message);
    throw Error(error.kind(), message);
  }
  const nlohmann::ordered_json whole = run.json();
  save(whole);
  return whole;
}

/// Likewise, to `path` (nowhere if empty).
template <class Run>
nlohmann::ordered_json run_and_save(Run& run, const Lanes& lanes, const std::string& path) {
  return run_and_save(run, lanes, saved_at(path));
}

}  // namespace heddle::tool
