// One instruction group of the tensor cores: a slab's registers times the tokens of a stage, or tokens times weights that lie in
// rows.
#pragma once

#include <cstdint>
#include <utility>

#include <cute/arch/mma_sm90_gmma.hpp>

#include "experts/sm90/other_shapes.cuh"
#include "experts/sm90/tile.hpp"

namespace heddle::sm90 {

namespace gmma = cute::SM90::GMMA;

/// m64 x tokens x 32 bytes of K: A from registers, B from shared memory with K contiguous.
template <Operand operand, int tokens>
struct Instruction;
template <>
struct Instruction<Operand::e4m3, 8> : gmma::MMA_64x8x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Instruction<Operand::e4m3, 16> : gmma::MMA_64x16x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Instruction<Operand::e4m3, 24> : TwentyFourTokens {};
template <>
struct Instruction<Operand::e4m3, 32> : gmma::MMA_64x32x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Instruction<Operand::e4m3, 48> : FortyEightTokens {};
template <>
struct Instruction<Operand::e4m3, 64> : gmma::MMA_64x64x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Instruction<Operand::bf16, 8> : gmma::MMA_64x8x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K> {};
template <>
struct Instruction<Operand::bf16, 16> : gmma::MMA_64x16x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K> {};
template <>
struct Instruction<Operand::bf16, 32> : gmma::MMA_64x32x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K> {};
template <>
struct Instruction<Operand::bf16, 64> : gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K> {};
template <>
struct Instruction<Operand::bf16, 96> : gmma::MMA_64x96x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K> {};

/// m64 x 128 x 32 bytes of K, e4m3, both from shared memory with K contiguous: of large row blocks, tokens first.
struct SharedInstruction : gmma::MMA_64x128x32_F32E4M3E4M3_SS_TN<> {};

/// Instructions of a panel: 128 bytes of K.
inline constexpr int instructions_a_panel = 4;

/// A panel of tokens, or of weights that lie in rows, for the tensor cores: rows of 128 bytes, swizzled, 8 of them 1024 bytes apart
/// from the next 8.
__device__ inline std::uint64_t panel_descriptor(const std::byte* panel) {
  constexpr std::uint64_t swizzle_128_bytes = 1;
  const std::uint64_t address = cute::cast_smem_ptr_to_uint(panel);  // of at most 18 bits
  return address >> 4 | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 | swizzle_128_bytes << 62;
}

namespace detail {
template <class Instruction, std::size_t... index>
__device__ inline void issue(float* partial, const std::uint32_t* a, std::uint64_t tokens, gmma::ScaleOut scale,
                             std::index_sequence<index...>) {
  Instruction::fma(a[0], a[1], a[2], a[3], tokens, partial[index]..., scale);
}
template <std::size_t... index>
__device__ inline void issue_shared(float* partial, std::uint64_t tokens, std::uint64_t weights, gmma::ScaleOut scale,
                                    std::index_sequence<index...>) {
  SharedInstruction::fma(tokens, weights, partial[index]..., scale);
}
}  // namespace detail

/// Starts instruction `which` of a panel: partial = (fresh ? 0 : partial) + weights x tokens. All of a warpgroup.
template <Operand operand, int tokens>
__device__ inline void multiply_part(float (&partial)[tokens / 2], const std::uint32_t (&a)[16], int which, std::uint64_t panel,
                                     bool fresh) {
  constexpr int bytes_of_k = panel_bytes / instructions_a_panel;
  detail::issue<Instruction<operand, tokens>>(partial, a + 4 * which, panel + static_cast<std::uint64_t>(which * bytes_of_k >> 4),
                                              fresh ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
                                              std::make_index_sequence<tokens / 2>{});
}

/// Starts instruction `which` of two panels: partial = (fresh ? 0 : partial) + tokens x weights. All of a warpgroup.
__device__ inline void multiply_panels(float (&partial)[64], std::uint64_t tokens, std::uint64_t weights, int which, bool fresh) {
  const auto ahead = static_cast<std::uint64_t>(which * (panel_bytes / instructions_a_panel) >> 4);
  detail::issue_shared(partial, tokens + ahead, weights + ahead, fresh ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
                       std::make_index_sequence<64>{});
}

/// The registers of products under way are not to be touched by the compiler on either side of this.
template <int count>
__device__ inline void hold(float (&registers)[count]) {
#pragma unroll
  for (float& value : registers) cute::warpgroup_fence_operand(value);
}
template <int count>
__device__ inline void hold(std::uint32_t (&registers)[count]) {
#pragma unroll
  for (std::uint32_t& value : registers) cute::warpgroup_fence_operand(value);
}

}  // namespace heddle::sm90
