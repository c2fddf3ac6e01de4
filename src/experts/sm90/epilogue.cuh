// What becomes of a task's sums: rounded and stored by token, or activated and quantised for the next product.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm75.hpp>

#include "experts/activation/group.cuh"
#include "experts/sm90/call.hpp"
#include "experts/sm90/mainloop.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/shared_scales.cuh"
#include "experts/sm90/tasks.hpp"
#include "formats/codes.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// Where a math thread stands: its warpgroup's first slab in the tile, and its place in the warpgroup.
struct MathThread {
  int first_slab;
  int thread;  ///< of 128

  __device__ int warp() const { return thread / warp_threads; }
  __device__ int lane() const { return thread % warp_threads; }
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
      : shared_(shared),
        thread_(ptx::only_here(static_cast<int>(threadIdx.x))),
        scales_(shared, thread_),
        out_(out),
        task_(task),
        me_{me.first_slab, thread_ & (warpgroup_threads - 1)},
        tile_has_(plan.slabs_of(task.tile)) {}

  /// All math threads call it together. They meet twice (see SharedScales): values are staged behind the first meeting, when nobody
  /// stores those of the task before any more, and stored behind the second one.
  __device__ __forceinline__ void run(Sums<Shape, tokens>& sums) {
    float weights[parts_of_tokens];
    fetch_weights(weights);  // on their way while values are activated
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) activate_slab(sums.slab[slab]);
    if (out_.weights != nullptr) weigh(sums, weights);
    if (quantises()) {
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) tell_peaks(sums.slab[slab], me_.first_slab + slab);
    }
    scales_.meet();
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) stage_values(sums.slab[slab], me_.first_slab + slab);
    if (quantises()) scales_.turn();
    scales_.meet();
    store_values();
    if (quantises()) store_scales();
  }

 private:
  static constexpr int columns_a_slab = slab_rows / 2;
  static constexpr int value_bytes = Shape::activated_bytes;
  static constexpr bool plain = is_plain<Shape>();  ///< a tile is a group then
  static constexpr int parts_of_tokens = (tokens + warp_threads - 1) / warp_threads;
  using PowerWord = ScaleWord<ScaleFormat::ue8m0>;
  using FloatWord = ScaleWord<ScaleFormat::f32>;

  __device__ bool quantises() const { return value_bytes == 1 || out_.format == Activation::fp8; }
  __device__ int slabs_a_group() const { return plain ? tile_slabs : out_.quantisation.group / columns_a_slab; }
  __device__ int group_of(int slab) const { return plain ? 0 : slab / slabs_a_group(); }
  __device__ bool by_power_of_two() const { return plain || out_.quantisation.scale == ScaleFormat::ue8m0; }
  __device__ std::size_t flat(int token) const { return static_cast<std::size_t>(task_.flat + token); }

  /// A lane fetches the weight of one token of 32, for all of its warp.
  __device__ __forceinline__ void fetch_weights(float (&weights)[parts_of_tokens]) const {
    if (out_.weights == nullptr) return;
#pragma unroll
    for (int part = 0; part < parts_of_tokens; ++part) {
      const int token = warp_threads * part + me_.lane();
      weights[part] = token < task_.rows ? out_.weights[out_.map.place(task_, token)] : 0.0f;
    }
  }
  __device__ __forceinline__ void weigh(Sums<Shape, tokens>& sums, const float (&weights)[parts_of_tokens]) const {
#pragma unroll
    for (int i = 0; i < tokens / 4; ++i) {
      const int token = 8 * (i / 2) + i % 2;  // and me.token() more
      const float weight = __shfl_sync(0xFFFFFFFFu, weights[token / warp_threads], token % warp_threads + me_.token());
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) sums.slab[slab][i / 2 * 4 + i % 2] *= weight;
    }
  }

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

  /// The eight lanes that share tokens halve them three times: then each has the warp's largest magnitudes of some, and tells. Of
  /// tokens that the task has not something is told, too, that nobody reads; a slab that the tile has not is the last one again.
  __device__ __forceinline__ void tell_peaks(const float (&sum)[tokens / 2], int slab) {
    constexpr int pairs = tokens / 8;
    Peaks<2 * pairs> all;
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      all.of[i] = sum[4 * i];
      all.of[pairs + i] = sum[4 * i + 1];
    }
    const int row = me_.row();
    const auto of_parity = all.meet(16, (row & 4) != 0);
    const auto of_half = of_parity.meet(8, (row & 2) != 0);
    const auto mine = of_half.meet(4, (row & 1) != 0);
    static_assert(8 * (of_parity.half + 2 * of_half.half) <= Shape::most_tokens);
    const int first = row / 4 + 8 * (row / 2 % 2 * of_parity.half + row % 2 * of_half.half) + me_.token();
#pragma unroll
    for (int i = 0; i < of_half.half; ++i) {
      scales_.tell(group_of(slab), first + 8 * i, word_of(largest_magnitude(0.0f, mine.of[i])));
    }
  }

  __device__ __forceinline__ std::int32_t word_of(float peak) const {
    return by_power_of_two() ? PowerWord::of(peak) : FloatWord::of(peak);
  }
  __device__ __forceinline__ float quotient(float value, std::int32_t word) const {
    return by_power_of_two() ? PowerWord::scale(word).quotient(value) : FloatWord::scale(word).quotient(value);
  }

  __device__ __forceinline__ void store_scales() const {
    const int groups_a_tile = plain ? 1 : tile_slabs / slabs_a_group();
    scales_.for_each([&](int group, int token, std::int32_t word) {
      if (token >= task_.rows || group * slabs_a_group() >= tile_has_) return;
      std::byte* to = out_.scales + flat(token) * out_.scale_stride;
      const int place = task_.tile * groups_a_tile + group;
      if (by_power_of_two()) {
        to[place] = static_cast<std::byte>(PowerWord::scale(word).byte);
      } else {
        reinterpret_cast<float*>(to)[place] = FloatWord::scale(word).scale;
      }
    });
  }

  /// Two tokens' bytes of one column, each in the low bits of its word: codes, codes widened to bf16, or bf16 values.
  __device__ __forceinline__ void operands(const float* values, uint2 scales, std::uint32_t (&words)[2]) const {
    std::uint32_t pair;
    if (!quantises()) {
      pair = ptx::to_bf16_pair(values[0], values[1]);
    } else {
      pair = ptx::to_e4m3_pair(quotient(values[0], static_cast<std::int32_t>(scales.x)),
                               quotient(values[1], static_cast<std::int32_t>(scales.y)));
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

  /// Where byte `at` of a token's row is. Pieces of 16 bytes change places, so that a warp's tokens share no bank; those of a
  /// thread all in the same way.
  __device__ std::byte* staged(int token, int at) const {
    return shared_.activation.values + token * Shape::activated_stride + (at ^ ((token >> 1 & 3) << 4));
  }

  __device__ __forceinline__ void stage_values(const float (&sum)[tokens / 2], int slab) {
    if (slab >= tile_has_) return;
    std::byte* const first = staged(me_.token(), (columns_a_slab * slab + 8 * me_.warp() + me_.row()) * value_bytes);
    uint2 scales[tokens / 8] = {};  // all at once: what is stored could be what is loaded next
    if (quantises()) {
#pragma unroll
      for (int i = 0; i < tokens / 8; ++i) {
        scales[i] = *reinterpret_cast<const uint2*>(scales_.told(group_of(slab), 8 * i + me_.token()));
      }
    }
#pragma unroll
    for (int i = 0; i < tokens / 8; ++i) {
      std::uint32_t words[2];
      operands(sum + 4 * i, scales[i], words);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        std::byte* to = first + (8 * i + v) * Shape::activated_stride;
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
#pragma unroll
    for (int first = 0; first < vectors * tokens; first += Shape::math_threads) {
      const int index = first + thread_;
      const int token = index / vectors;
      const int vector = index % vectors;
      if (token >= task_.rows || vector >= tile_vectors) continue;
      const auto value = *reinterpret_cast<const uint4*>(staged(token, 16 * vector));
      *reinterpret_cast<uint4*>(out_.values + flat(token) * out_.value_stride + begin + 16 * static_cast<std::size_t>(vector)) =
          value;
    }
  }

  Shared<Shape>& shared_;
  int thread_;  ///< of the math threads
  SharedScales<Shape> scales_;
  const ActivatedStore& out_;
  const Task& task_;
  MathThread me_;
  int tile_has_;
};

}  // namespace heddle::sm90
