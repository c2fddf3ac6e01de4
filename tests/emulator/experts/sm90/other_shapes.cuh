// In the place of the instructions that CuTe lacks.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

namespace heddle::sm90 {
struct TwentyFourTokens : emulator::Multiply<true, 24> {};
struct FortyEightTokens : emulator::Multiply<true, 48> {};
}  // namespace heddle::sm90
