// heddle bench step: the layers of a model one after the other, as a decode step calls them, with gaps where attention would be
// (exchange-ways article, section 8.4; fused-kernel article, section 6.3).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "inputs.hpp"
#include "json_file.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

struct StepArguments {
  LayerArguments layer;
  std::optional<int> layers;               ///< default: the preset's
  std::vector<int> gaps{0, 50, 100, 200};  ///< microseconds a layer
  std::vector<int> sizes{64};              ///< tokens a rank
  std::vector<std::string> ways;           ///< empty: all that the engine has
  int replays = 10;
  std::string json, commit;
};

void add_step_flags(CLI::App& command, StepArguments& arguments);
/// Everything that can be said before anything runs. Throws InputError.
void check_arguments(const StepArguments& arguments);
int layers_of(const StepArguments& arguments);
/// Those asked for, or all.
std::vector<std::string> ways_of(const StepArguments& arguments);

/// The distinct layers that the calls of a step go through in turn: more would take more memory and show nothing else.
constexpr int most_distinct_layers = 4;

/// What one way took at one size with one gap, microseconds: whole steps, and the gaps of a step by themselves.
struct StepSamples {
  std::vector<double> steps, gaps;
};
/// The entry of a line that was measured, which this prints too.
nlohmann::ordered_json step_entry(const nlohmann::ordered_json& line, const StepSamples& samples, int layers);
/// What every line says of itself: way, tokens, gap_us.
nlohmann::ordered_json step_line(const std::string& way, int tokens, int gap);
void print_step_title();

/// Measures and gives the JSON (docs/json.md); `save` is called with it as it grows. `status` becomes 1 where outputs are wrong.
nlohmann::ordered_json step_on_host(const StepArguments& arguments, const SaveJson& save);
/// Throws InputError in a build without CUDA.
nlohmann::ordered_json step_on_gpus(const StepArguments& arguments, const SaveJson& save, int& status);
nlohmann::ordered_json measure_step(const StepArguments& arguments, const SaveJson& save, int& status);

}  // namespace heddle::tool
