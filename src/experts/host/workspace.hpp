// What a calling thread keeps from call to call.
#pragma once

#include <vector>

#include "experts/host/gemm.hpp"
#include "experts/host/operand.hpp"
#include "experts/host/pairs.hpp"
#include "experts/host/scratch.hpp"

namespace heddle {

struct ExpertWorkspace {
  PairList pairs;
  TileEngine engine;
  Operand operand;
  Scratch<bf16> gate_up;         // [pairs, 2 D]
  Scratch<std::byte> activated;  // [pairs, D] e4m3 or bf16
  Scratch<std::byte> scales;     // [pairs, groups]
  Scratch<bf16> results;         // [pairs, H], where they are summed here
  std::vector<int> pair_of;      // [tokens, topk]: the pair of a choice, -1 without one
  Scratch<float> sum;            // [H]
  Scratch<float> wide;           // [H]
};

inline ExpertWorkspace& expert_workspace() {
  thread_local ExpertWorkspace workspace;
  return workspace;
}

}  // namespace heddle
