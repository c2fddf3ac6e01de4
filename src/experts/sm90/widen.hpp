// From ordered weights to the registers of the multiply instruction: 16-byte loads, and per kind the few integer operations that
// make operands of stored codes. One source for host and device; weight_words.hpp has the other direction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "experts/sm90/weight_order.hpp"

#if defined(__CUDA_ARCH__)
#define HEDDLE_UNROLL _Pragma("unroll")
#else
#define HEDDLE_UNROLL
#endif

namespace heddle::sm90 {

namespace detail {

/// Four bytes out of the eight of (low, high), chosen by the selector's four low nibbles, whose highest bits are zero. (The
/// intrinsic masks them off once more, which costs an operation.)
HEDDLE_HOST_DEVICE inline std::uint32_t byte_permute(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t index = selector >> (4 * i) & 7u;
    result |= static_cast<std::uint32_t>(bytes >> (8 * index) & 0xFFu) << (8 * i);
  }
  return result;
#endif
}

/// Two bf16 products at once.
HEDDLE_HOST_DEVICE inline std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  const auto half = [](std::uint32_t pair, int index) { return bf16{static_cast<std::uint16_t>(pair >> (16 * index))}; };
  const std::uint32_t low = to_bf16(to_float(half(a, 0)) * to_float(half(b, 0))).bits;
  const std::uint32_t high = to_bf16(to_float(half(a, 1)) * to_float(half(b, 1))).bits;
  return high << 16 | low;
#endif
}

/// One T at an address that is aligned for it.
template <class T>
HEDDLE_HOST_DEVICE inline T load(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const T*>(from);
#else
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
#endif
}

struct alignas(8) Words {
  std::uint32_t word[2];
};

/// The data words of a thread, first vector first.
template <WeightKind kind>
HEDDLE_HOST_DEVICE inline void load_words(const std::byte* data, int thread, std::uint32_t (&words)[4 * slab_shape(kind).vectors]) {
  HEDDLE_UNROLL
  for (int v = 0; v < slab_shape(kind).vectors; ++v) {
    const Vector vector = load<Vector>(data + v * vector_stride + thread * vector_bytes);
    HEDDLE_UNROLL
    for (int i = 0; i < 4; ++i) words[4 * v + i] = vector.word[i];
  }
}

/// The registers of a slab that lies in rows: on the GPU by matrix loads, which want shared memory and a whole warp.
HEDDLE_HOST_DEVICE inline void load_rows(const std::byte* data, int thread, std::uint32_t (&a)[slab_registers]) {
#if defined(__CUDA_ARCH__)
  const int row = thread / 32 * 16 + thread % 16;
  const int second = thread % 32 / 16;  // of the two halves of an instruction's columns
  const auto begin = static_cast<std::uint32_t>(__cvta_generic_to_shared(data + row * 128));
  HEDDLE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t from = begin + static_cast<std::uint32_t>(((2 * j + second) ^ row % 8) * 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[4 * j]), "=r"(a[4 * j + 1]), "=r"(a[4 * j + 2]), "=r"(a[4 * j + 3])
                 : "r"(from));
  }
#else
  for (int index = 0; index < slab_registers; ++index) {
    const int column = register_column(Operand::e4m3, thread, index);
    a[index] = load<std::uint32_t>(data + swizzled_place(slab_row(thread, index % 2), column));
  }
#endif
}

/// Eight e2m1 magnitudes select bytes of a table of e4m3 codes that the delta byte d makes: m * 2^(d - 6). The table's byte for
/// zero is zero under every d, so groups of zeros may have any. One vector of words makes the eight registers `a` of two
/// instructions; what does not hang on each other stands side by side, since one warp alone has to keep the pipes busy.
HEDDLE_HOST_DEVICE inline void widen_mxfp4(const Vector& words, std::uint32_t deltas, std::uint32_t* a) {
  std::uint32_t low[4];
  std::uint32_t high[4];
  std::uint32_t first[4];   // magnitudes of the first four codes: the permute looks at the lower half
  std::uint32_t second[4];  // and of the other four
  HEDDLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t delta = byte_permute(deltas, 0, 0x4440u + static_cast<std::uint32_t>(i));
    low[i] = 0x0C080000u + delta * 0x08080800u;
    high[i] = 0x1C181410u + delta * 0x08080808u;
    first[i] = words.word[i] & 0x77777777u;
    second[i] = first[i] >> 16;
  }
  HEDDLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t word = words.word[i];
    const int at = i / 2 * 4 + i % 2;
    a[at] = byte_permute(low[i], high[i], first[i]) | (word & 0x80808080u);
    a[at + 2] = byte_permute(low[i], high[i], second[i]) | ((word << 4) & 0x80808080u);
  }
}

/// The bits of an e4m3 code moved into a bf16 are its value * 2^-120, subnormals included. The scale byte e is the exponent field
/// of a bf16 power of two that makes up for it: value * 2^(e - 247).
HEDDLE_HOST_DEVICE inline void widen_mxfp8(const std::uint32_t (&words)[8], std::uint32_t scales,
                                           std::uint32_t (&a)[slab_registers]) {
  HEDDLE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t byte = static_cast<std::uint32_t>(i / 4 * 2 + i % 2);  // two instructions share a group of 32
    const std::uint32_t factor = byte_permute(scales, 0, 0x0404u | byte << 4 | byte << 12) >> 1;
    const std::uint32_t word = words[i];
    const int first = i / 2 * 4 + i % 2;
    a[first] = multiply_pairs(word & 0x87F087F0u, factor);
    a[first + 2] = multiply_pairs(((word << 4) & 0x80F080F0u) | ((word >> 4) & 0x07000700u), factor);
  }
}

/// e2m1 bits in a bf16 are value * 2^-126, the scale's e4m3 bits scale * 2^-120; the latter is raised by 2^238 in two steps. So a
/// register holds value * scale * 2^-8, exactly, and the row scale has the 2^8.
HEDDLE_HOST_DEVICE inline void widen_nvfp4(const std::uint32_t (&words)[4], const Words& scales,
                                           std::uint32_t (&a)[slab_registers]) {
  constexpr std::uint32_t two_to_127 = 0x7F007F00u;
  constexpr std::uint32_t two_to_111 = 0x77007700u;
  HEDDLE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t four = scales.word[j / 2];
    const std::uint32_t bits = (j % 2 == 0 ? four << 4 : four >> 4) & 0x07F007F0u;  // of both rows
    const std::uint32_t both = multiply_pairs(multiply_pairs(bits, two_to_127), two_to_111);
    const std::uint32_t low = byte_permute(both, 0, 0x1010u);
    const std::uint32_t high = byte_permute(both, 0, 0x3232u);
    const std::uint32_t word = words[j];
    a[4 * j] = multiply_pairs(word & 0x81C081C0u, low);
    a[4 * j + 1] = multiply_pairs((word << 3) & 0x81C081C0u, high);
    a[4 * j + 2] = multiply_pairs(((word << 6) & 0x01C001C0u) | ((word << 1) & 0x80008000u), low);
    a[4 * j + 3] = multiply_pairs(((word >> 3) & 0x01C001C0u) | ((word << 2) & 0x80008000u), high);
  }
}

}  // namespace detail

/// A thread's registers of one slab. `data` is the slab's data (16-byte aligned), `scales` its scales (WeightPlan::scales_offset;
/// 8-byte aligned), in shared memory on a GPU; all threads of a warp load together. What the registers mean: WeightPlan. fp8_block
/// and bf16 do not read the scales.
template <WeightKind kind>
HEDDLE_HOST_DEVICE inline void load_slab(const std::byte* data, const std::byte* scales, int thread,
                                         std::uint32_t (&a)[slab_registers]) {
  const int row_group = thread / 4;  // warp * 8 + g: the threads that share two rows
  if constexpr (lies_in_rows(kind)) {
    detail::load_rows(data, thread, a);
  } else if constexpr (kind == WeightKind::bf16) {
    detail::load_words<kind>(data, thread, a);
  } else if constexpr (kind == WeightKind::mxfp4) {
    const auto deltas = detail::load<detail::Words>(scales + row_group * 8);
    HEDDLE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto words = detail::load<Vector>(data + half * vector_stride + thread * vector_bytes);
      detail::widen_mxfp4(words, deltas.word[half], a + 8 * half);
    }
  } else {
    std::uint32_t words[4 * slab_shape(kind).vectors];
    detail::load_words<kind>(data, thread, words);
    if constexpr (kind == WeightKind::mxfp8) {
      detail::widen_mxfp8(words, detail::load<std::uint32_t>(scales + row_group * 4), a);
    } else {
      detail::widen_nvfp4(words, detail::load<detail::Words>(scales + row_group * 8), a);
    }
  }
}

/// Factors of a thread's two rows: that of registers with i & 1 == 0, and of the others.
struct RowPair {
  float low;
  float high;
};

/// fp8_block: the block scales of the step, the same for all threads.
HEDDLE_HOST_DEVICE inline RowPair block_scales(const std::byte* scales) {
  const auto words = detail::load<detail::Words>(scales);
  return {float_from_bits(words.word[0]), float_from_bits(words.word[1])};
}

/// mxfp4 with step exponents: powers of two that the step's partial sums are multiplied by in the promotion.
HEDDLE_HOST_DEVICE inline RowPair step_factors(const std::byte* scales, int thread) {
  const std::uint32_t both = detail::load<std::uint16_t>(scales + slab_shape(WeightKind::mxfp4).scale_bytes + thread / 4 * 2);
  return {float_from_bits((both & 0xFFu) << 23), float_from_bits((both >> 8) << 23)};
}

}  // namespace heddle::sm90
