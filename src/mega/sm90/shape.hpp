// What the fused kernel's engine has of a CTA: the shapes of the products by themselves, less the memory of the other roles. A CTA
// has the same warps: math warpgroups, perhaps one that widens, and one of which a warp each takes tasks and streams weights,
// fetches token scales, fetches token rows, and dispatches.
#pragma once

#include "experts/sm90/chunk.cuh"
#include "experts/sm90/large_tile.hpp"
#include "experts/sm90/launch.hpp"
#include "mega/sm90/call.hpp"

namespace heddle::sm90 {

/// Tasks that are claimed and not done: the one that is computed, and those whose weights are on their way.
inline constexpr int task_slots = 4;
/// Rows that are fetched, or parts of them, on their way through the CTA.
inline constexpr int pull_slots = 4;
inline constexpr std::uint32_t pull_slot_bytes = 4224;
/// Of the other roles: counts, the call, tasks on their way with what they need a row, fetched rows.
constexpr int mega_bytes(int most_tokens) {
  return most_mega_counts * static_cast<int>(sizeof(int)) + 4 * 1024 + task_slots * most_tokens * 12 +
         pull_slots * static_cast<int>(pull_slot_bytes + 32);
}

namespace detail {
template <class Engine, bool tokens_first = Engine::tokens_first>
struct MegaShapeOf : Engine {
  static constexpr WeightKind shared_kind = Engine::kind;  ///< of the shared expert
  /// Half of the products' own: here memory is worth more as weights on their way (docs/performance.md).
  static constexpr int row_stages = (Engine::most_tokens <= 32 ? 8 : 4) / Engine::parts;
  static constexpr int weight_stages = Engine::weight_stages_beside(
      mega_bytes(Engine::most_tokens) - (Engine::row_stages - row_stages) * Engine::stage_bytes_of_rows);
  static_assert(weight_stages >= 2, "weights are to be on their way while products run");
};
template <class Engine>
struct MegaShapeOf<Engine, true> : Engine {
  static constexpr WeightKind shared_kind = Engine::kind;
  static constexpr int weight_stages = 3;
};
}  // namespace detail

template <WeightKind kind, RowBlocks blocks>
struct MegaShape : detail::MegaShapeOf<SmallBlocks<kind, true>> {};
template <WeightKind kind>
struct MegaShape<kind, RowBlocks::medium> : detail::MegaShapeOf<MediumBlocks<kind, true>> {};
template <WeightKind kind>
struct MegaShape<kind, RowBlocks::large> : detail::MegaShapeOf<LargeBlocks<kind, true>> {};
/// What the other roles leave has room for one stage of all slabs alone: nothing would be on its way while products run.
template <>
struct MegaShape<WeightKind::bf16, RowBlocks::large> : detail::MegaShapeOf<BySlab<LargeBlocks<WeightKind::bf16, true>>> {};

/// Beside a shared expert of another weight kind. The rings stay those of the routed experts, so nothing of theirs changes; a chunk
/// of the shared expert, which is larger than a stage, takes two.
template <WeightKind kind, WeightKind shared, RowBlocks blocks>
struct MegaPairShape : MegaShape<kind, blocks> {
  static constexpr WeightKind shared_kind = shared;
};

/// What such a shared expert's tasks work with.
template <class Shape>
using SharedTaskShape = InTwoStages<Shape, Shape::shared_kind>;

template <class Shape>
inline constexpr bool has_two_kinds = Shape::shared_kind != Shape::kind;

}  // namespace heddle::sm90
