// The roles that fill the rings: one thread streams weights, a warp fetches token scales; row_loaders.cuh brings the tokens' rows.
// Each works through the tasks at its own pace, so weights run ahead while rows are still on their way.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/chunk.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"
#include "formats/codes.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// Streams chunks, a stage a bulk copy. By one thread.
template <class Shape>
class WeightStream {
 public:
  __device__ explicit WeightStream(Shared<Shape>& shared) : shared_(shared) {}

  __device__ void load(const OrderedMatrix& weights, const Task& task) {
    if constexpr (is_in_two_stages<Shape>()) return load_halves(weights, task);
    if constexpr (is_by_slab<Shape>()) return load_slabs(weights, task);
    const int stages = weights.plan.steps() / Shape::parts;
    const int bytes = Shape::parts * weights.plan.chunk_bytes(task.tile);
    const std::byte* from = weights.chunk(task.expert, task.tile, 0);
    for (int stage = 0; stage < stages; ++stage) {
      put(from, bytes, task.blocks == 1);
      from += bytes;
    }
  }
  /// The same where chunks lie in two stages each (chunk.cuh).
  __device__ void load_halves(const OrderedMatrix& weights, const Task& task) {
    const int bytes = weights.plan.chunk_bytes(task.tile);
    const int first = first_half_bytes(weights.plan, task.tile);
    const std::byte* from = weights.chunk(task.expert, task.tile, 0);
    for (int step = 0; step < weights.plan.steps(); ++step) {
      put(from, first, task.blocks == 1);
      put(from + first, bytes - first, task.blocks == 1);
      from += bytes;
    }
  }

  /// The same where a stage has a slab of every math warpgroup, all of its parts: one that the tile lacks is its last one once
  /// more, as for the warpgroups (mainloop.cuh).
  __device__ void load_slabs(const OrderedMatrix& weights, const Task& task) {
    const WeightPlan& plan = weights.plan;
    const int bytes = plan.shape().data_bytes();
    const int last = plan.slabs_of(task.tile) - 1;
    const std::byte* from = weights.chunk(task.expert, task.tile, 0);
    for (int stage = 0; stage < plan.steps() / Shape::parts; ++stage) {
      for (int slab = 0; slab < Shape::slabs; ++slab) {
        begin(Shape::weight_stage_bytes);
        for (int place = 0; place < Shape::warpgroups * Shape::parts; ++place) {
          const int number = min(place / Shape::parts * Shape::slabs + slab, last);
          const int part = place % Shape::parts;
          copy(from + part * plan.chunk_bytes(task.tile) + plan.data_offset(number), place * bytes, bytes, task.blocks == 1);
        }
        at_.advance();
      }
      from += Shape::parts * plan.chunk_bytes(task.tile);
    }
  }

 private:
  __device__ __forceinline__ void put(const std::byte* from, int bytes, bool once) {
    begin(bytes);
    copy(from, 0, bytes, once);
    at_.advance();
  }
  __device__ __forceinline__ void begin(int bytes) {
    shared_.weight_ring.wait_empty(at_);
    shared_.weight_ring.expect(at_, bytes);
  }
  /// To byte `place` of the stage. once: nobody else wants them; else the other row blocks' CTAs shall find them in the L2.
  __device__ __forceinline__ void copy(const std::byte* from, int place, int bytes, bool once) {
    std::byte* to = shared_.weights[at_.stage] + place;
    if (once) {
      ptx::load_bulk_once(to, from, static_cast<std::uint32_t>(bytes), &shared_.weight_ring.full[at_.stage]);
    } else {
      cute::SM90_BULK_COPY_G2S::copy(from, &shared_.weight_ring.full[at_.stage], to, bytes);
    }
  }

  Shared<Shape>& shared_;
  RingPosition<Shape::weight_stages> at_;
};

/// How token rows may be read that were there before the launch: at once, and as what never changes.
struct Settled {
  /// Waits until the first `stages` stages of the task's rows are there.
  __device__ static void await(int) {}
  __device__ static std::uint32_t load(const std::uint32_t* word) { return __ldg(word); }
};

/// Fetches token scales, widened to f32 or its upper half. By one warp. Scales of 128 values, the usual ones, come in batches: of
/// four stages where a word holds four of them, else of two; the next batch is on its way while this one is given.
template <class Shape>
class ScaleLoader {
 public:
  __device__ explicit ScaleLoader(Shared<Shape>& shared) : shared_(shared), lane_(static_cast<int>(threadIdx.x) % warp_threads) {}

  /// Those of a task of `cols` columns. `access`: see Settled.
  template <class Access>
  __device__ void load(const TokenRows& tokens, int cols, const Task& task, int stages, Access& access) {
    scales_ = tokens.scales;
    stride_ = tokens.scale_stride;
    groups_ = tokens.scaling == TokenScales::by_32 ? (cols + 31) / 32 : (cols + 127) / 128;
    rows_ = task.rows;
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (is_row(i)) place_[i] = static_cast<std::uint32_t>(tokens.map.place(task, lane_ + warp_threads * i));
    }
    if constexpr (is_plain<Shape>()) {
      load_batches<ScaleFormat::ue8m0>(stages, access);
    } else if (tokens.scaling == TokenScales::by_32) {
      for (int stage = 0; stage < stages; ++stage) fill(tokens.format, stage, access);
    } else if (tokens.format == ScaleFormat::ue8m0) {
      load_batches<ScaleFormat::ue8m0>(stages, access);
    } else {
      load_batches<ScaleFormat::f32>(stages, access);
    }
  }

 private:
  static constexpr int rows_a_lane = (Shape::most_tokens + warp_threads - 1) / warp_threads;

  /// Words on their way.
  template <ScaleFormat format>
  struct Batch {
    static constexpr int stages = format == ScaleFormat::ue8m0 ? 4 : 2;
    static constexpr int stages_a_word = format == ScaleFormat::ue8m0 ? 4 : 1;
    std::uint32_t words[stages / stages_a_word][rows_a_lane];
  };

  __device__ bool is_row(int i) const { return lane_ + warp_threads * i < rows_; }
  __device__ const std::byte* from(int i) const { return scales_ + place_[i] * stride_; }

  template <ScaleFormat format, class Access>
  __device__ void load_batches(int stages, Access& access) {
    using Batches = Batch<format>;
    Batches now;
    Batches next;
    access.await(min(Batches::stages, stages));
    fetch<Access>(now, 0);
    for (int first = 0; first < stages; first += Batches::stages) {
      access.await(min(first + 2 * Batches::stages, stages));
      fetch<Access>(next, first + Batches::stages);
#pragma unroll
      for (int i = 0; i < Batches::stages; ++i) {
        if (first + i < stages) give(now, i);
      }
      now = next;
    }
  }

  template <class Access, ScaleFormat format>
  __device__ void fetch(Batch<format>& batch, int first) const {
    constexpr int stages_a_word = Batch<format>::stages_a_word;
#pragma unroll
    for (int word = 0; word < Batch<format>::stages / stages_a_word; ++word) {
#pragma unroll
      for (int i = 0; i < rows_a_lane; ++i) {
        const bool there = is_row(i) && first + word * stages_a_word < groups_;
        const auto* words = reinterpret_cast<const std::uint32_t*>(from(i)) + first / stages_a_word;
        batch.words[word][i] = there ? Access::load(words + word) : 0u;
      }
    }
  }

  template <ScaleFormat format>
  __device__ void give(const Batch<format>& batch, int which) {
    constexpr int stages_a_word = Batch<format>::stages_a_word;
    shared_.row_ring.wait_empty(at_);
    float* scales = shared_.scales[at_.stage];
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (!is_row(i)) break;
      const std::uint32_t word = batch.words[which / stages_a_word][i];
      const int place = Shape::place_of_scale(lane_ + warp_threads * i);
      const float scale = format == ScaleFormat::ue8m0
                              ? from_ue8m0(static_cast<std::uint8_t>(word >> (8 * (which % stages_a_word))))
                              : float_from_bits(word);
      scales[place] = scale;
    }
    filled();
  }

  /// A stage's scales of 32 values, straight from memory.
  template <class Access>
  __device__ void fill(ScaleFormat format, int stage, Access& access) {
    constexpr int count = stage_columns / 32;
    access.await(stage + 1);
    shared_.row_ring.wait_empty(at_);
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (!is_row(i)) break;
      for (int group = 0; group < count; ++group) {
        const int index = min(stage * count + group, groups_ - 1);  // beyond the last one tokens are zeros: any finite scale
        const float scale = format == ScaleFormat::ue8m0 ? from_ue8m0(static_cast<std::uint8_t>(from(i)[index]))
                                                         : reinterpret_cast<const float*>(from(i))[index];
        shared_.scales[at_.stage][group * Shape::most_tokens + Shape::place_of_scale(lane_ + warp_threads * i)] = scale;
      }
    }
    filled();
  }

  __device__ void filled() {
    shared_.row_ring.filled_together(at_);
    at_.advance();
  }

  Shared<Shape>& shared_;
  int lane_;
  const std::byte* scales_ = nullptr;
  std::size_t stride_ = 0;
  int groups_ = 0;
  int rows_ = 0;
  std::uint32_t place_[rows_a_lane] = {};
  RingPosition<Shape::row_stages> at_;
};

}  // namespace heddle::sm90
