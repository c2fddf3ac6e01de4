// Counting and numbering in the hands of a warp.
#pragma once

#include <cstdint>
#include <cstring>

#include "signal/worker.hpp"

namespace heddle {

/// Values that the lanes of a warp hold, one each; with more than lanes each is computed when it is asked for.
template <class T, class F>
struct LaneValues {
  T mine;
  int n;
  F f;
  __device__ T operator()(int i) const { return n > 32 ? f(i) : from(i); }
  /// The value of a lane.
  __device__ T from(int i) const {
    T value;
    static_assert(sizeof(T) % sizeof(std::uint32_t) == 0 && sizeof(T) <= 32);
    std::uint32_t words[sizeof(T) / sizeof(std::uint32_t)];
    memcpy(words, &mine, sizeof(T));
#pragma unroll
    for (std::uint32_t& word : words) word = __shfl_sync(0xFFFFFFFFu, word, i);
    memcpy(&value, words, sizeof(T));
    return value;
  }
};

class WarpNumbers {
 public:
  static constexpr int lanes_of_warp = 32;
  static constexpr unsigned all_lanes = 0xFFFFFFFFu;

  __device__ explicit WarpNumbers(int lane) : lane_(lane) {}
  __device__ int lane() const { return lane_; }

  /// f(i) for i < n, each by one lane.
  template <class F>
  __device__ void lanes(int n, F f) {
#pragma unroll 1
    for (int i = lane_; i < n; i += lanes_of_warp) f(i);
    __syncwarp();
  }
  /// f() by one lane, seen by all.
  template <class F>
  __device__ void once(F f) {
    __syncwarp();
    if (lane_ == 0) f();
    __syncwarp();
  }
  __device__ int chunk(int preferred, int) const { return preferred; }

  __device__ int sum_values(int n, const std::int32_t* values) {
    int sum = 0;
#pragma unroll 1
    for (int i = lane_; i < n; i += lanes_of_warp) sum += values[i];
    return __reduce_add_sync(all_lanes, sum);
  }
  /// As OneLane's.
  __device__ bool in_all_lanes(bool mine) const { return __all_sync(all_lanes, mine) != 0; }
  __device__ int prefix_sums(int n, std::int32_t* values, int stride) {
    int sum = 0;
    for (int base = 0; base < n; base += lanes_of_warp) {
      const int i = base + lane_;
      const int own = i < n ? values[i * stride] : 0;
      int inclusive = own;
#pragma unroll
      for (int distance = 1; distance < lanes_of_warp; distance *= 2) {
        const int other = __shfl_up_sync(all_lanes, inclusive, static_cast<unsigned>(distance));
        if (lane_ >= distance) inclusive += other;
      }
      if (i < n) values[i * stride] = sum + inclusive - own;
      sum += __shfl_sync(all_lanes, inclusive, lanes_of_warp - 1);
    }
    __syncwarp();
    return sum;
  }
  /// Every column of values [rows, columns] becomes its prefix sums, totals[column] its sum; columns are dealt over
  /// `workers`. Few rows: a column a lane; many: a column a warp.
  __device__ void prefix_columns(int worker, int workers, int rows, int columns, std::int32_t* values, std::int32_t* totals) {
    if (rows > lanes_of_warp) {
      for (int c = worker; c < columns; c += workers) {
        const int sum = prefix_sums(rows, values + c, columns);
        if (lane_ == 0) totals[c] = sum;
      }
      return;
    }
    for (int c = worker * lanes_of_warp + lane_; c < columns; c += workers * lanes_of_warp) {
      int sum = 0;
#pragma unroll 2
      for (int row = 0; row < rows; ++row) {
        const int own = values[row * columns + c];
        values[row * columns + c] = sum;
        sum += own;
      }
      totals[c] = sum;
    }
  }

  /// As OneLane's, for at most 32 items: one a lane.
  template <class Bits>
  __device__ void enumerate_sets(int n, int classes, Bits bits, std::int32_t* numbers, std::int32_t* counts) {
    for (int base = 0; base < classes; base += 32) {
      const std::uint32_t mine = lane_ < n ? bits(lane_, base / 32) : 0;
#pragma unroll 1
      for (int c = base; c < classes && c < base + 32; ++c) {
        const bool in = (mine >> (c - base) & 1u) != 0;
        const unsigned members = __ballot_sync(all_lanes, in);
        if (lane_ < n) numbers[lane_ * classes + c] = in ? __popc(members & lower_lanes()) : -1;
        if (lane_ == 0) counts[c] = __popc(members);
      }
    }
    __syncwarp();
  }
  /// As OneLane's. `counts` holds the running counts meanwhile.
  template <class ClassOf>
  __device__ void enumerate_kinds(int n, int classes, ClassOf class_of, std::int32_t* numbers, std::int32_t* counts) {
    constexpr int ahead = 4;  // classes that are looked up together
    lanes(classes, [&](int c) { counts[c] = 0; });
#pragma unroll 1
    for (int base = 0; base < n; base += ahead * lanes_of_warp) {
      int some[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        const int i = base + j * lanes_of_warp + lane_;
        some[j] = i < n ? class_of(i) : -1;
      }
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        const int c = some[j];
        const unsigned same = __match_any_sync(all_lanes, c);
        const int earlier = __popc(same & lower_lanes());
        const int before = c >= 0 ? counts[c] : 0;
        __syncwarp();
        if (c >= 0) {
          numbers[base + j * lanes_of_warp + lane_] = before + earlier;
          if (earlier == 0) counts[c] = before + __popc(same);
        }
        __syncwarp();
      }
    }
  }

  /// The table of regions is looked at by all lanes together; rows are dealt in parts.
  template <class CountOf, class Visit>
  __device__ int deal_over(int worker, int workers, int regions, int group, int bits, CountOf count_of, Visit visit) {
    int item = 0;
    int next = worker;
    int before = 0;
    for (int base = 0; base < regions; base += lanes_of_warp) {
      const int mine = base + lane_ < regions ? count_of(base + lane_) : 0;
      for (int region = base; region < regions && region < base + lanes_of_warp; ++region) {
        if (region % group == 0) before = 0;
        const int rows = __shfl_sync(all_lanes, mine, region - base);
        for (; next < item + (rows << bits); next += workers) {
          visit(region, row_of(next - item, bits), before, part_of(next - item, bits));
        }
        item += rows << bits;
        before += rows;
      }
    }
    return before;
  }

 private:
  __device__ unsigned lower_lanes() const { return (1u << lane_) - 1u; }

  int lane_;
};

}  // namespace heddle
