// What was typed behind `heddle bench experts`, and what it means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench_experts_bed.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

struct ExpertsArguments {
  std::vector<std::string> shapes{"v4_flash", "v3"};
  std::vector<std::string> weights{"fp8_block", "mxfp4", "bf16", "nvfp4", "mxfp8"};
  std::vector<std::string> products{"gemm1", "fused", "gemm2"};
  std::vector<std::string> blocks{"small", "medium", "large"};  ///< those that the kind has
  std::vector<std::string> peers{"cublaslt", "cutlass"};
  std::vector<int> rows{1, 4, 12, 24, 48, 96, 192, 1536};
  std::vector<int> touched;  ///< experts with rows; empty: all
  std::vector<int> ctas;     ///< empty: one a SM
  int experts = 32;
  std::string trace;
  int trace_layer = 0, trace_step = 0, trace_expand = 1;
  std::vector<int> tokens{64, 384};
  bool gather = false;  ///< rows one by one, as where a list names them
  int calls = 10, replays = 20;
  std::string json, commit;
  std::uint64_t seed = 1;
  int deadline_ms = 10000;
};

void add_experts_flags(CLI::App& command, ExpertsArguments& a);

/// Sizes of a layer.
struct ExpertsShape {
  std::string name;
  int hidden = 0;
  int intermediate = 0;
};

/// v4_flash, v3, or HIDDENxINTERMEDIATE in multiples of 128. Throws InputError.
ExpertsShape shape_of(const std::string& word);
/// The rows of the experts, a case each: so many in every expert, or in the first few, or as recorded. Throws InputError.
std::vector<RowCounts> counts_of(const ExpertsArguments& a);
/// Everything that can be said before a GPU is asked. Throws InputError.
void check_arguments(const ExpertsArguments& a);

/// Rows an expert on average, by which the engine's rule picks row blocks.
int average_rows(const RowCounts& counts);

}  // namespace heddle::tool
