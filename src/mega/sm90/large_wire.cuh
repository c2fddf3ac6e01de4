// Results of large row blocks in the format of a combine wire: a group of 128 is a piece, all of whose columns of a token four
// lanes of a warp have. The bits are those of wire.cuh.
#pragma once

#include "experts/sm90/large_epilogue.cuh"
#include "mega/sm90/wire.cuh"

namespace heddle::sm90 {

template <class Shape, int pieces>
class LargeWireStore {
 public:
  /// row_of(token): where the row of a token of the task begins.
  template <class RowOf>
  __device__ LargeWireStore(Shared<Shape>& shared, const RowOf& row_of, const RowFormat& format, const WeightPlan& plan,
                            const Task& task, const LargePosition& me)
      : staged_(shared, me), format_(format), me_(me), first_slab_(task.tile * tile_slabs), tile_has_(plan.slabs_of(task.tile)) {
    any_ = me.first_of_warp() < task.rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = me.token() + 8 * half;
      row_[half] = token < task.rows ? reinterpret_cast<std::byte*>(row_of(token)) : nullptr;
    }
  }

  /// Factors: a LargeRowFactors, which have arrived.
  template <class Factors>
  __device__ __forceinline__ void run(LargeSums<pieces>& sums, const Factors& factors) const {
    if (!any_) return;
#pragma unroll 1
    for (int p = 0; p < pieces; ++p) {
      if (slab(p, 0) >= tile_has_) break;  // the same for the whole warpgroup
      factors.template multiply<64>(sums.piece[0], slab(p, 0) * slab_rows);
      if (format_.wire == Wire::nvfp4) {
        store_nvfp4(sums.piece[0], p);
      } else if (format_.quantisation.scale == ScaleFormat::ue8m0) {
        store_fp8<ScaleFormat::ue8m0>(sums.piece[0], p);
      } else {
        store_fp8<ScaleFormat::f32>(sums.piece[0], p);
      }
      sums.turn_piece();
    }
  }

 private:
  static constexpr int eights_a_slab = slab_rows / 8;

  __device__ int slab(int p, int s) const { return (me_.first_piece + p) * slabs_a_piece + s; }
  __device__ int column(int p, int s) const { return (first_slab_ + slab(p, s)) * slab_rows; }
  /// Two neighbours of eight `e` of a slab, of the token `half`.
  __device__ static std::uint32_t pair(const float (&sum)[64], int s, int e, int half) {
    const float* values = sum + 4 * (eights_a_slab * s + e) + 2 * half;
    return ptx::to_bf16_pair(values[0], values[1]);
  }
  /// Of the four lanes that share a token.
  template <class Value, class Most>
  __device__ static Value meet_lanes(Value value, const Most& most) {
    value = most(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return most(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
  }

  template <ScaleFormat scale_format>
  __device__ __forceinline__ void store_fp8(const float (&sum)[64], int p) const {
    GroupScale<scale_format> scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak = 0.0f;
#pragma unroll
      for (int s = 0; s < slabs_a_piece; ++s) {
        if (slab(p, s) >= tile_has_) continue;
#pragma unroll
        for (int e = 0; e < eights_a_slab; ++e) peak = largest_magnitude_of_pair(peak, pair(sum, s, e, half));
      }
      scales[half] = GroupScale<scale_format>::of(meet_lanes(peak, [](float a, float b) { return fmaxf(a, b); }));
      if (me_.lane() % 4 == 0 && row_[half] != nullptr) store_scale(row_[half] + format_.scale_at(column(p, 0)), scales[half]);
    }
#pragma unroll
    for (int s = 0; s < slabs_a_piece; ++s) {
      if (slab(p, s) >= tile_has_) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < eights_a_slab; ++e) {
          const std::uint32_t codes = codes_of_bf16_pair(scales[half], pair(sum, s, e, half));
          std::byte* to = staged_.place(me_.lane() / 4 + 8 * half, 8 * e + me_.column());
          *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(codes);
        }
      }
      leave(column(p, s), slab_rows);
    }
  }

  /// A group is two eights of a slab.
  __device__ __forceinline__ void store_nvfp4(const float (&sum)[64], int p) const {
    const int slabs = slab(p, 1) < tile_has_ ? 2 : 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int s = 0; s < slabs_a_piece; ++s) {
        std::uint32_t scale_bytes = 0;
#pragma unroll
        for (int group = 0; group < eights_a_slab / 2; ++group) {
          const std::uint32_t pairs[2] = {pair(sum, s, 2 * group, half), pair(sum, s, 2 * group + 1, half)};
          const std::int32_t largest = nvfp4_magnitude_of_pair(nvfp4_magnitude_of_pair(0, pairs[0]), pairs[1]);
          const Nvfp4Scale scale = Nvfp4Scale::of(meet_lanes(largest, [](int a, int b) { return max(a, b); }));
          scale_bytes |= scale.byte << (8 * group);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            std::byte* to = staged_.place(me_.lane() / 4 + 8 * half, 32 * s + 8 * group + 4 * e + me_.lane() % 4);
            *to = static_cast<std::byte>(scale.codes(pairs[e]));
          }
        }
        if (me_.lane() % 4 == s && s < slabs && row_[half] != nullptr)
          *reinterpret_cast<std::uint32_t*>(row_[half] + format_.scale_at(column(p, s))) = scale_bytes;
      }
    }
    leave(column(p, 0) / 2, slabs * slab_rows / 2);
  }

  /// The staged bytes, of which so many mean something, to the rows from their byte `begin` on.
  __device__ void leave(int begin, int bytes) const {
    staged_.take([&](int half, int at, const uint4& value) {
      if (row_[half] != nullptr && at < bytes) *reinterpret_cast<uint4*>(row_[half] + begin + at) = value;
    });
  }

  StagedRows<Shape> staged_;
  const RowFormat& format_;
  const LargePosition& me_;
  int first_slab_;
  int tile_has_;
  bool any_;  ///< whether the warp has a row of the task
  std::byte* row_[2];
};

}  // namespace heddle::sm90
