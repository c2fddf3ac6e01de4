// In the place of the instruction that CuTe lacks.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

namespace heddle::sm90 {
struct TwentyFourTokens : emulator::Multiply<true, 24> {};
}  // namespace heddle::sm90
