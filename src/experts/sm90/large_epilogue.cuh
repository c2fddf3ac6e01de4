// What becomes of the sums of large row blocks: a warp has 16 tokens whole, so results pass through its own piece of shared memory
// and leave in 16 bytes a thread.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>

#include "experts/activation/group.cuh"
#include "experts/sm90/call.hpp"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/large_mainloop.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// A warp's 16 rows of 64 bytes on their way out. A lane takes 16 bytes of two rows: lane / 4 and 8 behind it.
template <class Shape>
class StagedRows {
 public:
  __device__ StagedRows(Shared<Shape>& shared, const LargePosition& me)
      : memory_(shared.staged[static_cast<int>(threadIdx.x) / warp_threads]), lane_(me.lane()) {}

  /// Where byte `at` of a row is.
  __device__ std::byte* place(int row, int at) const { return memory_ + row * Shape::staged_stride + at; }

  /// Takes the rows once all lanes have put theirs; each(half, byte of the row, 16 bytes) for the lane's parts of both.
  template <class Each>
  __device__ void take(const Each& each) const {
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lane_ % 4 * 16;
      each(half, at, *reinterpret_cast<const uint4*>(place(lane_ / 4 + 8 * half, at)));
    }
    __syncwarp();
  }

 private:
  std::byte* memory_;
  int lane_;
};

/// Puts sums as bf16 rows.
template <class Shape, int pieces, class Put = StoreResults>
class LargeStore {
 public:
  /// row_of(token): where the results of a token of the task go. second: as ResultStore's.
  template <class RowOf>
  __device__ LargeStore(Shared<Shape>& shared, const RowOf& row_of, int second, const WeightPlan& plan, const Task& task,
                        const LargePosition& me, const Put& put = {})
      : staged_(shared, me),
        plan_(plan),
        me_(me),
        put_(put),
        first_slab_(task.tile * tile_slabs),
        tile_has_(plan.slabs_of(task.tile)) {
    second_ = second;
    any_ = me.first_of_warp() < task.rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = me.first_of_warp() + me.lane() / 4 + 8 * half;
      row_[half] = token < task.rows ? row_of(token) : nullptr;
    }
  }

  /// Factors: a LargeRowFactors, which have arrived.
  template <class Factors>
  __device__ __forceinline__ void run(LargeSums<pieces>& sums, const Factors& factors) const {
    if (!any_) return;
    const int first = me_.first_piece * slabs_a_piece;
#pragma unroll 1
    for (int slab = first; slab < min(first + pieces * slabs_a_piece, tile_has_); ++slab) {
      float(&sum)[64] = sums.piece[0];
      factors.template multiply<32>(sum, slab * slab_rows);
      const int column = plan_.source_row((first_slab_ + slab) * slab_rows);
      if (plan_.paired) {
        store<2>(sum, 0, column);
        store<2>(sum, 1, second_ + column);
      } else {
        store<1>(sum, 0, column);
        store<1>(sum, 4, column + 32);
      }
      sums.turn_slab();
    }
  }

 private:
  /// 32 columns, the staged bytes: four eights of the piece, beginning with number `first`, one in `stride`.
  template <int stride>
  __device__ __forceinline__ void store(const float (&sum)[64], int first, int column) const {
    const int matrix =
        me_.lane() / 8;  // of the four that an instruction stores: two eights of columns, each of two eights of tokens
    const int row = matrix % 2 * 8 + me_.lane() % 8;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float* low = sum + 4 * (first + stride * i);
      const float* high = low + 4 * stride;
      auto& to = *reinterpret_cast<cute::uint128_t*>(staged_.place(row, 16 * (i + matrix / 2)));
      cute::SM90_U32x4_STSM_N::copy(ptx::to_bf16_pair(low[0], low[1]), ptx::to_bf16_pair(low[2], low[3]),
                                    ptx::to_bf16_pair(high[0], high[1]), ptx::to_bf16_pair(high[2], high[3]), to);
    }
    staged_.take([&](int half, int at, const uint4& value) {
      if (row_[half] != nullptr) put_.eight(row_[half] + column + at / 2, value);
    });
  }

  StagedRows<Shape> staged_;
  const WeightPlan& plan_;
  const LargePosition& me_;
  [[no_unique_address]] Put put_;
  int first_slab_;
  int tile_has_;
  int second_;
  bool any_;  ///< whether the warp has a row of the task
  bf16* row_[2];
};

/// The activation in the epilogue of the first product. A thread has gates and ups of two tokens, a warp all of a token's columns
/// in the warpgroup's part of the tile. The bits are those of the step by itself, whose functions these are.
template <class Shape, int pieces>
class LargeActivation {
 public:
  __device__ LargeActivation(Shared<Shape>& shared, const ActivatedStore& out, const WeightPlan& plan, const Task& task,
                             const LargePosition& me)
      : shared_(shared), staged_(shared, me), out_(out), task_(task), me_(me), tile_has_(plan.slabs_of(task.tile)) {}

  /// Starts to fetch the routing weights of the thread's tokens, long before they are needed.
  __device__ __forceinline__ void fetch_weights() {
    if (out_.weights == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (real(half)) weight_[half] = out_.weights[out_.map.place(task_, token(half))];
    }
  }

  /// Factors: a LargeRowFactors, which have arrived. `turn` alternates from task to task where warpgroups tell each other of
  /// peaks.
  template <class Factors>
  __device__ __forceinline__ void run(LargeSums<pieces>& sums, const Factors& factors, int& turn) {
    if (any()) {
#pragma unroll 1
      for (int p = 0; p < pieces; ++p) {
        factors.template multiply<64>(sums.piece[0], (me_.first_piece + p) * slabs_a_piece * slab_rows);
        const Activated activated = activate_piece(sums.piece[0], p);
        sums.turn_piece();
        activated.leave_in(sums.piece[pieces - 1]);
      }
    }
    if (is_plain<Shape>() || out_.quantisation.scale == ScaleFormat::ue8m0) {
      quantise<ScaleFormat::ue8m0>(sums, turn);
    } else {
      quantise<ScaleFormat::f32>(sums, turn);
    }
  }

 private:
  static constexpr int columns_a_slab = slab_rows / 2;
  static constexpr int pairs_a_slab = 4;  ///< of neighbouring columns of a token that a thread has

  __device__ std::size_t flat(int token) const { return static_cast<std::size_t>(task_.flat + token); }
  __device__ int token(int half) const { return me_.token() + 8 * half; }
  __device__ bool real(int half) const { return token(half) < task_.rows; }
  /// Whether the warp has a row of the task: what others have multiplied are old bytes.
  __device__ bool any() const { return me_.first_of_warp() < task_.rows; }
  __device__ int slab(int p, int s) const { return (me_.first_piece + p) * slabs_a_piece + s; }

  /// A piece's activated values, and the largest magnitude of each slab's columns of a token. They stay where the sums were, which
  /// there are twice as many of.
  struct Activated {
    static constexpr int values = slabs_a_piece * pairs_a_slab * 2 * 2;
    float all[values + slabs_a_piece * 2];

    __device__ static constexpr int place(int s, int i, int half) { return ((s * pairs_a_slab + i) * 2 + half) * 2; }
    __device__ static constexpr int place_of_peak(int s, int half) { return values + s * 2 + half; }

    __device__ __forceinline__ void leave_in(float (&piece)[64]) const {
#pragma unroll
      for (int i = 0; i < values + slabs_a_piece * 2; ++i) piece[i] = all[i];
    }
  };

  /// All at once: values that do not wait for each other.
  __device__ __forceinline__ Activated activate_piece(const float (&sum)[64], int p) const {
    constexpr int pairs = slabs_a_piece * 2 * pairs_a_slab;
    std::uint32_t gates[pairs];
    std::uint32_t ups[pairs];
    float values[2 * pairs];
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      const float* gate = sum + pair_of(i);
      gates[i] = real(i % 2) ? ptx::to_bf16_pair(gate[0], gate[1]) : 0u;  // old bytes would take the long way
      ups[i] = ptx::to_bf16_pair(gate[4], gate[5]);
    }
    activate(gates, ups, out_.clamp, 1.0f, values);
    Activated activated;
#pragma unroll
    for (int s = 0; s < slabs_a_piece; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float peak = 0.0f;
#pragma unroll
        for (int i = 0; i < pairs_a_slab; ++i) {
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            float& value = activated.all[Activated::place(s, i, half) + v];
            value = values[Activated::place(s, i, half) + v] * weight_[half];
            peak = largest_magnitude(peak, value);
          }
        }
        activated.all[Activated::place_of_peak(s, half)] = slab(p, s) < tile_has_ ? meet_lanes(peak) : 0.0f;
      }
    }
    return activated;
  }
  /// Where pair i of a piece begins: neighbouring gates of a token, tokens in turn; their ups are four values behind.
  __device__ static constexpr int pair_of(int i) {
    return 4 * (8 * (i / (2 * pairs_a_slab)) + 2 * (i / 2 % pairs_a_slab)) + 2 * (i % 2);
  }

  /// Of the four lanes that share a token.
  __device__ static float meet_lanes(float peak) {
    peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, 1));
    return fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, 2));
  }

  template <ScaleFormat format>
  __device__ __forceinline__ void quantise(LargeSums<pieces>& activated, int& turn) {
    const bool by_slab = !is_plain<Shape>() && out_.quantisation.group == columns_a_slab;
    if (!by_slab) share_peaks(activated, turn);
    if (!any()) return;
#pragma unroll 1
    for (int p = 0; p < pieces; ++p) {
      const float(&piece)[64] = activated.piece[0];
      GroupScale<format> scales[slabs_a_piece][2];
#pragma unroll
      for (int s = 0; s < slabs_a_piece; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scales[s][half] = GroupScale<format>::of(piece[Activated::place_of_peak(s, half)]);
          store_scale(scales[s][half], slab(p, s), half, by_slab);
        }
      }
      store_codes<format>(piece, p, scales);
      activated.turn_piece();
    }
  }

  /// A group is all of a token's columns in the tile: every slab gets the largest magnitude of all.
  __device__ __forceinline__ void share_peaks(LargeSums<pieces>& activated, int& turn) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = 0.0f;
      if (any()) {
#pragma unroll
        for (int i = 0; i < pieces * slabs_a_piece; ++i) {
          largest = fmaxf(largest, activated.piece[i / slabs_a_piece][Activated::place_of_peak(i % slabs_a_piece, half)]);
        }
      }
      if constexpr (pieces == 1) tell(largest, turn, half);
      set_peaks(activated, half, largest);
    }
    if constexpr (pieces == 1) {
      cutlass::arch::NamedBarrier::sync(Shape::math_threads, 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) set_peaks(activated, half, told(turn, half));
      turn ^= 1;
    }
  }
  __device__ static void set_peaks(LargeSums<pieces>& activated, int half, float peak) {
#pragma unroll
    for (int i = 0; i < pieces * slabs_a_piece; ++i) {
      activated.piece[i / slabs_a_piece][Activated::place_of_peak(i % slabs_a_piece, half)] = peak;
    }
  }

  __device__ void tell(float peak, int turn, int half) const {
    if (me_.lane() % 4 == 0) shared_.peaks[turn][me_.warpgroup][token(half)] = peak;
  }
  __device__ float told(int turn, int half) const {
    float peak = 0.0f;
#pragma unroll
    for (int w = 0; w < Shape::warpgroups; ++w) peak = fmaxf(peak, shared_.peaks[turn][w][token(half)]);
    return peak;
  }

  /// A lane of the four of a token stores the scale of a group that begins with slab `number` of the tile.
  template <ScaleFormat format>
  __device__ void store_scale(const GroupScale<format>& scale, int number, int half, bool by_slab) const {
    if (me_.lane() % 4 != 0 || !real(half) || number >= tile_has_ || (!by_slab && number != 0)) return;
    std::byte* to = out_.scales + flat(token(half)) * out_.scale_stride;
    const int place = by_slab ? task_.tile * tile_slabs + number : task_.tile;
    if constexpr (format == ScaleFormat::f32) {
      reinterpret_cast<float*>(to)[place] = scale.scale;
    } else {
      to[place] = static_cast<std::byte>(scale.byte);
    }
  }

  /// The codes of a piece: 64 columns of each token.
  template <ScaleFormat format>
  __device__ __forceinline__ void store_codes(const float (&piece)[64], int p,
                                              const GroupScale<format> (&scales)[slabs_a_piece][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int s = 0; s < slabs_a_piece; ++s) {
#pragma unroll
        for (int i = 0; i < pairs_a_slab; ++i) {
          const float* values = piece + Activated::place(s, i, half);
          const std::uint32_t codes = codes_of_pair(scales[s][half], values[0], values[1]);
          std::byte* to = staged_.place(me_.lane() / 4 + 8 * half, columns_a_slab * s + 8 * i + me_.column());
          *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(codes);
        }
      }
    }
    const int columns = (tile_has_ - slab(p, 0)) * columns_a_slab;  // of this piece, perhaps none, perhaps more than there are
    const std::size_t begin = static_cast<std::size_t>((task_.tile * tile_slabs + slab(p, 0)) * columns_a_slab);
    staged_.take([&](int half, int at, const uint4& value) {
      const int token = me_.first_of_warp() + me_.lane() / 4 + 8 * half;
      if (token >= task_.rows || at >= columns) return;
      *reinterpret_cast<uint4*>(out_.values + flat(token) * out_.value_stride + begin + static_cast<std::size_t>(at)) = value;
    });
  }

  Shared<Shape>& shared_;
  StagedRows<Shape> staged_;
  const ActivatedStore& out_;
  const Task& task_;
  const LargePosition& me_;
  int tile_has_;
  float weight_[2] = {1.0f, 1.0f};  ///< of the thread's tokens
};

}  // namespace heddle::sm90
