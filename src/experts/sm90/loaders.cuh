// The roles that fill the rings: one thread streams weights, a warp fetches token scales, two warps gather token rows.
// Each works through the tasks by itself, so weights run ahead while rows are still on their way.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"
#include "formats/codes.hpp"

namespace heddle::sm90 {

inline constexpr int row_loader_threads = 64;

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

/// Gathers rows by 16-byte copies, swizzled as the tensor cores read them. By `row_loader_threads` threads, `thread` of them.
template <class Shape>
class RowLoader {
 public:
  __device__ RowLoader(Shared<Shape>& shared, const TokenRows& tokens, int row_bytes, int thread)
      : shared_(shared), tokens_(tokens), row_bytes_(row_bytes), lane_(thread % 8), first_(thread / 8) {}

  __device__ void load(const Task& task, int stages) {
    rows_ = task.rows;
    __syncwarp();
    if (lane_ == 0) {
      for (int row = first_; row < rows_; row += rows_a_pass) {
        shared_.row_begin[row] = tokens_.values + tokens_.map.place(task, row) * tokens_.value_stride;
      }
    }
    __syncwarp();
    for (int stage = 0; stage < stages; ++stage) {
      shared_.row_ring.wait_empty(at_);
#pragma unroll
      for (int part = 0; part < Shape::parts; ++part) copy_panel((stage * Shape::parts + part) * panel_bytes, part);
      cute::cp_async_fence();
      at_.advance();
      if (++under_way_ > lag) {
        cute::cp_async_wait<lag>();
        publish();
      }
    }
  }

  /// The last stages arrive.
  __device__ void finish() {
    cute::cp_async_wait<0>();
    while (under_way_ > 0) publish();
  }

 private:
  static constexpr int rows_a_pass = row_loader_threads / 8;  // 8: a thread's rows are swizzled alike
  static constexpr int lag = Shape::rows_under_way;

  __device__ void copy_panel(int begin, int part) {
    const int column = begin + 16 * lane_;
    const bool inside = column < row_bytes_;  // beyond it, zeros
    const int swizzled = (lane_ ^ (first_ & 7)) * 16;
    std::byte* panel = shared_.rows[at_.stage] + part * Shape::most_tokens * panel_bytes + swizzled;
    for (int row = first_; row < rows_; row += rows_a_pass) {
      const auto& source = *reinterpret_cast<const cute::uint128_t*>(shared_.row_begin[row] + (inside ? column : 0));
      auto& to = *reinterpret_cast<cute::uint128_t*>(panel + row * panel_bytes);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(source, to, inside);
    }
  }

  /// The oldest stage has arrived: the tensor cores, which read by another proxy, may have it.
  __device__ void publish() {
    cutlass::arch::fence_view_async_shared();
    shared_.row_ring.filled(done_);
    done_.advance();
    --under_way_;
  }

  Shared<Shape>& shared_;
  const TokenRows& tokens_;
  int row_bytes_;
  int lane_;   // of the eight that copy a row's panel
  int first_;  // row of the first pass
  int rows_ = 0;
  RingPosition<Shape::row_stages> at_;
  RingPosition<Shape::row_stages> done_;
  int under_way_ = 0;
};

/// Fetches token scales, widened to f32. By one warp.
template <class Shape>
class ScaleLoader {
 public:
  __device__ ScaleLoader(Shared<Shape>& shared, const TokenRows& tokens, int groups)
      : shared_(shared), tokens_(tokens), groups_(groups), lane_(static_cast<int>(threadIdx.x) % warp_threads) {}

  __device__ void load(const Task& task, int stages) {
    rows_ = task.rows;
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (is_row(i)) place_[i] = static_cast<std::uint32_t>(tokens_.map.place(task, lane_ + warp_threads * i));
    }
    if (tokens_.scaling == TokenScales::by_32) {
      for (int stage = 0; stage < stages; ++stage) fill(stage, 4);
      return;
    }
    // Words of 4 bytes are fetched two ahead; one holds the scales of four stages, or of one.
    const int stages_a_word = tokens_.format == ScaleFormat::ue8m0 ? 4 : 1;
    std::uint32_t now[rows_a_lane];
    std::uint32_t next[rows_a_lane];
    fetch(now, 0);
    fetch(next, 1);
    for (int first = 0; first < stages; first += stages_a_word) {
      std::uint32_t later[rows_a_lane];
      fetch(later, first / stages_a_word + 2);
      for (int stage = first; stage < first + stages_a_word && stage < stages; ++stage) give(now, stage - first);
#pragma unroll
      for (int i = 0; i < rows_a_lane; ++i) {
        now[i] = next[i];
        next[i] = later[i];
      }
    }
  }

 private:
  static constexpr int rows_a_lane = (Shape::most_tokens + warp_threads - 1) / warp_threads;

  __device__ bool is_row(int i) const { return lane_ + warp_threads * i < rows_; }
  __device__ const std::byte* from(int i) const { return tokens_.scales + place_[i] * tokens_.scale_stride; }

  __device__ void fetch(std::uint32_t (&words)[rows_a_lane], int word) const {
    const int bytes = groups_ * (tokens_.format == ScaleFormat::ue8m0 ? 1 : 4);
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      const bool there = is_row(i) && 4 * word < bytes;
      words[i] = there ? __ldg(reinterpret_cast<const std::uint32_t*>(from(i)) + word) : 0u;
    }
  }

  /// One stage's scales out of words.
  __device__ void give(const std::uint32_t (&words)[rows_a_lane], int which) {
    shared_.row_ring.wait_empty(at_);
#pragma unroll
    for (int i = 0; i < rows_a_lane; ++i) {
      if (!is_row(i)) break;
      const bool byte = tokens_.format == ScaleFormat::ue8m0;
      const float scale = byte ? from_ue8m0(static_cast<std::uint8_t>(words[i] >> (8 * which))) : float_from_bits(words[i]);
      shared_.scales[at_.stage][lane_ + warp_threads * i] = scale;
    }
    shared_.row_ring.filled(at_);
    at_.advance();
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
        shared_.scales[at_.stage][group * Shape::most_tokens + lane_ + warp_threads * i] = scale;
      }
    }
    shared_.row_ring.filled(at_);
    at_.advance();
  }

  Shared<Shape>& shared_;
  const TokenRows& tokens_;
  int groups_;
  int lane_;
  int rows_ = 0;
  std::uint32_t place_[rows_a_lane];
  RingPosition<Shape::row_stages> at_;
};

}  // namespace heddle::sm90
