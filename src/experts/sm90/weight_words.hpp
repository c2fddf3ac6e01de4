// Stored codes to ordered data words and back: pure functions that the host's loop and the GPU's kernel share. A word is the stored
// bytes of the registers it becomes, one after the other, with its bits arranged so that widening takes few operations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/weight_order.hpp"
#include "heddle/formats.hpp"

namespace heddle::sm90 {

/// A stored weight matrix, or a part of one: row r's codes begin at values + r * value_pitch; its scales, or those of its 128 rows
/// (fp8_block), at scales + r * scale_pitch or r / 128 * scale_pitch. Pitches are in bytes; nothing needs to be aligned.
template <class Byte>
struct StoredBytes {
  ScaleFormat block_scale = ScaleFormat::f32;
  float tensor_scale = 1.0f;
  Byte* values = nullptr;
  std::size_t value_pitch = 0;
  Byte* scales = nullptr;
  std::size_t scale_pitch = 0;
  int first_row = 0;  ///< where the part begins in its matrix, for messages
  int first_col = 0;
};
using StoredMatrix = StoredBytes<const std::byte>;

/// What one ordered matrix is made of: gate and up where rows are paired, otherwise one matrix twice.
template <class Byte>
struct StoredHalves {
  StoredBytes<Byte> half[2];
};
using WeightSource = StoredHalves<const std::byte>;
/// Where read-back writes to.
using WeightTarget = StoredHalves<std::byte>;

HEDDLE_HOST_DEVICE constexpr int value_bits(WeightKind kind) {
  return kind == WeightKind::bf16 ? 16 : kind == WeightKind::mxfp4 || kind == WeightKind::nvfp4 ? 4 : 8;
}

namespace detail {

/// The two orders of the bits of a word, as pairs of places: a stored bit goes to an arranged one.
/// mxfp4: eight nibbles. Magnitudes stay: of both halves of the word they are the selectors of a byte permute. Signs
/// move to where the result has them, bit 7 of each byte: of the low half to the odd nibbles, of the high half to the even ones.
HEDDLE_HOST_DEVICE constexpr int arranged_bit_mxfp4(int bit) {
  const int nibble = bit / 4;
  if (bit % 4 != 3) return bit;
  return nibble < 4 ? 8 * nibble + 7 : 8 * (nibble - 4) + 3;
}

/// mxfp8: bytes 0 and 1 are the two values of the first register, 2 and 3 those of the second. In each half of the word the first
/// register's value has the bits that a bf16 has them in (sign 15, the rest from 4 up); the second's fill what is left.
HEDDLE_HOST_DEVICE constexpr int arranged_bit_mxfp8(int bit) {
  const int value = bit / 8 % 2;
  const int place = bit % 8;
  const bool first = bit < 16;
  if (place == 7) return 16 * value + (first ? 15 : 11);
  if (first) return 16 * value + 4 + place;
  return 16 * value + (place < 4 ? place : place + 8);
}

/// nvfp4: byte r is register r, its low nibble the lower column, which goes to the low half of the word. Register 0 has the bits of
/// a bf16 (sign 15, magnitude from 6 up).
HEDDLE_HOST_DEVICE constexpr int arranged_bit_nvfp4(int bit) {
  constexpr int sign[] = {15, 12, 14, 13};
  constexpr int magnitude[] = {6, 3, 0, 9};
  const int part = bit / 8;
  const int value = bit / 4 % 2;
  return 16 * value + (bit % 4 == 3 ? sign[part] : magnitude[part] + bit % 4);
}

HEDDLE_HOST_DEVICE constexpr int arranged_bit(WeightKind kind, int bit) {
  switch (kind) {
    case WeightKind::mxfp4:
      return arranged_bit_mxfp4(bit);
    case WeightKind::mxfp8:
      return arranged_bit_mxfp8(bit);
    case WeightKind::nvfp4:
      return arranged_bit_nvfp4(bit);
    default:
      return bit;
  }
}

HEDDLE_HOST_DEVICE constexpr std::uint32_t arrange(WeightKind kind, std::uint32_t stored) {
  std::uint32_t word = 0;
  for (int bit = 0; bit < 32; ++bit) word |= (stored >> bit & 1u) << arranged_bit(kind, bit);
  return word;
}

HEDDLE_HOST_DEVICE constexpr std::uint32_t restore(WeightKind kind, std::uint32_t word) {
  std::uint32_t stored = 0;
  for (int bit = 0; bit < 32; ++bit) stored |= (word >> arranged_bit(kind, bit) & 1u) << bit;
  return stored;
}

/// Where four bytes lie that stay together: in which matrix, at which offset. Columns past the end are no bytes.
struct RegisterPlace {
  int half;
  int row;
  int column;
};

HEDDLE_HOST_DEVICE constexpr RegisterPlace register_place(const WeightPlan& plan, int slab, int step, int thread, int index) {
  const int row = slab * slab_rows + slab_row(thread, index % 2);
  const SlabShape shape = plan.shape();
  return {WeightPlan::half_of(row), plan.source_row(row), step * shape.step + register_column(shape.operand, thread, index)};
}

/// Likewise of part `part` of data word `word` of a thread: of a register that it becomes or, where data lies in rows, of the
/// word's own four bytes.
HEDDLE_HOST_DEVICE constexpr RegisterPlace word_place(const WeightPlan& plan, int slab, int step, int thread, int word, int part) {
  const SlabShape shape = plan.shape();
  if (!lies_in_rows(plan.kind)) return register_place(plan, slab, step, thread, word_register(shape, word, part));
  const int offset = word / 4 * vector_stride + thread * vector_bytes + word % 4 * 4;
  const int within = offset / 128;
  const int row = slab * slab_rows + within;
  const int column = (offset / 16 % 8 ^ within % 8) * 16 + offset % 16;
  return {WeightPlan::half_of(row), plan.source_row(row), step * shape.step + column};
}

template <class Byte>
HEDDLE_HOST_DEVICE inline Byte* bytes_at(const StoredHalves<Byte>& stored, WeightKind kind, const RegisterPlace& place) {
  const StoredBytes<Byte>& matrix = stored.half[place.half];
  return matrix.values + static_cast<std::size_t>(place.row) * matrix.value_pitch +
         static_cast<std::size_t>(place.column) * static_cast<std::size_t>(value_bits(kind)) / 8;
}

}  // namespace detail

/// Data word `word` of a thread in one slab and step; columns past the end are zeros.
template <WeightKind kind>
HEDDLE_HOST_DEVICE inline std::uint32_t ordered_word(const WeightPlan& plan, const WeightSource& source, int slab, int step,
                                                     int thread, int word) {
  constexpr SlabShape shape = slab_shape(kind);
  std::uint32_t stored = 0;
  for (int part = 0; part < shape.word_registers(); ++part) {
    const auto place = detail::word_place(plan, slab, step, thread, word, part);
    if (place.column >= plan.cols) continue;
    const std::byte* from = detail::bytes_at(source, kind, place);
    for (int i = 0; i < shape.register_bytes; ++i) {
      stored |= static_cast<std::uint32_t>(from[i]) << (8 * (part * shape.register_bytes + i));
    }
  }
  return detail::arrange(kind, stored);
}

/// Vector `vector` of a thread: what lies at vector * vector_stride + thread * vector_bytes of the slab's data.
template <WeightKind kind>
HEDDLE_HOST_DEVICE inline Vector ordered_vector(const WeightPlan& plan, const WeightSource& source, int slab, int step, int vector,
                                                int thread) {
  Vector result;
  for (int i = 0; i < 4; ++i) result.word[i] = ordered_word<kind>(plan, source, slab, step, thread, 4 * vector + i);
  return result;
}

/// The inverse: writes the stored bytes that a vector was made of. No two threads or vectors write the same byte.
template <WeightKind kind>
HEDDLE_HOST_DEVICE inline void restore_vector(const WeightPlan& plan, const Vector& from, const WeightTarget& target, int slab,
                                              int step, int vector, int thread) {
  constexpr SlabShape shape = slab_shape(kind);
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t stored = detail::restore(kind, from.word[i]);
    for (int part = 0; part < shape.word_registers(); ++part) {
      const auto place = detail::word_place(plan, slab, step, thread, 4 * vector + i, part);
      if (place.column >= plan.cols) continue;
      std::byte* to = detail::bytes_at(target, kind, place);
      for (int b = 0; b < shape.register_bytes; ++b) {
        to[b] = static_cast<std::byte>(stored >> (8 * (part * shape.register_bytes + b)) & 0xFFu);
      }
    }
  }
}

}  // namespace heddle::sm90
