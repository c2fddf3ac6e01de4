// The roles that fill the rings: one thread streams weights, a warp fetches token scales; row_loaders.cuh brings the tokens' rows.
// Each works through the tasks by itself, so weights run ahead while rows are still on their way.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"
#include "experts/sm90/widen.hpp"
#include "formats/codes.hpp"

namespace heddle::sm90 {

/// Calls task(Task) for every task of this CTA.
template <class Work>
__device__ void for_tasks(const TaskList& tasks, const Work& work) {
  const int count = tasks.count();
  for (int index = static_cast<int>(blockIdx.x); index < count; index += static_cast<int>(gridDim.x)) work(tasks.find(index));
}

/// Streams the chunks of every task, a stage a bulk copy. By one thread.
template <class Shape>
__device__ void load_weights(Shared<Shape>& shared, const OrderedMatrix& weights, const TaskList& tasks) {
  RingPosition<Shape::weight_stages> at;
  const int stages = weights.plan.steps() / Shape::parts;
  for_tasks(tasks, [&](const Task& task) {
    const int bytes = Shape::parts * weights.plan.chunk_bytes(task.tile);
    const std::byte* from = weights.chunk(task.expert, task.tile, 0);
    for (int stage = 0; stage < stages; ++stage) {
      shared.weight_ring.wait_empty(at);
      shared.weight_ring.expect(at, bytes);
      cute::SM90_BULK_COPY_G2S::copy(from, &shared.weight_ring.full[at.stage], shared.weights[at.stage], bytes);
      from += bytes;
      at.advance();
    }
  });
}

/// Fetches token scales, widened to f32. By one warp. Scales of 128 values, the usual ones, come in batches: of four stages where a
/// word holds four of them, else of two, so that the next batch is on its way while this one is given.
template <class Shape>
class ScaleLoader {
 public:
  __device__ ScaleLoader(Shared<Shape>& shared, const TokenRows& tokens, const OrderedMatrix& weights)
      : shared_(shared),
        tokens_(tokens),
        weights_(weights),
        groups_((weights.plan.cols + group_of(tokens) - 1) / group_of(tokens)),
        lane_(static_cast<int>(threadIdx.x) % warp_threads) {}

  __device__ void load(const Task& task, int stages) {
    rows_ = task.rows;
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (is_row(i)) place_[i] = static_cast<std::uint32_t>(tokens_.map.place(task, lane_ + warp_threads * i));
    }
    if (tokens_.scaling == TokenScales::by_32) {
      for (int stage = 0; stage < stages; ++stage) fill(stage, 4);
    } else if (tokens_.format == ScaleFormat::ue8m0) {
      load_batches<ScaleFormat::ue8m0>(task, stages);
    } else {
      load_batches<ScaleFormat::f32>(task, stages);
    }
  }

 private:
  static constexpr int rows_a_lane = (Shape::most_tokens + warp_threads - 1) / warp_threads;
  static constexpr bool multiplies = weight_scale(Shape::kind) == WeightScale::by_block;

  /// Scales on their way: words of tokens, and the two scales of the tile's weights.
  template <ScaleFormat format>
  struct Batch {
    static constexpr int stages = format == ScaleFormat::ue8m0 ? 4 : 2;
    static constexpr int words = format == ScaleFormat::ue8m0 ? 1 : stages;
    std::uint32_t token[words][rows_a_lane];
    RowPair weight[multiplies ? stages : 1];
  };

  __device__ static int group_of(const TokenRows& tokens) { return tokens.scaling == TokenScales::by_32 ? 32 : 128; }
  __device__ bool is_row(int i) const { return lane_ + warp_threads * i < rows_; }
  __device__ const std::byte* from(int i) const { return tokens_.scales + place_[i] * tokens_.scale_stride; }

  template <ScaleFormat format>
  __device__ void load_batches(const Task& task, int stages) {
    using Batches = Batch<format>;
    Batches now;
    Batches next;
    fetch(now, task, 0, stages);
    for (int first = 0; first < stages; first += Batches::stages) {
      fetch(next, task, first + Batches::stages, stages);
#pragma unroll
      for (int i = 0; i < Batches::stages; ++i) {
        if (first + i < stages) give(now, i);
      }
      now = next;
    }
  }

  template <ScaleFormat format>
  __device__ void fetch(Batch<format>& batch, const Task& task, int first, int stages) const {
    constexpr int scales_a_word = Batch<format>::stages / Batch<format>::words;
#pragma unroll
    for (int word = 0; word < Batch<format>::words; ++word) {
#pragma unroll
      for (int i = 0; i < rows_a_lane; ++i) {
        const int index = first / scales_a_word + word;
        const bool there = is_row(i) && first + word * scales_a_word < groups_;
        batch.token[word][i] = there ? __ldg(reinterpret_cast<const std::uint32_t*>(from(i)) + index) : 0u;
      }
    }
    if constexpr (multiplies) {
#pragma unroll
      for (int i = 0; i < Batch<format>::stages; ++i) batch.weight[i] = tile_scales(task, min(first + i, stages - 1));
    }
  }

  /// The two weight scales of a tile's step: gate's and up's, or those of its first and its last 128 rows.
  __device__ RowPair tile_scales(const Task& task, int step) const {
    const WeightPlan& plan = weights_.plan;
    const int has = plan.slabs_of(task.tile);
    const std::byte* chunk = weights_.chunk(task.expert, task.tile, step);
    const auto* first = reinterpret_cast<const float*>(chunk + plan.scales_offset(has, 0));
    const auto* last = reinterpret_cast<const float*>(chunk + plan.scales_offset(has, min(2, has - 1)));
    return {__ldg(first), plan.paired ? __ldg(first + 1) : __ldg(last)};
  }

  template <ScaleFormat format>
  __device__ void give(const Batch<format>& batch, int which) {
    constexpr int scales_a_word = Batch<format>::stages / Batch<format>::words;
    shared_.row_ring.wait_empty(at_);
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (!is_row(i)) break;
      const std::uint32_t word = batch.token[which / scales_a_word][i];
      const float scale = format == ScaleFormat::ue8m0 ? from_ue8m0(static_cast<std::uint8_t>(word >> (8 * (which % scales_a_word))))
                                                       : float_from_bits(word);
      float* to = shared_.scales[at_.stage] + scale_place(lane_ + warp_threads * i);
      if constexpr (multiplies) {
        to[0] = scale * batch.weight[which].low;
        to[Shape::most_tokens] = scale * batch.weight[which].high;
      } else {
        to[0] = scale;
      }
    }
    filled();
  }

  /// One stage's scales straight from memory: `count` groups a token.
  __device__ void fill(int stage, int count) {
    shared_.row_ring.wait_empty(at_);
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (!is_row(i)) break;
      for (int group = 0; group < count; ++group) {
        const int index = min(stage * count + group, groups_ - 1);  // beyond the last one tokens are zeros: any finite scale
        const float scale = tokens_.format == ScaleFormat::ue8m0 ? from_ue8m0(static_cast<std::uint8_t>(from(i)[index]))
                                                                 : reinterpret_cast<const float*>(from(i))[index];
        shared_.scales[at_.stage][group * Shape::most_tokens + scale_place(lane_ + warp_threads * i)] = scale;
      }
    }
    filled();
  }

  __device__ void filled() {
    __syncwarp();
    if (lane_ == 0) shared_.row_ring.filled(at_);
    at_.advance();
  }

  Shared<Shape>& shared_;
  const TokenRows& tokens_;
  const OrderedMatrix& weights_;
  int groups_;
  int lane_;
  int rows_ = 0;
  std::uint32_t place_[rows_a_lane];
  RingPosition<Shape::row_stages> at_;
};

}  // namespace heddle::sm90
