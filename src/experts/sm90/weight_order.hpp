// The order in which expert weights lie in GPU memory: mostly the weights are the M side of the multiply instruction and come
// from registers, so memory holds them as threads will have them in registers. fp8_block alone, whose codes are operands as they
// are, lies in rows, swizzled: so large row blocks have their weights read from shared memory by the tensor cores themselves, and
// registers get them by matrix loads. One source for host and device; docs/weights.md draws it.
//
// A slab is 64 weight rows x one step of K. 128 threads hold it, 16 registers each: with warp w = thread / 32,
// g = thread % 32 / 4, q = thread % 4, register a[4 j + i] belongs to instruction j and to row 16 w + g + 8 (i & 1) of the slab.
// With e4m3 operands it holds the four values k = 32 j + 16 (i >> 1) + 4 q + 0..3 of the step, with bf16 operands the two
// values k = 16 j + 8 (i >> 1) + 2 q + 0..1, the lowest k in the lowest bits.
//
// A tile is up to four slabs. What a tile needs for one step is one chunk: the data of its slabs, then their scales, padded to
// 16 bytes. The chunks of a tile follow each other in ascending step, tiles in ascending order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle::sm90 {

inline constexpr int slab_rows = 64;
inline constexpr int slab_threads = 128;
inline constexpr int slab_registers = 16;
inline constexpr int tile_slabs = 4;
inline constexpr int vector_bytes = 16;
inline constexpr int vector_stride = slab_threads * vector_bytes;  ///< from a thread's vector to its next one

/// 16 bytes that a thread reads at once.
struct alignas(vector_bytes) Vector {
  std::uint32_t word[4];
};

/// What the tensor cores are given.
enum class Operand : std::uint8_t { e4m3, bf16 };

/// The sizes of a slab of one kind.
struct SlabShape {
  Operand operand;
  int step;            ///< columns
  int vectors;         ///< that each thread reads; vector v of thread t at v * vector_stride + t * vector_bytes
  int register_bytes;  ///< stored bytes that become one register
  int scale_bytes;     ///< of a slab, without mxfp4's step exponents
  bool row_scales;     ///< whether there is an f32 factor a weight row beside the chunks (WeightPlan)

  HEDDLE_HOST_DEVICE constexpr int data_bytes() const { return vectors * vector_stride; }
  HEDDLE_HOST_DEVICE constexpr int word_registers() const { return 4 / register_bytes; }
};

HEDDLE_HOST_DEVICE constexpr SlabShape slab_shape(WeightKind kind) {
  switch (kind) {
    case WeightKind::fp8_block:
      return {Operand::e4m3, 128, 4, 4, 2 * 4, false};
    case WeightKind::mxfp4:
      return {Operand::e4m3, 128, 2, 2, slab_rows * 4, true};
    case WeightKind::mxfp8:
      return {Operand::bf16, 64, 2, 2, slab_rows * 2, true};
    case WeightKind::nvfp4:
      return {Operand::bf16, 64, 1, 1, slab_rows * 4, true};
    case WeightKind::bf16:
      break;
  }
  return {Operand::bf16, 64, 4, 4, 0, false};
}

/// Whether a slab's data lies in rows of 128 bytes, swizzled as the tensor cores read them (fp8_block), and not as threads hold it.
HEDDLE_HOST_DEVICE constexpr bool lies_in_rows(WeightKind kind) { return kind == WeightKind::fp8_block; }

/// Where byte `column` of row `row` of such rows is: the 16 bytes number c of a row are number c ^ (row % 8).
HEDDLE_HOST_DEVICE constexpr int swizzled_place(int row, int column) {
  return row * 128 + ((column / 16 ^ row % 8) * 16) + column % 16;
}

/// Whether stored codes become other operands in registers; fp8_block and bf16 are operands as they are.
HEDDLE_HOST_DEVICE constexpr bool is_widened(WeightKind kind) { return slab_shape(kind).register_bytes < 4; }

/// Calls work.operator()<kind>().
template <class Work>
void with_kind(WeightKind kind, const Work& work) {
  switch (kind) {
    case WeightKind::bf16:
      return work.template operator()<WeightKind::bf16>();
    case WeightKind::fp8_block:
      return work.template operator()<WeightKind::fp8_block>();
    case WeightKind::mxfp4:
      return work.template operator()<WeightKind::mxfp4>();
    case WeightKind::nvfp4:
      return work.template operator()<WeightKind::nvfp4>();
    case WeightKind::mxfp8:
      return work.template operator()<WeightKind::mxfp8>();
  }
}

/// The row of the slab that a thread's registers a[i] with i & 1 == half belong to.
HEDDLE_HOST_DEVICE constexpr int slab_row(int thread, int half) { return thread / 32 * 16 + thread % 32 / 4 + 8 * half; }

/// The first column, within the step, of a thread's register.
HEDDLE_HOST_DEVICE constexpr int register_column(Operand operand, int thread, int index) {
  const int instruction = index / 4;
  const int half = index % 4 / 2;
  const int quad = thread % 4;
  return operand == Operand::e4m3 ? 32 * instruction + 16 * half + 4 * quad : 16 * instruction + 8 * half + 2 * quad;
}

/// The register that is number `part` of those a data word holds: a word has one, the two of one row and instruction, or the
/// four of one instruction.
HEDDLE_HOST_DEVICE constexpr int word_register(const SlabShape& shape, int word, int part) {
  switch (shape.word_registers()) {
    case 1:
      return word;
    case 2:
      return word / 2 * 4 + word % 2 + 2 * part;
    default:
      return 4 * word + part;
  }
}

/// One matrix as it lies in memory: what sizes and offsets follow from. All offsets are in bytes.
///
/// Row scales: weight = register value * row_scales[slab row] * (mxfp4 with step_exponents: the step's power of two); for
/// fp8_block, weight = register value * the step's block scale. nvfp4's row scale is 256 * the tensor scale: it belongs into
/// the promotion, acc = fmaf(partial, s_token * row_scale, acc). Those of mxfp4 and mxfp8 are powers of two and may as well be
/// multiplied at the end: the bits are the same.
struct WeightPlan {
  WeightKind kind = WeightKind::bf16;
  /// Gate and up in one: rows of the slab with i & 1 == 0 are gate's, the others the same rows of up, so that a thread has both.
  bool paired = false;
  bool step_exponents = false;  ///< mxfp4: a power of two for each row and step, for rows whose groups differ too much
  int rows = 0;                 ///< gate and up counted both; a multiple of 64
  int cols = 0;                 ///< K, a multiple of 64; what lacks to a multiple of 128 is zeros

  HEDDLE_HOST_DEVICE constexpr SlabShape shape() const { return slab_shape(kind); }
  HEDDLE_HOST_DEVICE constexpr int slabs() const { return rows / slab_rows; }
  HEDDLE_HOST_DEVICE constexpr int tiles() const { return (slabs() + tile_slabs - 1) / tile_slabs; }
  HEDDLE_HOST_DEVICE constexpr int slabs_of(int tile) const {
    const int left = slabs() - tile * tile_slabs;
    return left < tile_slabs ? left : tile_slabs;
  }
  /// Whole promotions of 128 columns: two steps of bf16 operands belong together.
  HEDDLE_HOST_DEVICE constexpr int steps() const { return (cols + 127) / 128 * (128 / shape().step); }

  /// Scale bytes of a slab; the step exponents are the last 64 of them.
  HEDDLE_HOST_DEVICE constexpr int scale_bytes() const { return shape().scale_bytes + (step_exponents ? slab_rows : 0); }
  HEDDLE_HOST_DEVICE constexpr int chunk_bytes_of(int slab_count) const {
    return (slab_count * (shape().data_bytes() + scale_bytes()) + vector_bytes - 1) / vector_bytes * vector_bytes;
  }
  HEDDLE_HOST_DEVICE constexpr int chunk_bytes(int tile) const { return chunk_bytes_of(slabs_of(tile)); }
  HEDDLE_HOST_DEVICE constexpr std::size_t chunk_offset(int tile, int step) const {
    return static_cast<std::size_t>(tile) * static_cast<std::size_t>(steps()) *
               static_cast<std::size_t>(chunk_bytes_of(tile_slabs)) +
           static_cast<std::size_t>(step) * static_cast<std::size_t>(chunk_bytes(tile));
  }
  HEDDLE_HOST_DEVICE constexpr std::size_t bytes() const { return tiles() == 0 ? 0 : chunk_offset(tiles() - 1, steps()); }

  /// Within a chunk, of the tile's slab number `slab`.
  HEDDLE_HOST_DEVICE constexpr int data_offset(int slab) const { return slab * shape().data_bytes(); }
  HEDDLE_HOST_DEVICE constexpr int scales_offset(int slab_count, int slab) const {
    return slab_count * shape().data_bytes() + slab * scale_bytes();
  }

  /// From the first chunk, of slab number `slab` of the matrix.
  HEDDLE_HOST_DEVICE constexpr std::size_t slab_data(int slab, int step) const {
    const int tile = slab / tile_slabs;
    return chunk_offset(tile, step) + static_cast<std::size_t>(data_offset(slab % tile_slabs));
  }
  HEDDLE_HOST_DEVICE constexpr std::size_t slab_scales(int slab, int step) const {
    const int tile = slab / tile_slabs;
    return chunk_offset(tile, step) + static_cast<std::size_t>(scales_offset(slabs_of(tile), slab % tile_slabs));
  }

  /// f32 factors beside the chunks, by slab row (64 * slab + row of the slab); 0 for kinds without.
  HEDDLE_HOST_DEVICE constexpr int row_scales() const { return shape().row_scales ? rows : 0; }

  /// Which of the two stored matrices a slab row comes from, 0 or 1, and its row there.
  HEDDLE_HOST_DEVICE static constexpr int half_of(int row) { return row % 16 / 8; }
  HEDDLE_HOST_DEVICE constexpr int source_row(int row) const {
    return paired ? row / slab_rows * 32 + row % slab_rows / 16 * 8 + row % 8 : row;
  }
};

/// One matrix of every expert, as kernels get it.
struct OrderedMatrix {
  WeightPlan plan;
  const std::byte* chunks = nullptr;  ///< of expert 0, 256-byte aligned
  std::size_t expert_stride = 0;      ///< bytes from an expert's chunks to the next one's, a multiple of 256
  const float* row_scales = nullptr;  ///< [experts, plan.row_scales()]; null where the kind has none

  HEDDLE_HOST_DEVICE const std::byte* chunk(int expert, int tile, int step) const {
    return chunks + static_cast<std::size_t>(expert) * expert_stride + plan.chunk_offset(tile, step);
  }
  HEDDLE_HOST_DEVICE const float* row_scales_of(int expert) const {
    return row_scales + static_cast<std::size_t>(expert) * static_cast<std::size_t>(plan.row_scales());
  }
};

}  // namespace heddle::sm90
