// The roles that fill the row ring with token rows: boxes of rows that lie one behind another, by one thread, or rows gathered one
// by one, by two warps.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/loaders.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {

inline constexpr int row_gatherer_threads = 64;

/// Copies rows as boxes of rows x 128 bytes: what is behind the task's rows in the last box comes along, and what is behind a row's
/// last byte is zeros. By one thread.
template <class Shape>
class RowBoxes {
 public:
  __device__ explicit RowBoxes(Shared<Shape>& shared) : shared_(shared) {}

  /// A stage of the `rows` rows of a tensor that begin with `first`.
  __device__ void copy(const RowTensor& tensor, std::int32_t first, int rows, int stage) {
    constexpr int box_bytes = Shape::box_rows * panel_bytes;
    const int boxes = (rows + Shape::box_rows - 1) / Shape::box_rows;
    shared_.row_ring.wait_empty(at_);
    shared_.row_ring.expect(at_, Shape::parts * boxes * box_bytes);
#pragma unroll
    for (int part = 0; part < Shape::parts; ++part) {
      std::byte* panel = shared_.rows[at_.stage] + part * Shape::most_tokens * panel_bytes;
      const std::int32_t column = (stage * Shape::parts + part) * panel_bytes;
      for (int box = 0; box < boxes; ++box) {
        cute::SM90_TMA_LOAD_2D::copy(&tensor, &shared_.row_ring.full[at_.stage],
                                     static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST), panel + box * box_bytes,
                                     column, first + box * Shape::box_rows);
      }
    }
    at_.advance();
  }

  /// After a stage's copy, by the other lanes of the warp where all of them have stored what belongs to the stage: see
  /// arrivals_a_warp.
  __device__ void join() {
    if constexpr (arrivals_a_warp > 1) {
      shared_.row_ring.filled(at_);
      at_.advance();
    }
  }

 private:
  Shared<Shape>& shared_;
  RingPosition<Shape::row_stages> at_;
};

/// Gathers rows by 16-byte copies, swizzled as the tensor cores read them. By `row_gatherer_threads` threads, `thread` of them.
template <class Shape>
class RowGatherer {
 public:
  __device__ RowGatherer(Shared<Shape>& shared, const TokenRows& tokens, int row_bytes, int thread)
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
  static constexpr int rows_a_pass = row_gatherer_threads / 8;  // 8: a thread's rows are swizzled alike
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

}  // namespace heddle::sm90
