// What becomes of a task's sums: rounded and stored by token, or activated and quantised for the next product.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm75.hpp>

#include "experts/activation/group.cuh"
#include "experts/sm90/call.hpp"
#include "experts/sm90/mainloop.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"
#include "formats/codes.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// Where a math thread stands: its warpgroup's first slab in the tile, and its place in the warpgroup.
struct MathThread {
  int first_slab;
  int thread;  ///< of 128

  __device__ int warp() const { return thread / warp_threads; }
  __device__ int row() const { return thread % warp_threads / 4; }        ///< g: of the eight rows of a half
  __device__ int token() const { return thread % warp_threads % 4 * 2; }  ///< of the eight of a group, and the next
};

/// What becomes of results where they go: they are stored. Two neighbours of a row, or eight.
struct StoreResults {
  __device__ void pair(bf16* to, std::uint32_t values) const { *reinterpret_cast<std::uint32_t*>(to) = values; }
  __device__ void eight(bf16* to, const uint4& values) const { *reinterpret_cast<uint4*>(to) = values; }
};

/// Two weight rows of a token, the pairs of tokens of a fragment transposed in registers into pairs of rows.
template <class Put>
__device__ inline void put_eight(bf16* row, int low, int high, const float* sum, bool real, const Put& put) {
  std::uint32_t first;
  std::uint32_t second;
  cute::SM75_U32x1_MOVM_T::copy(ptx::to_bf16_pair(sum[0], sum[1]), first);
  cute::SM75_U32x1_MOVM_T::copy(ptx::to_bf16_pair(sum[2], sum[3]), second);
  if (!real) return;
  put.pair(row + low, first);
  put.pair(row + high, second);
}

/// Where a product's results go: rows behind each other from a first one, or each where the map says.
class MappedRows {
 public:
  __device__ MappedRows(const ResultStore& out, const Task& task, const MathThread& me)
      : out_(out),
        task_(task),
        in_a_row_(out.map.rows == nullptr),
        begin_(out.values + (in_a_row_ ? out.map.place(task, me.row()) * out.stride : 0)) {}

  /// The row of token 8 i + me.row(), if it is real.
  __device__ bf16* of(int i, int token, bool real) const {
    if (!in_a_row_ && real) return out_.values + out_.map.place(task_, token) * out_.stride;
    return begin_ + static_cast<std::size_t>(8 * i) * out_.stride;
  }

 private:
  const ResultStore& out_;
  const Task& task_;
  bool in_a_row_;
  bf16* begin_;
};

/// Puts sums as bf16 rows to where `rows` says. second: as ResultStore's.
template <class Shape, int tokens, class Rows, class Put = StoreResults>
__device__ __forceinline__ void store_results(const Rows& rows, int second, const WeightPlan& plan, const Task& task,
                                              const MathThread& me, const Sums<Shape, tokens>& sums, const Put& put = {}) {
  const int tile_has = plan.slabs_of(task.tile);
#pragma unroll
  for (int i = 0; i < tokens / 8; ++i) {
    const int token = 8 * i + me.row();
    const bool real = token < task.rows;
    bf16* row = rows.of(i, token, real);
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
      if (me.first_slab + slab >= tile_has) continue;  // the same for the whole warpgroup
      const int slab_row = (task.tile * tile_slabs + me.first_slab + slab) * slab_rows + 16 * me.warp();
      const int low = plan.source_row(slab_row) + me.token();
      put_eight(row, low, plan.paired ? second + low : low + 8, sums.slab[slab] + 4 * i, real, put);
    }
  }
}

/// The activation in the epilogue of the first product: a thread has a gate value and its up value, a tile the 128
/// columns of a group. Slabs are 32 columns, so groups of 32 are slabs. The bits are those of the step by itself, whose functions
/// these are.
template <class Shape, int tokens>
class ActivationEpilogue {
 public:
  __device__ ActivationEpilogue(Shared<Shape>& shared, const ActivatedStore& out, const WeightPlan& plan, const Task& task,
                                const MathThread& me)
      : shared_(shared), out_(out), task_(task), me_(me), tile_has_(plan.slabs_of(task.tile)) {}

  /// All math threads call it together.
  __device__ __forceinline__ void run(Sums<Shape, tokens>& sums) {
    const bool weighted = out_.weights != nullptr;
    const int mine = static_cast<int>(threadIdx.x);
    float weight = 1.0f;  // on its way while values are activated
    if (weighted && mine < task_.rows) weight = out_.weights[out_.map.place(task_, mine)];
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) activate_slab(sums.slab[slab]);
    if (weighted) {
      if (mine < tokens) shared_.activation.factors[0][mine] = weight;
      meet();
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) weigh_slab(sums.slab[slab]);
    }
    if (quantises()) {
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) tell_peaks(sums.slab[slab], me_.first_slab + slab);
      meet();
      make_scales();
    }
    meet();
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) stage_values(sums.slab[slab], me_.first_slab + slab);
    meet();
    store_values();
  }

 private:
  static constexpr int columns_a_slab = slab_rows / 2;
  static constexpr int value_bytes = Shape::activated_bytes;
  static constexpr bool plain = is_plain<Shape>();  ///< a tile is a group then

  __device__ bool quantises() const { return value_bytes == 1 || out_.format == Activation::fp8; }
  __device__ static void meet() { cutlass::arch::NamedBarrier::sync(Shape::math_threads, 1); }
  __device__ int slabs_a_group() const { return plain ? tile_slabs : out_.quantisation.group / columns_a_slab; }
  __device__ bool by_power_of_two() const { return plain || out_.quantisation.scale == ScaleFormat::ue8m0; }
  __device__ std::size_t flat(int token) const { return static_cast<std::size_t>(task_.flat + token); }

  /// Leaves v, not weighted yet, in the lower half of the sums.
  __device__ __forceinline__ void activate_slab(float (&sum)[tokens / 2]) const {
    constexpr int pairs = tokens / 8;  // of tokens
    std::uint32_t gates[pairs];
    std::uint32_t ups[pairs];
    float values[2 * pairs];
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      gates[i] = ptx::to_bf16_pair(sum[4 * i], sum[4 * i + 1]);
      ups[i] = ptx::to_bf16_pair(sum[4 * i + 2], sum[4 * i + 3]);
    }
    activate(gates, ups, out_.clamp, 1.0f, values);
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) sum[i / 2 * 4 + i % 2] = values[i];
  }

  __device__ __forceinline__ void weigh_slab(float (&sum)[tokens / 2]) const {
#pragma unroll
    for (int i = 0; i < tokens / 8; ++i) {
      const auto weights = *reinterpret_cast<const float2*>(shared_.activation.factors[0] + 8 * i + me_.token());
      sum[4 * i] *= weights.x;
      sum[4 * i + 1] *= weights.y;
    }
  }

  /// Puts the warp's largest magnitude of every token into shared memory.
  __device__ __forceinline__ void tell_peaks(const float (&sum)[tokens / 2], int slab) {
#pragma unroll
    for (int i = 0; i < tokens / 8; ++i) {
      float peak[2] = {largest_magnitude(0.0f, sum[4 * i]), largest_magnitude(0.0f, sum[4 * i + 1])};
#pragma unroll
      for (int lanes = 4; lanes < warp_threads; lanes *= 2) {
        peak[0] = fmaxf(peak[0], __shfl_xor_sync(0xFFFFFFFFu, peak[0], lanes));
        peak[1] = fmaxf(peak[1], __shfl_xor_sync(0xFFFFFFFFu, peak[1], lanes));
      }
      if (me_.row() == 0) {
        float* peaks = shared_.activation.peaks[4 * slab + me_.warp()] + 8 * i + me_.token();
        peaks[0] = peak[0];
        peaks[1] = peak[1];
      }
    }
  }

  /// A thread a (group, token): the scale, kept for the codes and stored.
  __device__ __forceinline__ void make_scales() {
    const int groups = plain ? 1 : (tile_has_ + slabs_a_group() - 1) / slabs_a_group();
    for (int index = static_cast<int>(threadIdx.x); index < groups * task_.rows; index += Shape::math_threads) {
      const int group = plain ? 0 : index / task_.rows;
      const int token = index - group * task_.rows;
      float peak = 0.0f;
      for (int warp = 0; warp < 4 * slabs_a_group(); ++warp) {
        const int from = 4 * slabs_a_group() * group + warp;
        if (from < 4 * tile_has_) peak = fmaxf(peak, shared_.activation.peaks[from][token]);
      }
      float& kept = shared_.activation.factors[group][token];
      std::byte* to = out_.scales + flat(token) * out_.scale_stride;
      const int place = task_.tile * (tile_slabs / slabs_a_group()) + group;
      if (by_power_of_two()) {
        const auto scale = GroupScale<ScaleFormat::ue8m0>::of(peak);
        kept = scale.inverse;
        to[place] = static_cast<std::byte>(scale.byte);
      } else {
        kept = GroupScale<ScaleFormat::f32>::of(peak).scale;
        reinterpret_cast<float*>(to)[place] = kept;
      }
    }
  }

  __device__ __forceinline__ float quotient(float value, float factor) const {
    if (by_power_of_two()) return GroupScale<ScaleFormat::ue8m0>{0, factor}.quotient(value);
    return GroupScale<ScaleFormat::f32>{factor, heddle::detail::reciprocal(factor)}.quotient(value);
  }

  /// Two tokens' bytes of one column, each in the low bits of its word: codes, codes widened to bf16, or bf16 values.
  __device__ __forceinline__ void operands(const float (&values)[2], int group, int token, std::uint32_t (&words)[2]) const {
    std::uint32_t pair;
    if (!quantises()) {
      pair = ptx::to_bf16_pair(values[0], values[1]);
    } else {
      const float* kept = &shared_.activation.factors[group][token];
      float quotients[2];
#pragma unroll
      for (int v = 0; v < 2; ++v) quotients[v] = quotient(values[v], kept[v]);
      pair = ptx::to_e4m3_pair(quotients[0], quotients[1]);
      if constexpr (value_bytes == 1) {
        words[0] = pair & 0xFFu;
        words[1] = pair >> 8;
        return;
      }
      pair = float_bits(from_e4m3(static_cast<std::uint8_t>(pair))) >> 16 |
             (float_bits(from_e4m3(static_cast<std::uint8_t>(pair >> 8))) & 0xFFFF0000u);
    }
    words[0] = pair & 0xFFFFu;
    words[1] = pair >> 16;
  }

  __device__ __forceinline__ void stage_values(const float (&sum)[tokens / 2], int slab) {
    if (slab >= tile_has_) return;
    const int column = columns_a_slab * slab + 8 * me_.warp() + me_.row();
#pragma unroll
    for (int i = 0; i < tokens / 8; ++i) {
      const int token = 8 * i + me_.token();
      const float values[2] = {sum[4 * i], sum[4 * i + 1]};
      std::uint32_t words[2];
      operands(values, slab / slabs_a_group(), token, words);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        std::byte* to = shared_.activation.values + (token + v) * Shape::activated_stride + column * value_bytes;
        if constexpr (value_bytes == 1) {
          *to = static_cast<std::byte>(words[v]);
        } else {
          *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(words[v]);
        }
      }
    }
  }

  /// Rows of the tile's columns, 16 bytes a thread.
  __device__ __forceinline__ void store_values() {
    constexpr int vectors = tile_slabs * columns_a_slab * value_bytes / 16;  // of a whole tile
    const int tile_vectors = tile_has_ * columns_a_slab * value_bytes / 16;
    const std::size_t begin = static_cast<std::size_t>(task_.tile) * (tile_slabs * columns_a_slab * value_bytes);
    for (int index = static_cast<int>(threadIdx.x); index < vectors * task_.rows; index += Shape::math_threads) {
      const int token = index / vectors;
      const int vector = index % vectors;
      if (vector >= tile_vectors) continue;
      const auto value = *reinterpret_cast<const uint4*>(shared_.activation.values + token * Shape::activated_stride + 16 * vector);
      *reinterpret_cast<uint4*>(out_.values + flat(token) * out_.value_stride + begin + 16 * static_cast<std::size_t>(vector)) =
          value;
    }
  }

  Shared<Shape>& shared_;
  const ActivatedStore& out_;
  const Task& task_;
  const MathThread& me_;
  int tile_has_;
};

}  // namespace heddle::sm90
