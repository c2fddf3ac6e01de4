// The main loop of the tile engine: a math warpgroup multiplies its slabs with the tokens of a task.
//
// Products run 128 of K at a time in the tensor cores' own order; then each partial sum is promoted:
// total = fmaf(partial, token scale x weight scale, total), K ascending. Neither the tile's size nor the number of
// warpgroups changes that, so it does not change a bit. While products run, the next slab is widened.
#pragma once

#include <cstdint>

#include "experts/sm90/call.hpp"
#include "experts/sm90/product.cuh"
#include "experts/sm90/ring.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tile.hpp"
#include "experts/sm90/widen.hpp"

namespace heddle::sm90 {

/// Sums of the slabs of one warpgroup, as the tensor cores hold them: value [4 i + v] of a slab is weight row
/// 16 warp + lane / 4 + 8 (v / 2) and token 8 i + 2 (lane % 4) + v % 2.
template <class Shape, int tokens>
struct Sums {
  float slab[Shape::slabs][tokens / 2];
};

/// Where a math warpgroup is in both rings, and what it multiplies.
template <class Shape>
struct MathPosition {
  RingPosition<Shape::weight_stages> weights;
  RingPosition<Shape::row_stages> rows;
};

/// One warpgroup's work on one task.
template <class Shape, int tokens>
class MainLoop {
 public:
  /// The warpgroup's slabs begin with `first_slab` of the tile, which has `tile_has`. One that the tile lacks is the last one
  /// once more, and nobody stores the result: products must not hang on a branch.
  __device__ MainLoop(Shared<Shape>& shared, MathPosition<Shape>& at, const WeightPlan& plan, int first_slab, int tile_has,
                      TokenScales scales)
      : shared_(shared), at_(at), plan_(plan), tile_has_(tile_has), scales_(scales) {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
      slab_[slab] = first_slab + slab < tile_has ? first_slab + slab : tile_has - 1;
    }
  }

  /// Multiplies `stages` stages; `constant` are the weight scales that hold for all of K, by slab.
  __device__ void run(int stages, const RowPair (&constant)[Shape::slabs], Sums<Shape, tokens>& sums) {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
#pragma unroll
      for (float& value : sums.slab[slab]) value = 0.0f;
    }
    constant_ = constant;
    if (scales_ == TokenScales::by_32) {
      for (int stage = 0; stage < stages; ++stage) run_finely(sums);
      return;
    }
    if constexpr (overlapped) {
      std::uint32_t even[slab_registers];
      std::uint32_t odd[slab_registers];
      shared_.weight_ring.wait_full(at_.weights);
      load(even, 0);
      int stage = 0;
      for (; stage + 1 < stages; stage += 2) {
        run_stage(even, odd, sums, true);
        if constexpr (items % 2 == 1) {
          run_stage(odd, even, sums, stage + 2 < stages);
        } else {
          run_stage(even, odd, sums, stage + 2 < stages);
        }
      }
      if (stage < stages) run_stage(even, odd, sums, false);
    } else {
      for (int stage = 0; stage < stages; ++stage) run_in_turn(sums);
    }
  }

 private:
  /// Register loads of a stage: every panel of every slab.
  static constexpr int items = Shape::slabs * Shape::parts;
  static constexpr bool changes_by_step =
      weight_scale(Shape::kind) == WeightScale::by_block || weight_scale(Shape::kind) == WeightScale::by_step;
  /// Tokens of one product: large row blocks are multiplied in two pieces, or partial sums would not fit beside the sums.
  static constexpr int piece = tokens <= 96 ? tokens : 64;
  static constexpr int pieces = tokens / piece;
  static_assert(pieces == 1 || Shape::parts == 1, "a partial sum is of one panel, or of one piece");
  using Partial = float[piece / 2];
  /// A second set of weight registers lets products run while the next slab is widened. Where there is nothing to widen, or no
  /// room for it, the products of one warpgroup run while another one loads.
  static constexpr bool overlapped =
      Shape::slabs == 1 || (Shape::kind != WeightKind::fp8_block && Shape::slabs * tokens / 2 + piece / 2 <= 144);

  __device__ void load(std::uint32_t (&a)[slab_registers], int item) {
    const int slab = item / Shape::parts;
    const int part = item % Shape::parts;
    const std::byte* chunk = shared_.weights[at_.weights.stage] + part * plan_.chunk_bytes_of(tile_has_);
    const std::byte* scales = chunk + plan_.scales_offset(tile_has_, slab_[slab]);
    const int thread = static_cast<int>(threadIdx.x) % warpgroup_threads;
    load_slab<Shape::kind>(chunk + plan_.data_offset(slab_[slab]), scales, thread, a);
    if constexpr (weight_scale(Shape::kind) == WeightScale::by_block) next_ = block_scales(scales);
    if constexpr (weight_scale(Shape::kind) == WeightScale::by_step) {
      if (plan_.step_exponents) next_ = step_factors(scales, thread);
    }
  }

  __device__ RowPair step_weight(int slab) const {
    if constexpr (changes_by_step) return next_;
    if constexpr (weight_scale(Shape::kind) == WeightScale::constant) return constant_[slab];
    return {1.0f, 1.0f};
  }

  /// `a` holds the stage's first item; afterwards the next stage's, if there is one: in `a` if items are even, else in `b`.
  __device__ void run_stage(std::uint32_t (&a)[slab_registers], std::uint32_t (&b)[slab_registers], Sums<Shape, tokens>& sums,
                            bool more) {
    Partial partial;
    shared_.row_ring.wait_full(at_.rows);
#pragma unroll
    for (int item = 0; item < items; ++item) {
      std::uint32_t(&current)[slab_registers] = item % 2 == 0 ? a : b;
      std::uint32_t(&following)[slab_registers] = item % 2 == 0 ? b : a;
      const int slab = item / Shape::parts;
      const RowPair weight = step_weight(slab);
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
        start(partial, current, item % Shape::parts, p);
        if (p == pieces - 1) prepare(following, item + 1, more);
        finish(partial);
        if (item % Shape::parts == Shape::parts - 1) promote(partial, 0, weight, p, sums.slab[slab]);
      }
    }
    leave_rows();
  }

  /// The item after this one: of this stage or, if there are more, of the next.
  __device__ void prepare(std::uint32_t (&a)[slab_registers], int item, bool more) {
    if (item < items) {
      load(a, item);
      return;
    }
    leave_weights();
    if (more) {
      shared_.weight_ring.wait_full(at_.weights);
      load(a, 0);
    }
  }

  /// A stage with one set of weight registers.
  __device__ void run_in_turn(Sums<Shape, tokens>& sums) {
    Partial partial;
    shared_.weight_ring.wait_full(at_.weights);
    shared_.row_ring.wait_full(at_.rows);
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int slab = item / Shape::parts;
      std::uint32_t a[slab_registers];
      load(a, item);
      if (item == items - 1) leave_weights();
      const RowPair weight = step_weight(slab);
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
        start(partial, a, item % Shape::parts, p);
        finish(partial);
        if (item % Shape::parts == Shape::parts - 1) promote(partial, 0, weight, p, sums.slab[slab]);
      }
    }
    leave_rows();
  }

  /// Groups of 32: a promotion each, nothing overlapped.
  __device__ void run_finely(Sums<Shape, tokens>& sums) {
    constexpr int groups_a_panel = instructions_a_panel / Shape::parts;  // 32 of K: one instruction of e4m3, two of bf16
    shared_.weight_ring.wait_full(at_.weights);
    shared_.row_ring.wait_full(at_.rows);
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int slab = item / Shape::parts;
      const int part = item % Shape::parts;
      std::uint32_t a[slab_registers];
      Partial partial;
      load(a, item);
      const RowPair weight = step_weight(slab);
#pragma unroll
      for (int step = 0; step < pieces * groups_a_panel; ++step) {
        const int p = step / groups_a_panel;
        const int group = step % groups_a_panel;
        begin(partial, a);
#pragma unroll
        for (int which = 0; which < Shape::parts; ++which) {
          multiply_part<Shape::operand, piece>(partial, a, group * Shape::parts + which, panel(part, p), which == 0);
        }
        cute::warpgroup_commit_batch();
        finish(partial);
        promote(partial, part * groups_a_panel + group, weight, p, sums.slab[slab]);
      }
    }
    leave_weights();
    leave_rows();
  }

  __device__ std::uint64_t panel(int part, int p) const {
    return panel_descriptor(shared_.rows[at_.rows.stage] + (part * Shape::most_tokens + p * piece) * panel_bytes);
  }
  __device__ static void begin(Partial& partial, std::uint32_t (&a)[slab_registers]) {
    hold(partial);
    hold(a);
    cute::warpgroup_arrive();
  }
  __device__ void start(Partial& partial, std::uint32_t (&a)[slab_registers], int part, int p) {
    begin(partial, a);
#pragma unroll
    for (int which = 0; which < instructions_a_panel; ++which) {
      multiply_part<Shape::operand, piece>(partial, a, which, panel(part, p), part == 0 && which == 0);
    }
    cute::warpgroup_commit_batch();
  }
  __device__ static void finish(Partial& partial) {
    cute::warpgroup_wait<0>();
    hold(partial);
  }

  __device__ void promote(const Partial& partial, int group, const RowPair& weight, int p, float (&total)[tokens / 2]) const {
    constexpr WeightScale kind = weight_scale(Shape::kind);
    constexpr bool weighted = kind == WeightScale::by_block || kind == WeightScale::constant;
    if constexpr (kind == WeightScale::by_step) {
      if (plan_.step_exponents) {
        promote_by<true, true>(partial, group, weight, p, total);
      } else {
        promote_by<false, true>(partial, group, weight, p, total);
      }
    } else if constexpr (Shape::operand == Operand::e4m3) {  // whose tokens always have scales
      promote_by<weighted, true>(partial, group, weight, p, total);
    } else if (scales_ != TokenScales::none) {
      promote_by<weighted, true>(partial, group, weight, p, total);
    } else {
      promote_by<weighted, false>(partial, group, weight, p, total);
    }
  }

  /// total = fmaf(partial, token scale x weight scale, total).
  template <bool weighted, bool scaled>
  __device__ void promote_by(const Partial& partial, int group, const RowPair& weight, int p, float (&total)[tokens / 2]) const {
    const float* scales = shared_.scales[at_.rows.stage] + group * Shape::most_tokens + p * piece + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < piece / 8; ++i) {
      float2 token = {1.0f, 1.0f};
      if constexpr (scaled) token = *reinterpret_cast<const float2*>(scales + 8 * i);
      const float low[2] = {weighted ? token.x * weight.low : token.x, weighted ? token.y * weight.low : token.y};
      const float high[2] = {weighted ? token.x * weight.high : token.x, weighted ? token.y * weight.high : token.y};
      float* sum = total + p * piece / 2 + 4 * i;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        sum[v] = __fmaf_rn(partial[4 * i + v], low[v], sum[v]);
        sum[2 + v] = __fmaf_rn(partial[4 * i + 2 + v], high[v], sum[2 + v]);
      }
    }
  }

  /// The stage's weights are in registers, this warp's share of them at least.
  __device__ void leave_weights() {
    __syncwarp();
    if (threadIdx.x % warp_threads == 0) shared_.weight_ring.leave(at_.weights);
    at_.weights.advance();
  }
  __device__ void leave_rows() {
    __syncwarp();
    if (threadIdx.x % warp_threads == 0) shared_.row_ring.leave(at_.rows);
    at_.rows.advance();
  }

  Shared<Shape>& shared_;
  MathPosition<Shape>& at_;
  const WeightPlan& plan_;
  int tile_has_;
  TokenScales scales_;
  int slab_[Shape::slabs];
  RowPair next_ = {1.0f, 1.0f};
  const RowPair* constant_ = nullptr;
};

}  // namespace heddle::sm90
