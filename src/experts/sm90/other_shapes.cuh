// Instructions of the tensor cores that CuTe has only among a thousand other shapes, in a header that takes long to read.
#pragma once

#include <cstdint>

#include <cute/arch/mma_sm90_gmma.hpp>

namespace heddle::sm90 {

/// m64n24k32 of e4m3: A from registers, B from shared memory with K contiguous.
struct TwentyFourTokens {
  __device__ static void fma(std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint64_t tokens,
                             float& d0, float& d1, float& d2, float& d3, float& d4, float& d5, float& d6, float& d7, float& d8,
                             float& d9, float& d10, float& d11, cute::SM90::GMMA::ScaleOut scale) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, "
        "%6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, %16, adds, 1, 1;\n"
        "}\n"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3), "+f"(d4), "+f"(d5), "+f"(d6), "+f"(d7), "+f"(d8), "+f"(d9), "+f"(d10), "+f"(d11)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(tokens), "r"(static_cast<std::int32_t>(scale)));
  }
};

/// m64n48k32 of e4m3: A from registers, B from shared memory with K contiguous.
struct FortyEightTokens {
  __device__ static void fma(std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint64_t tokens,
                             float& d0, float& d1, float& d2, float& d3, float& d4, float& d5, float& d6, float& d7, float& d8,
                             float& d9, float& d10, float& d11, float& d12, float& d13, float& d14, float& d15, float& d16,
                             float& d17, float& d18, float& d19, float& d20, float& d21, float& d22, float& d23,
                             cute::SM90::GMMA::ScaleOut scale) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
        "{%24, %25, %26, %27}, %28, adds, 1, 1;\n"
        "}\n"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3), "+f"(d4), "+f"(d5), "+f"(d6), "+f"(d7), "+f"(d8), "+f"(d9), "+f"(d10), "+f"(d11),
          "+f"(d12), "+f"(d13), "+f"(d14), "+f"(d15), "+f"(d16), "+f"(d17), "+f"(d18), "+f"(d19), "+f"(d20), "+f"(d21), "+f"(d22),
          "+f"(d23)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(tokens), "r"(static_cast<std::int32_t>(scale)));
  }
};

}  // namespace heddle::sm90
