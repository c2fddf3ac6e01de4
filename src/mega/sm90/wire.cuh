// Results of small row blocks in the format of a combine wire: rounded to bf16 as ever, then quantised, and their codes and scales
// stored in the pairs' slots. The bits are those of rows that are quantised as a whole (src/formats/rows.hpp).
#pragma once

#include "experts/sm90/epilogue.cuh"
#include "formats/row_format.hpp"

namespace heddle::sm90 {

/// The scale of an nvfp4 group of bf16 values and their codes, by few instructions. Such a value, or its sixth, and what lies
/// halfway between two codes are equal or far apart: a quotient that is wrong in its last place gives the right code, and an exact
/// one is exact.
struct Nvfp4Scale {
  std::uint32_t byte;
  float divisor;
  float inverse;

  __device__ static Nvfp4Scale of(std::int32_t largest_magnitude) {
    constexpr float sixth = 1.0f / 6.0f;
    const bool finite = largest_magnitude < heddle::detail::infinity_bits;
    const float wanted = heddle::detail::divide_by_reciprocal(group_amax(largest_magnitude), 6.0f, sixth);
    const std::uint32_t code = ptx::to_e4m3_pair(wanted, 0.0f) & 0xFFu;
    const std::uint32_t byte = finite ? max(code, 1u) : e4m3_nan;
    const float divisor = nvfp4_divisor(static_cast<std::uint8_t>(byte), 1.0f);
    return {byte, divisor, heddle::detail::reciprocal(divisor)};
  }
  /// Of two neighbours, the first one's in the low half.
  __device__ std::uint32_t codes(std::uint32_t bf16_pair) const {
    return code(float_from_bits(bf16_pair << 16)) | code(float_from_bits(bf16_pair & 0xFFFF0000u)) << 4;
  }

 private:
  /// to_e2m1 of the quotient; 7 where the scale is NaN.
  __device__ std::uint32_t code(float value) const {
    constexpr std::uint32_t one = 0x3F800000;
    constexpr std::uint32_t six = 0x40C00000;
    constexpr float rounder = 4194304.0f;  // one unit of its last place is 0.5, the subnormal step
    const std::uint32_t bits = float_bits(heddle::detail::divide_by_reciprocal(value, divisor, inverse));
    const std::uint32_t magnitude = min(bits & 0x7FFFFFFFu, six);
    const std::uint32_t normal = ((magnitude + 0x1FFFFFu + (magnitude >> 22 & 1u)) >> 22) - ((127u - 1u) << 1);
    const std::uint32_t subnormal = float_bits(float_from_bits(magnitude) + rounder) - float_bits(rounder);
    const std::uint32_t sign = byte == e4m3_nan ? 0u : float_bits(value) >> 28 & 8u;
    return (magnitude < one ? subnormal : normal) | sign;
  }
};

/// What a group's maximum takes of a pair of bf16 values.
__device__ inline float largest_magnitude_of_pair(float largest, std::uint32_t pair) {
  return largest_magnitude(largest_magnitude(largest, float_from_bits(pair << 16)), float_from_bits(pair & 0xFFFF0000u));
}
/// NaN included, for nvfp4.
__device__ inline std::int32_t nvfp4_magnitude_of_pair(std::int32_t largest, std::uint32_t pair) {
  return max(max(largest, nvfp4_magnitude(float_from_bits(pair << 16))), nvfp4_magnitude(float_from_bits(pair & 0xFFFF0000u)));
}
template <ScaleFormat format>
__device__ inline std::uint32_t codes_of_bf16_pair(const GroupScale<format>& scale, std::uint32_t pair) {
  return codes_of_pair(scale, float_from_bits(pair << 16), float_from_bits(pair & 0xFFFF0000u));
}
__device__ inline void store_scale(std::byte* to, const GroupScale<ScaleFormat::ue8m0>& scale) {
  *to = static_cast<std::byte>(scale.byte);
}
__device__ inline void store_scale(std::byte* to, const GroupScale<ScaleFormat::f32>& scale) {
  *reinterpret_cast<float*>(to) = scale.scale;
}

/// By all math threads together.
template <class Shape, int tokens>
class WireStore {
 public:
  /// `stores`: else nothing is stored, but the warps meet as ever.
  __device__ WireStore(Shared<Shape>& shared, const RowFormat& format, const WeightPlan& plan, const Task& task,
                       const MathThread& me, bool stores)
      : shared_(shared), format_(format), task_(task), me_(me), tile_has_(plan.slabs_of(task.tile)), stores_(stores) {}

  template <class Rows>
  __device__ __forceinline__ void run(const Rows& rows, const Sums<Shape, tokens>& sums) {
    Pairs pairs;
    transpose(sums, pairs);
    store(rows, pairs);
  }

 private:
  static constexpr int eights = tokens / 8;
  /// A thread's results as bf16, of token 8 i + me.row(): columns me.token() and the next one of its warp's sixteen, and eight
  /// behind.
  struct Pairs {
    std::uint32_t of[Shape::slabs][eights][2];
  };

  /// Out of line: who stores bf16 rows keeps its registers.
  template <class Rows>
  __device__ __noinline__ void store(Rows rows, Pairs pairs) {
    if (format_.wire == Wire::nvfp4) {
      store_nvfp4(rows, pairs);
    } else if (format_.quantisation.scale == ScaleFormat::ue8m0) {
      store_fp8<ScaleFormat::ue8m0>(rows, pairs);
    } else {
      store_fp8<ScaleFormat::f32>(rows, pairs);
    }
  }

  __device__ __forceinline__ void transpose(const Sums<Shape, tokens>& sums, Pairs& pairs) const {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
#pragma unroll
      for (int i = 0; i < eights; ++i) {
        const float* sum = sums.slab[slab] + 4 * i;
        cute::SM75_U32x1_MOVM_T::copy(ptx::to_bf16_pair(sum[0], sum[1]), pairs.of[slab][i][0]);
        cute::SM75_U32x1_MOVM_T::copy(ptx::to_bf16_pair(sum[2], sum[3]), pairs.of[slab][i][1]);
      }
    }
  }

  __device__ int lane_of_token() const { return me_.token() / 2; }
  __device__ bool there(int slab) const { return me_.first_slab + slab < tile_has_; }  // the same for the whole warpgroup
  /// Of the warp's sixteen columns in a slab, in the row.
  __device__ int column(int slab) const { return (task_.tile * tile_slabs + me_.first_slab + slab) * slab_rows + 16 * me_.warp(); }
  /// The row of token 8 i + me.row(); null: none that is stored.
  template <class Rows>
  __device__ std::byte* row(const Rows& rows, int i) const {
    const int token = 8 * i + me_.row();
    return stores_ && token < task_.rows ? reinterpret_cast<std::byte*>(rows.of(i, token, true)) : nullptr;
  }
  /// Of the four lanes that share a token.
  template <class Value>
  __device__ static Value from_neighbour(Value value, int distance) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  }

  /// A group is two slabs: warps tell each other the scales of their largest magnitudes.
  template <ScaleFormat scale_format, class Rows>
  __device__ __forceinline__ void store_fp8(const Rows& rows, const Pairs& pairs) {
    SharedScales<Shape> scales(shared_, static_cast<int>(threadIdx.x));
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
#pragma unroll
      for (int i = 0; i < eights; ++i) {
        float peak = largest_magnitude_of_pair(largest_magnitude_of_pair(0.0f, pairs.of[slab][i][0]), pairs.of[slab][i][1]);
        peak = fmaxf(peak, from_neighbour(peak, 1));
        peak = fmaxf(peak, from_neighbour(peak, 2));
        if (lane_of_token() == 0 && there(slab)) {
          scales.tell((me_.first_slab + slab) / 2, 8 * i + me_.row(), ScaleWord<scale_format>::of(peak));
        }
      }
    }
    scales.meet();
#pragma unroll
    for (int i = 0; i < eights; ++i) {
      std::byte* const to = row(rows, i);
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) {
        if (!there(slab)) continue;
        const auto scale = ScaleWord<scale_format>::scale(*scales.told((me_.first_slab + slab) / 2, 8 * i + me_.row()));
        store_sixteen(to, column(slab), codes_of_bf16_pair(scale, pairs.of[slab][i][0]),
                      codes_of_bf16_pair(scale, pairs.of[slab][i][1]));
        const bool speaks = (me_.first_slab + slab) % 2 == 0 && me_.warp() == 0 && lane_of_token() == 0;
        if (speaks && to != nullptr) store_scale(to + format_.scale_at(column(slab)), scale);
      }
    }
    scales.turn();
    scales.meet();
  }
  /// The codes of sixteen columns, two and two a lane: neighbours swap them, so that each stores four.
  __device__ void store_sixteen(std::byte* to, int column, std::uint32_t low, std::uint32_t high) const {
    const int lane = lane_of_token();
    const bool odd = lane % 2 != 0;
    const std::uint32_t other = from_neighbour(odd ? low : high, 1);
    const std::uint32_t word = odd ? other | high << 16 : low | other << 16;
    if (to != nullptr) *reinterpret_cast<std::uint32_t*>(to + column + (odd ? 8 : 0) + lane / 2 * 4) = word;
  }

  /// A group is a warp's sixteen columns.
  template <class Rows>
  __device__ __forceinline__ void store_nvfp4(const Rows& rows, const Pairs& pairs) const {
    const int lane = lane_of_token();
#pragma unroll
    for (int i = 0; i < eights; ++i) {
      std::byte* const to = row(rows, i);
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) {
        if (!there(slab)) continue;
        std::int32_t largest = nvfp4_magnitude_of_pair(nvfp4_magnitude_of_pair(0, pairs.of[slab][i][0]), pairs.of[slab][i][1]);
        largest = max(largest, from_neighbour(largest, 1));
        largest = max(largest, from_neighbour(largest, 2));
        const Nvfp4Scale scale = Nvfp4Scale::of(largest);
        // Lane 0 gathers the codes of the first eight columns, lane 1 those of the others.
        const std::uint32_t low = scale.codes(pairs.of[slab][i][0]);
        const std::uint32_t high = scale.codes(pairs.of[slab][i][1]);
        const bool odd = lane % 2 != 0;
        const std::uint32_t other = from_neighbour(odd ? low : high, 1);
        const std::uint32_t half = odd ? other | high << 8 : low | other << 8;
        const std::uint32_t word = half | from_neighbour(half, 2) << 16;
        if (to == nullptr) continue;
        if (lane < 2) *reinterpret_cast<std::uint32_t*>(to + column(slab) / 2 + 4 * lane) = word;
        if (lane == 2) to[format_.scale_at(column(slab))] = static_cast<std::byte>(scale.byte);
      }
    }
  }

  Shared<Shape>& shared_;
  RowFormat format_;  // these by value: what has an address leaves its registers
  Task task_;
  MathThread me_;
  int tile_has_;
  bool stores_;
};

}  // namespace heddle::sm90
