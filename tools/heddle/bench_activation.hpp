// heddle bench activation: the activation step between the GEMMs on one GPU, by grid, size and state of the L2.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_memory.hpp"
#include "bench_replay.hpp"
#include "experts/activation/device.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

/// What was typed behind `heddle bench activation`.
struct ActivationArguments {
  std::vector<int> tokens{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};  ///< a GPU: b
  std::vector<int> rows{384, 3072, 49152};
  std::vector<std::string> grids{"padded", "persistent", "fixed"};
  std::vector<std::string> l2{"warm", "cold"};
  std::vector<int> empty_ctas{1056, 4096, 8192, 16384, 24576, 65536};
  int experts = 32, ranks = 8, topk = 8, cap = 1024, intermediate = 2048, group = 128;
  std::string format = "fp8", scale = "ue8m0", order = "row", clamp = "none";
  bool no_weights = false, ahead = false;
  int replays = 40, launches = 50;
  std::string json, commit;
  std::uint64_t seed = 1;
};

void add_activation_flags(CLI::App& command, ActivationArguments& a);
/// Everything that can be said before a GPU is asked. Throws InputError.
void check_arguments(const ActivationArguments& a);

/// One run: a line of a table and an entry of the JSON for every size, grid and state of the L2.
class ActivationRun {
 public:
  ActivationRun(const ActivationArguments& a, Lanes& lanes);

  void all();
  nlohmann::ordered_json json() const;

 private:
  /// Counts of `rows` rows dealt to the experts by chance, and how many steps of that size fit beside each other.
  struct Size {
    int rows = 0, tokens = 0, largest = 0, sets = 1;
  };

  void measure_ceiling();
  void measure_empty_ctas();
  void measure(const Size& size, DeviceGrid grid, bool cold);
  Size deal(int rows, int tokens);
  /// Step `set` of a size: the same counts, other rows of the buffers.
  DeviceActivation step(const Size& size, int set) const;
  std::vector<double> time(int launches, const std::function<void(int)>& launch, bool cold);
  double bytes_of(int rows) const;
  int block_rows() const { return a_.cap * a_.ranks; }

  const ActivationArguments& a_;
  Lanes& lanes_;
  DeviceActivation whole_;
  Block gate_up_, weights_, counts_, values_, scales_, flush_;
  std::size_t l2_bytes_ = 0;
  double copy_rate_ = 0, nothing_us_ = 0, empty_cta_ns_ = 0;
  int slots_ = 0;
  nlohmann::ordered_json machine_, empty_ = nlohmann::ordered_json::array(), rows_ = nlohmann::ordered_json::array();
};

}  // namespace heddle::tool
