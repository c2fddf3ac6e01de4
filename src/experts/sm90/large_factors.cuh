// Factors of weight rows that may wait until a task's sums are there, for large row blocks.
#pragma once

#include <algorithm>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm80.hpp>

#include "experts/sm90/large_mainloop.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {

/// Factors of a tile's weight rows, which a warpgroup brings for itself while it multiplies. Kinds without have nothing to do.
template <class Shape>
class LargeRowFactors {
 public:
  static constexpr bool there = slab_shape(Shape::kind).row_scales;

  __device__ LargeRowFactors(Shared<Shape>& shared, const LargePosition& me) : shared_(shared), me_(me) {}

  __device__ void fetch(const OrderedMatrix& weights, const Task& task) const {
    if constexpr (there) {
      meet();  // nobody needs the last task's any more
      const int first = task.tile * tile_slabs * slab_rows;
      float* factors = shared_.widened.row_factors[me_.warpgroup];
#pragma unroll
      for (int i = 0; i < tile_slabs * slab_rows / warpgroup_threads; ++i) {
        const int row = me_.thread + i * warpgroup_threads;
        const float& from = weights.row_scales_of(task.expert)[min(first + row, weights.plan.rows - 1)];
        cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(from, factors[row]);
      }
      cute::cp_async_fence();
    }
  }

  /// All of them have arrived, for all threads of the warpgroup, who call this together.
  __device__ __forceinline__ void arrive() const {
    if constexpr (there) {
      cute::cp_async_wait<0>();
      meet();
    }
  }

  /// Multiplies sums of the tile's weight rows from `first` on, as the tensor cores hold them: eights of rows.
  template <int values>
  __device__ __forceinline__ void multiply(float* sum, int first) const {
    if constexpr (there) {
      const float* factors = shared_.widened.row_factors[me_.warpgroup] + first + me_.column();
#pragma unroll
      for (int j = 0; j < values / 4; ++j) {
        const auto pair = *reinterpret_cast<const float2*>(factors + 8 * j);
#pragma unroll
        for (int v = 0; v < 4; ++v) sum[4 * j + v] *= v % 2 == 0 ? pair.x : pair.y;
      }
    }
  }

 private:
  /// Barrier 1 is that of all math threads.
  __device__ void meet() const {
    cutlass::arch::NamedBarrier::sync(warpgroup_threads, static_cast<std::uint32_t>(2 + me_.warpgroup));
  }

  Shared<Shape>& shared_;
  const LargePosition& me_;
};

}  // namespace heddle::sm90
