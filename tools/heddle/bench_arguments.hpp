// What was typed behind `heddle bench exchange`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace heddle::tool {

struct BenchArguments {
  int ranks = 0, gpus = 0, experts = 64, topk = 6, sms = 0, round_trips = 10, replays = 40;
  std::vector<int> hidden{4096};
  std::vector<int> tokens{1, 8, 64, 128, 512, 4096};
  std::vector<std::string> ways{"gather", "normal", "low_latency", "elastic", "one_sided", "nccl"};
  std::vector<std::string> wires{"bf16", "fp8"};
  std::vector<std::string> combine_wires{"bf16"};
  std::string routing = "uniform", trace;
  int trace_layer = 0, trace_step = 0, trace_expand = 1;
  std::vector<int> sweep;                    ///< CTAs a GPU to try; empty: no sweep
  std::vector<int> overlap;                  ///< microseconds of other work between the halves; empty: no such study
  std::vector<int> overlap_sms{16};          ///< SMs that the halves are given there
  int work_sms = 0;                          ///< SMs of the other work; 0: those that the halves leave
  std::vector<int> bulk{0};                  ///< least bytes of rows that go by bulk copies; 0: none
  std::vector<int> tagged{0};                ///< most tokens of gather whose rows travel as words; 0: none
  std::vector<std::string> counters{"off"};  ///< are calls counted? off, on, or both in turn
  bool layout_cost = false;
  std::string json, commit;
  std::uint64_t seed = 1;
  int deadline_ms = 10000;
};

void add_exchange_flags(CLI::App& command, BenchArguments& arguments);
/// Everything that can be said before a GPU is asked. Throws InputError.
void check_arguments(const BenchArguments& arguments);

}  // namespace heddle::tool
