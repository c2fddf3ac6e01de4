// The main loop of the tile engine: a math warpgroup multiplies its slabs with the tokens of a task.
//
// Products run 128 of K at a time in the tensor cores' own order; then each partial sum is promoted:
// total = fmaf(partial, token scale x weight scale, total), K ascending. Neither the tile's size nor the number of
// warpgroups changes that, so it does not change a bit. While products run, the next slab is widened.
#pragma once

#include <cstdint>

#include "experts/sm90/call.hpp"
#include "experts/sm90/chunk.cuh"
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
      : shared_(shared), at_(at), plan_(plan), warpgroup_(first_slab / Shape::slabs), tile_has_(tile_has), scales_(scales) {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
      slab_[slab] = first_slab + slab < tile_has ? first_slab + slab : tile_has - 1;
    }
  }

  /// Multiplies `stages` stages; `constant` are the weight scales that hold for all of K, by slab.
  __device__ __forceinline__ void run(int stages, const RowPair (&constant)[Shape::slabs], Sums<Shape, tokens>& sums) {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
#pragma unroll
      for (float& value : sums.slab[slab]) value = 0.0f;
    }
    constant_ = constant;
    constexpr bool always_scaled = Shape::operand == Operand::e4m3;
    if constexpr (!is_plain<Shape>()) {
      if (scales_ == TokenScales::by_32) {
        for (int stage = 0; stage < stages; ++stage) run_finely(sums);
        return;
      }
      if (!always_scaled && scales_ == TokenScales::none) {
        run_stages<false>(stages, sums);
        return;
      }
    }
    run_stages<true>(stages, sums);
  }

 private:
  /// Register loads of a stage: every panel of every slab.
  static constexpr int items = Shape::slabs * Shape::parts;
  /// Of these, those of a stage of the ring of weights.
  static constexpr int items_a_ring_stage = is_by_slab<Shape>() ? Shape::parts : items;
  __device__ static constexpr bool begins_ring_stage(int item) { return item % items_a_ring_stage == 0; }
  __device__ static constexpr bool ends_ring_stage(int item) { return item % items_a_ring_stage == items_a_ring_stage - 1; }
  static constexpr bool changes_by_step =
      weight_scale(Shape::kind) == WeightScale::by_block || weight_scale(Shape::kind) == WeightScale::by_step;
  static constexpr bool widens = is_widened(Shape::kind);
  /// Instructions' tokens: large tiles are multiplied in pieces, one behind the other, so that only the sums take registers for
  /// all.
  static constexpr int pieces = Shape::parts == 1 && tokens > 48 ? 2 : 1;
  static constexpr int piece_tokens = tokens / pieces;
  using Partial = float[piece_tokens / 2];
  using Chunk = ChunkView<Shape>;
  /// A second set of weight registers lets products run while the next slab is widened. Where there is nothing to widen, or no
  /// room for it, the products of one warpgroup run while another one loads.
  static constexpr bool overlapped =
      Shape::slabs == 1 || (Shape::kind != WeightKind::bf16 && Shape::slabs * tokens / 2 + tokens / 2 <= (widens ? 144 : 112));

  static_assert(!overlapped || !is_by_slab<Shape>(), "the next ring stage would be loaded from while products run");

  template <bool scaled>
  __device__ __forceinline__ void run_stages(int stages, Sums<Shape, tokens>& sums) {
    if constexpr (overlapped) {
      std::uint32_t even[slab_registers];
      std::uint32_t odd[slab_registers];
      Chunk::wait(shared_, at_.weights);
      load(even, 0);
      int stage = 0;
      for (; stage + 1 < stages; stage += 2) {
        run_stage<scaled>(even, odd, sums, true);
        if constexpr (items % 2 == 1) {
          run_stage<scaled>(odd, even, sums, stage + 2 < stages);
        } else {
          run_stage<scaled>(even, odd, sums, stage + 2 < stages);
        }
      }
      if (stage < stages) run_stage<scaled>(even, odd, sums, false);
    } else {
      for (int stage = 0; stage < stages; ++stage) run_in_turn<scaled>(sums);
    }
  }

  __device__ __forceinline__ void load(std::uint32_t (&a)[slab_registers], int item) {
    const int slab = item / Shape::parts;
    const int part = item % Shape::parts;
    const std::byte* data = Chunk::data(shared_, at_.weights, plan_, tile_has_, warpgroup_, slab_[slab], part);
    const std::byte* scales = Chunk::scales(shared_, at_.weights, plan_, tile_has_, slab_[slab], part);
    const int thread = static_cast<int>(threadIdx.x) % warpgroup_threads;
    load_slab<Shape::kind>(data, scales, thread, a);
    if constexpr (weight_scale(Shape::kind) == WeightScale::by_block) next_ = block_scales(scales);
    if constexpr (weight_scale(Shape::kind) == WeightScale::by_step) {
      if (steps()) next_ = step_factors(scales, thread);
    }
  }

  __device__ RowPair step_weight(int slab) const {
    if constexpr (changes_by_step) return next_;
    if constexpr (weight_scale(Shape::kind) == WeightScale::constant) return constant_[slab];
    return {1.0f, 1.0f};
  }

  /// `a` holds the stage's first item; afterwards the next stage's, if there is one: in `a` if items are even, else in `b`.
  template <bool scaled>
  __device__ __forceinline__ void run_stage(std::uint32_t (&a)[slab_registers], std::uint32_t (&b)[slab_registers],
                                            Sums<Shape, tokens>& sums, bool more) {
    Partial partial;
    shared_.row_ring.wait_full(at_.rows);
#pragma unroll
    for (int item = 0; item < items; ++item) {
      std::uint32_t(&current)[slab_registers] = item % 2 == 0 ? a : b;
      std::uint32_t(&following)[slab_registers] = item % 2 == 0 ? b : a;
      const int slab = item / Shape::parts;
      const RowPair weight = step_weight(slab);
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        start(partial, current, item % Shape::parts, piece);
        if (piece == 0) {
          prepare(following, item + 1, more);
          if constexpr (widens) hold(following);  // now, while the products run, not when they are waited for
        }
        finish(partial);
        if (item % Shape::parts == Shape::parts - 1) promote<scaled>(partial, 0, piece, weight, sums.slab[slab]);
      }
    }
    leave_rows();
  }

  /// The item after this one: of this stage or, if there are more, of the next.
  __device__ __forceinline__ void prepare(std::uint32_t (&a)[slab_registers], int item, bool more) {
    if (item < items) {
      load(a, item);
      return;
    }
    leave_weights();
    if (more) {
      Chunk::wait(shared_, at_.weights);
      load(a, 0);
    }
  }

  /// A stage with one set of weight registers.
  template <bool scaled>
  __device__ __forceinline__ void run_in_turn(Sums<Shape, tokens>& sums) {
    Partial partial;
    shared_.row_ring.wait_full(at_.rows);
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int slab = item / Shape::parts;
      std::uint32_t a[slab_registers];
      if (begins_ring_stage(item)) Chunk::wait(shared_, at_.weights);
      load(a, item);
      const RowPair weight = step_weight(slab);
      static_assert(overlapped || pieces == 1);
      start(partial, a, item % Shape::parts, 0);
      if (ends_ring_stage(item)) leave_weights();  // the products have begun, so all loads have arrived
      finish(partial);
      if (item % Shape::parts == Shape::parts - 1) promote<scaled>(partial, 0, 0, weight, sums.slab[slab]);
    }
    leave_rows();
  }

  /// Groups of 32: a promotion each, nothing overlapped.
  __device__ __forceinline__ void run_finely(Sums<Shape, tokens>& sums) {
    constexpr int groups_a_panel = instructions_a_panel / Shape::parts;  // 32 of K: one instruction of e4m3, two of bf16
    shared_.row_ring.wait_full(at_.rows);
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int slab = item / Shape::parts;
      const int part = item % Shape::parts;
      std::uint32_t a[slab_registers];
      Partial partial;
      if (begins_ring_stage(item)) Chunk::wait(shared_, at_.weights);
      load(a, item);
      const RowPair weight = step_weight(slab);
#pragma unroll
      for (int index = 0; index < groups_a_panel * pieces; ++index) {
        const int group = index / pieces;
        const int piece = index % pieces;
        begin(partial, a);
#pragma unroll
        for (int which = 0; which < Shape::parts; ++which) {
          multiply_part<Shape::operand, piece_tokens>(partial, a, group * Shape::parts + which, panel(part, piece), which == 0);
        }
        cute::warpgroup_commit_batch();
        finish(partial);
        promote<true>(partial, part * groups_a_panel + group, piece, weight, sums.slab[slab]);
      }
      if (ends_ring_stage(item)) leave_weights();
    }
    leave_rows();
  }

  __device__ bool steps() const { return !is_plain<Shape>() && plan_.step_exponents; }
  __device__ std::uint64_t panel(int part, int piece) const {
    return panel_descriptor(shared_.rows[at_.rows.stage] + (part * Shape::most_tokens + piece * piece_tokens) * panel_bytes);
  }
  __device__ static void begin(Partial& partial, std::uint32_t (&a)[slab_registers]) {
    hold(partial);
    hold(a);
    cute::warpgroup_arrive();
  }
  __device__ void start(Partial& partial, std::uint32_t (&a)[slab_registers], int part, int piece) {
    begin(partial, a);
#pragma unroll
    for (int which = 0; which < instructions_a_panel; ++which) {
      multiply_part<Shape::operand, piece_tokens>(partial, a, which, panel(part, piece), part == 0 && which == 0);
    }
    cute::warpgroup_commit_batch();
  }
  __device__ static void finish(Partial& partial) {
    cute::warpgroup_wait<0>();
    hold(partial);
  }

  /// total = fmaf(partial, token scale x weight scale, total) for the piece's tokens, with the token scales of group `group` of the
  /// stage.
  template <bool scaled>
  __device__ __forceinline__ void promote(const Partial& partial, int group, int piece, const RowPair& weight,
                                          float (&total)[tokens / 2]) const {
    const int place = group * Shape::most_tokens + piece * piece_tokens;
    float* sums = total + piece * (piece_tokens / 2);
    if constexpr (weight_scale(Shape::kind) == WeightScale::by_step) {
      if (steps()) {
        promote_by<scaled, true>(partial, place, weight, sums);
      } else {
        promote_by<scaled, false>(partial, place, weight, sums);
      }
    } else {
      constexpr bool weighted = changes_by_step || weight_scale(Shape::kind) == WeightScale::constant;
      promote_by<scaled, weighted>(partial, place, weight, sums);
    }
  }

  template <bool scaled, bool weighted>
  __device__ __forceinline__ void promote_by(const Partial& partial, int place, const RowPair& weight, float* total) const {
    constexpr int eights = piece_tokens == 8 ? 1 : piece_tokens == 16 ? 2 : 4;  // of tokens, whose scales a thread loads at once
    const int begin = static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
    for (int first = 0; first < piece_tokens / 8; first += eights) {
      float scales[2 * eights];
      load_factors<scaled>(shared_.scales[at_.rows.stage], place + begin + 8 * first, scales);
#pragma unroll
      for (int i = 0; i < 2 * eights && first + i / 2 < piece_tokens / 8; ++i) {
        const int at = 4 * first + i / 2 * 4 + i % 2;
        const float low = weighted ? scales[i] * weight.low : scales[i];
        const float high = weighted ? scales[i] * weight.high : scales[i];
        float* sum = total + at;
        sum[0] = __fmaf_rn(partial[at], low, sum[0]);
        sum[2] = __fmaf_rn(partial[at + 2], high, sum[2]);
      }
    }
  }

  /// Token scales from place `place` of a stage.
  template <bool scaled, int count>
  __device__ static void load_factors(const float* stage, int place, float (&scales)[count]) {
    if constexpr (!scaled) {
#pragma unroll
      for (float& scale : scales) scale = 1.0f;
    } else if constexpr (count == 2) {
      const auto two = *reinterpret_cast<const float2*>(stage + place);
      scales[0] = two.x;
      scales[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        const auto four = *reinterpret_cast<const float4*>(stage + place + i);
        scales[i] = four.x;
        scales[i + 1] = four.y;
        scales[i + 2] = four.z;
        scales[i + 3] = four.w;
      }
    }
  }

  /// The stage's weights are in registers, this warp's share of them at least. Not only asked for: see ring.cuh.
  __device__ void leave_weights() { Chunk::leave(shared_, at_.weights); }
  __device__ void leave_rows() {
    shared_.row_ring.leave_together(at_.rows);
    at_.rows.advance();
  }

  Shared<Shape>& shared_;
  MathPosition<Shape>& at_;
  const WeightPlan& plan_;
  int warpgroup_, tile_has_;
  TokenScales scales_;
  int slab_[Shape::slabs];
  RowPair next_ = {1.0f, 1.0f};
  const RowPair* constant_ = nullptr;
};

}  // namespace heddle::sm90
