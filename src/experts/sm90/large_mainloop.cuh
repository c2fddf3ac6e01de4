// The main loop of large row blocks: a math warpgroup multiplies 64 tokens with weights, both in shared memory.
//
// The order of sums is the one of mainloop.cuh, and so are the bits: 128 of K in the tensor cores, then a promotion,
// total = fmaf(partial, token scale x weight scale, total). While one warpgroup promotes, the other one multiplies.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "experts/sm90/call.hpp"
#include "experts/sm90/product.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/widen.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// Where a math thread stands in a row block: whose tokens and which weights its warpgroup has. What is a whole warp's is known to
/// be: a branch that hangs on it must not make the compiler believe that the warp's lanes part, or no loop stays uniform.
struct LargePosition {
  int warpgroup;
  int warp;         ///< of the warpgroup
  int thread;       ///< of 128
  int first_token;  ///< of the warpgroup
  int first_piece;  ///< of the two halves of a tile

  /// With more than 64 tokens a warpgroup has its own 64 of them and both halves, else all tokens and a half.
  __device__ LargePosition(bool all_pieces)
      : warpgroup(ptx::uniform(static_cast<int>(threadIdx.x) / warpgroup_threads)),
        warp(ptx::uniform(static_cast<int>(threadIdx.x) % warpgroup_threads / warp_threads)),
        thread(static_cast<int>(threadIdx.x) % warpgroup_threads),
        first_token(all_pieces ? 64 * warpgroup : 0),
        first_piece(all_pieces ? 0 : warpgroup) {}

  __device__ int lane() const { return thread % warp_threads; }
  __device__ int first_of_warp() const { return first_token + 16 * warp; }
  /// The first of the thread's two tokens; the other one is 8 behind it.
  __device__ int token() const { return first_of_warp() + lane() / 4; }
  /// Of its columns in each eight, which are two.
  __device__ int column() const { return lane() % 4 * 2; }
};

/// Weight rows of a piece: two slabs, the N side of an instruction.
inline constexpr int slabs_a_piece = 2;

/// Sums of one warpgroup as the tensor cores hold them: value [4 j + v] of a piece is token 16 warp + lane / 4 + 8 (v / 2) and
/// weight row 8 j + 2 (lane % 4) + v % 2.
///
/// Epilogues work on the first piece or slab in a loop that is not unrolled, and turn: what runs once a task is fetched from far
/// away each time, so it has to be short.
template <int pieces>
struct LargeSums {
  float piece[pieces][64];

  /// The next piece comes to the front.
  __device__ __forceinline__ void turn_piece() { turn<64>(); }
  /// The next slab, half a piece, comes to the front.
  __device__ __forceinline__ void turn_slab() { turn<32>(); }

 private:
  template <int values>
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int i = 0; i < 64 * pieces - values; ++i) piece[i / 64][i % 64] = piece[(i + values) / 64][(i + values) % 64];
  }
};

/// The warpgroups take turns at the tensor cores, a piece at a time: while one promotes, the other one's products run. Left to
/// themselves both begin when a stage is full, get half of the tensor cores each, and promote at the same time while these idle.
template <class Shape>
class LargeTurns {
 public:
  static_assert(Shape::warpgroups == 2);
  /// Once, by all math threads, before the first product: the first turn is warpgroup 0's.
  __device__ static void begin(int warpgroup) {
    if (warpgroup == 1) pass(warpgroup);
  }
  /// Waits for the turn.
  __device__ static void take(int warpgroup) { cutlass::arch::NamedBarrier::sync(Shape::math_threads, number_of(warpgroup)); }
  /// The products are on their way.
  __device__ static void pass(int warpgroup) { cutlass::arch::NamedBarrier::arrive(Shape::math_threads, number_of(1 - warpgroup)); }

 private:
  /// Barrier 1 is that of all math threads, 2 and 3 are those of row factors.
  __device__ static std::uint32_t number_of(int warpgroup) { return static_cast<std::uint32_t>(4 + warpgroup); }
};

template <class Shape>
struct LargeRings {
  RingPosition<Shape::widens ? Shape::operand_stages : Shape::weight_stages> operands;
  RingPosition<Shape::row_stages> rows;
};

/// One warpgroup's work on one task. `pieces` is 2 for its own 64 tokens and all weights, 1 for all tokens and a half.
template <class Shape, int pieces>
class LargeLoop {
 public:
  __device__ LargeLoop(Shared<Shape>& shared, LargeRings<Shape>& at, const WeightPlan& plan, const LargePosition& me, int tile_has,
                       TokenScales scales)
      : shared_(shared), at_(at), plan_(plan), me_(me), scales_(scales) {
#pragma unroll
    for (int p = 0; p < pieces; ++p) {  // the slabs of a piece are of one block of 128 rows, of gate and of up
      block_offset_[p] = plan.scales_offset(tile_has, min((me.first_piece + p) * slabs_a_piece, tile_has - 1));
    }
    look_ahead();
  }

  /// stages > 0: a loop that might not run at all would have the zeros made twice.
  __device__ __forceinline__ void run(int stages, LargeSums<pieces>& sums) {
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
#pragma unroll
      for (float& value : sums.piece[p]) value = 0.0f;
    }
    if constexpr (!is_plain<Shape>()) {
      if (scales_ == TokenScales::by_32) {
        do run_finely(sums);
        while (--stages > 0);
        return;
      }
      if (stepped()) {
        do run_stage<true>(sums);
        while (--stages > 0);
        return;
      }
    }
    do run_stage<false>(sums);
    while (--stages > 0);
  }

 private:
  using Partial = float[64];
  /// What a partial sum is multiplied by: [of the two tokens][gate, up: weight rows of even and odd eights].
  struct Factors {
    float of[2][2];
  };

  /// Scales of a stage as they lie there: of the thread's tokens, and of weight blocks, gate and up.
  struct Scales {
    float token[2];
    RowPair block[pieces];

    __device__ Factors of(int p) const {
      return {{{token[0] * block[p].low, token[0] * block[p].high}, {token[1] * block[p].low, token[1] * block[p].high}}};
    }
  };

  template <bool stepped>
  __device__ __forceinline__ void run_stage(LargeSums<pieces>& sums) {
    Partial partial;
    wait();
    const Scales scales = load_scales(0);
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      LargeTurns<Shape>::take(me_.warpgroup);
      begin(partial);
#pragma unroll
      for (int which = 0; which < instructions_a_panel; ++which) multiply_panels(partial, tokens_, weights(p), which, which == 0);
      cute::warpgroup_commit_batch();
      LargeTurns<Shape>::pass(me_.warpgroup);
      finish(partial);
      const int stage = at_.operands.stage;
      if (p == pieces - 1 && !stepped) leave();
      promote<stepped>(partial, scales.of(p), stage, p, sums.piece[p]);
      if (p == pieces - 1 && stepped) leave();
    }
  }

  /// Groups of 32: a promotion each.
  __device__ __forceinline__ void run_finely(LargeSums<pieces>& sums) {
    Partial partial;
    wait();
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
#pragma unroll 1
      for (int group = 0; group < instructions_a_panel; ++group) {
        begin(partial);
        multiply_panels(partial, tokens_, weights(p), group, true);
        cute::warpgroup_commit_batch();
        finish(partial);
        const Factors factors = load_scales(group).of(p);
        if (stepped()) {
          promote<true>(partial, factors, at_.operands.stage, p, sums.piece[p]);
        } else {
          promote<false>(partial, factors, at_.operands.stage, p, sums.piece[p]);
        }
      }
    }
    leave();
  }

  __device__ bool stepped() const { return weight_scale(Shape::kind) == WeightScale::by_step && plan_.step_exponents; }

  __device__ void wait() const {
    if (!operands_there_) shared_.operand_ring().wait_full(at_.operands);
    if (!rows_there_) shared_.row_ring.wait_full(at_.rows);
  }
  /// The tensor cores have read the stage, this warp's scales are in registers.
  __device__ void leave() {
    shared_.operand_ring().leave_together(at_.operands);
    shared_.row_ring.leave_together(at_.rows);
    at_.operands.advance();
    at_.rows.advance();
    look_ahead();
  }
  /// What the next stage's first product needs, while this one is promoted.
  __device__ void look_ahead() {
    tokens_ = panel_descriptor(shared_.rows[at_.rows.stage] + me_.first_token * panel_bytes);
    weights_ = panel_descriptor(shared_.operands(at_.operands.stage) + me_.first_piece * piece_bytes);
    operands_there_ = shared_.operand_ring().is_full(at_.operands);
    rows_there_ = shared_.row_ring.is_full(at_.rows);
  }

  __device__ std::uint64_t weights(int p) const { return weights_ + static_cast<std::uint64_t>(p * piece_bytes >> 4); }
  __device__ static void begin(Partial& partial) {
    hold(partial);
    cute::warpgroup_arrive();
  }
  __device__ static void finish(Partial& partial) {
    cute::warpgroup_wait<0>();
    hold(partial);
  }

  __device__ Scales load_scales(int group) const {
    const float* tokens = shared_.scales[at_.rows.stage] + group * Shape::most_tokens + me_.token();
    Scales scales;
    scales.token[0] = tokens[0];
    scales.token[1] = tokens[8];
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      scales.block[p] = {1.0f, 1.0f};
      if constexpr (weight_scale(Shape::kind) == WeightScale::by_block) {
        scales.block[p] = block_scales(shared_.operands(at_.operands.stage) + block_offset_[p]);
      }
    }
    return scales;
  }

  /// Powers of two of the step for two weight rows.
  __device__ RowPair step_pair(int stage, int p, int row) const {
    const auto both = detail::load<std::uint16_t>(shared_.operands(stage) + Shape::operand_bytes +
                                                  (me_.first_piece + p) * slabs_a_piece * slab_rows + row);
    return {float_from_bits((both & 0xFFu) << 23), float_from_bits((both & 0xFF00u) << 15)};
  }

  template <bool stepped>
  __device__ __forceinline__ void promote(const Partial& partial, const Factors& factors, int stage, int p,
                                          float (&total)[64]) const {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      RowPair step = {1.0f, 1.0f};
      if constexpr (stepped) step = step_pair(stage, p, 8 * j + me_.column());
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        float factor = factors.of[v / 2][j % 2];
        if constexpr (stepped) factor *= v % 2 == 0 ? step.low : step.high;
        total[4 * j + v] = __fmaf_rn(partial[4 * j + v], factor, total[4 * j + v]);
      }
    }
  }

  static constexpr int piece_bytes = slabs_a_piece * slab_rows * panel_bytes;

  Shared<Shape>& shared_;
  LargeRings<Shape>& at_;
  const WeightPlan& plan_;
  const LargePosition& me_;
  TokenScales scales_;
  int block_offset_[pieces];  ///< of the pieces' block scales in a stage

  // Of the stage that comes next.
  std::uint64_t tokens_;
  std::uint64_t weights_;
  bool operands_there_;
  bool rows_there_;
};

}  // namespace heddle::sm90
