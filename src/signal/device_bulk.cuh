// Rows in the hands of an SM's copy engine (bulk copies, TMA): through a ring in shared memory that every warp has for itself,
// one slot being filled while another one is emptied. One lane asks for all of it, so a warp keeps far more bytes on their way
// than its lanes could hold in registers; yet on NVLink lanes were faster at every size (docs/performance.md).
//
// The engine reaches memory by a proxy of its own. Where the two meet:
// - before the first copy after anything that orders memory (the launch, a barrier, a word), or after values that this warp has
//   written itself, stands a proxy fence: what was stored, read or acquired until then comes before the copy;
// - before anything is published, or the kernel ends, stores have been written, not only read from the ring, and a fence follows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "signal/device_rows.cuh"
#include "signal/device_send.cuh"
#include "signal/device_team.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"

namespace heddle {

/// The part of a worker that is there only with bulk copies.
template <bool enabled>
class BulkRing {
 public:
  __device__ BulkRing(int, std::byte*, int) {}
};

template <>
class BulkRing<true> {
 public:
  /// `memory`: bulk_ring_bytes of the CTA. Rows, or parts of them, of at least `least` bytes are taken.
  __device__ BulkRing(int lane, std::byte* memory, int least) : lane_(lane), least_(least) {
    const int warp = static_cast<int>(threadIdx.x) / lanes_of_warp;
    const int warps = static_cast<int>(blockDim.x) / lanes_of_warp;
    slots_ = warps > bulk_slots / 4 ? 2 : 4;
    const std::uint32_t begin = (ptx::shared_address(memory) + 127) / 128 * 128;
    data_ = begin + static_cast<std::uint32_t>(warp * slots_ * bulk_slot_bytes);
    barriers_ = begin + static_cast<std::uint32_t>(bulk_slots * bulk_slot_bytes + warp * slots_ * 8);
    if (lane_ == 0) {
      for (int slot = 0; slot < slots_; ++slot) ptx::make_barrier(barrier(static_cast<std::uint32_t>(slot)), 1);
      ptx::fence_new_barriers();
    }
    __syncwarp();
  }
  /// Whichever way a kernel ends, nothing is under way.
  __device__ ~BulkRing() { finish(); }
  BulkRing(const BulkRing&) = delete;
  BulkRing& operator=(const BulkRing&) = delete;

  __device__ bool takes(std::size_t bytes) const { return bytes >= static_cast<std::size_t>(least_); }
  /// Memory was ordered, or written by this warp: the next copy comes after it.
  __device__ void order() { ordered_ = false; }

  /// Bytes [begin, end) of a row to each of n places (null: left out). All lanes ask for places alike. What was to be read has
  /// been read when this returns.
  template <class To>
  __device__ void copy(int n, To to, const std::byte* from, std::size_t begin, std::size_t end) {
    if (n <= 0) return;
    fence();
    const int pieces = static_cast<int>((end - begin + bulk_slot_bytes - 1) / bulk_slot_bytes);
    int loaded = 0;
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      if (lane_ == 0) {
#pragma unroll 1
        for (; loaded < pieces && loaded - piece < slots_; ++loaded) {
          // Its slot was that of the group `slots_` before; those of this row's pieces before it may still be read.
          wait_until_read(slots_ - 1 - (loaded - piece));
          const std::size_t at = begin + static_cast<std::size_t>(loaded) * bulk_slot_bytes;
          const std::uint32_t use = used_ + static_cast<std::uint32_t>(loaded - piece);
          ptx::arrive_expecting(barrier(use), bytes_of(at, end));
          ptx::load_bulk(slot(use), from + at, bytes_of(at, end), barrier(use));
        }
        wait_for_slot(used_);
      }
      const std::size_t at = begin + static_cast<std::size_t>(piece) * bulk_slot_bytes;
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        std::byte* place = to(i);
        if (place != nullptr && lane_ == 0) ptx::store_bulk(place + at, slot(used_), bytes_of(at, end));
      }
      if (lane_ == 0) ptx::commit_stores();
      ++used_;
    }
    stored_ = true;
    __syncwarp();
  }

  /// As RowSum::sum for bf16 rows, which are pulled through the ring: four rows' 512 values a slot.
  template <class Terms>
  __device__ void sum(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int begin, int end) {
    fence();
    if (lane_ == 0) ptx::wait_until_read<0>();
    const int groups = n <= rows_a_slot ? 1 : (n + rows_a_slot - 1) / rows_a_slot;
    const int units = (end - begin + row_piece_values - 1) / row_piece_values * groups;
    float sums[16];
    int loaded = 0;
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
#pragma unroll 1
      for (; loaded < units && loaded - unit < slots_; ++loaded) {
        load_terms(used_ + static_cast<std::uint32_t>(loaded - unit), n, terms, loaded % groups,
                   begin + loaded / groups * row_piece_values, end);
      }
      wait_for_slot(used_);
      const int at = begin + unit / groups * row_piece_values;
      if (unit % groups == 0) {
#pragma unroll
        for (float& value : sums) value = 0;
      }
      add_terms(n, terms, unit % groups, at, end, format.weighted, sums);
      if (unit % groups == groups - 1) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = at + c * 8 * lanes_of_warp + 8 * lane_;
          if (column < end) RowSum<true>::finish_chunk(out, column, sums + 8 * c, format, last);
        }
      }
      ++used_;
      ptx::fence_shared_proxies();  // every lane has read its values before the slot is filled anew
      __syncwarp();
    }
  }

  /// All stores have been written, for whoever comes after the next barrier or word of this warp.
  __device__ void finish() {
    if (!stored_) return;
    stored_ = false;
    if (lane_ != 0) return;
    ptx::wait_until_written();
    ptx::fence_proxies();
  }
  __device__ bool has_stored() const { return stored_; }

 private:
  static constexpr int lanes_of_warp = 32;
  static constexpr int piece_bytes = row_piece_values * static_cast<int>(sizeof(bf16));
  static constexpr int rows_a_slot = bulk_slot_bytes / piece_bytes;

  /// The slot and the barrier of the use-th use of the ring.
  __device__ std::uint32_t slot(std::uint32_t use) const { return data_ + index(use) * bulk_slot_bytes; }
  __device__ std::uint32_t barrier(std::uint32_t use) const { return barriers_ + index(use) * 8; }
  __device__ std::uint32_t index(std::uint32_t use) const { return use & static_cast<std::uint32_t>(slots_ - 1); }
  __device__ static std::uint32_t bytes_of(std::size_t at, std::size_t end) {
    return static_cast<std::uint32_t>(end - at < bulk_slot_bytes ? end - at : bulk_slot_bytes);
  }
  __device__ void fence() {
    if (ordered_) return;
    __syncwarp();  // behind what all lanes have done
    if (lane_ == 0) ptx::fence_proxies();
    ordered_ = true;
  }
  __device__ void wait_for_slot(std::uint32_t use) const {
    const std::uint32_t parity = use / static_cast<std::uint32_t>(slots_) & 1;
    while (!ptx::wait_for_phase(barrier(use), parity)) {
    }
  }
  __device__ static void wait_until_read(int groups) {
    switch (groups) {
      case 0:
        return ptx::wait_until_read<0>();
      case 1:
        return ptx::wait_until_read<1>();
      case 2:
        return ptx::wait_until_read<2>();
      default:
        return ptx::wait_until_read<3>();
    }
  }
  /// Asks for the values from column `at` on of the terms of one group.
  template <class Terms>
  __device__ __forceinline__ void load_terms(std::uint32_t use, int n, Terms& terms, int group, int at, int end) const {
    const auto bytes = static_cast<std::uint32_t>(min(end - at, row_piece_values)) * static_cast<std::uint32_t>(sizeof(bf16));
    std::uint32_t rows = 0;
    const std::byte* row[rows_a_slot];
#pragma unroll
    for (int j = 0; j < rows_a_slot; ++j) {
      row[j] = group * rows_a_slot + j < n ? terms(group * rows_a_slot + j).row : nullptr;
      rows += row[j] != nullptr ? 1 : 0;
    }
    if (lane_ != 0) return;
    ptx::arrive_expecting(barrier(use), rows * bytes);
#pragma unroll
    for (int j = 0; j < rows_a_slot; ++j) {
      if (row[j] == nullptr) continue;
      ptx::load_bulk(slot(use) + static_cast<std::uint32_t>(j * piece_bytes), row[j] + static_cast<std::size_t>(at) * sizeof(bf16),
                     bytes, barrier(use));
    }
  }
  template <class Terms>
  __device__ __forceinline__ void add_terms(int n, Terms& terms, int group, int at, int end, bool weighted, float* sums) const {
#pragma unroll 1
    for (int j = 0; j < rows_a_slot; ++j) {
      if (group * rows_a_slot + j >= n) break;
      const SumTerm term = terms(group * rows_a_slot + j);
      if (term.row == nullptr) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = c * 8 * lanes_of_warp + 8 * lane_;
        if (at + column >= end) continue;
        RawEight<Wire::bf16> raw;
        raw.bits = ptx::load_shared(slot(used_) + static_cast<std::uint32_t>(j * piece_bytes + 2 * column));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float value = raw.value(i, {});
          float& sum = sums[8 * c + i];
          sum = weighted ? __fmaf_rn(term.weight, value, sum) : sum + value;
        }
      }
    }
  }

  int lane_;
  int least_;
  int slots_ = 2;
  std::uint32_t data_ = 0;      ///< of this warp's first slot
  std::uint32_t barriers_ = 0;  ///< likewise
  std::uint32_t used_ = 0;      ///< uses of slots until now; the same in all lanes
  bool stored_ = false;         ///< and not waited for
  bool ordered_ = false;        ///< a fence stands behind all that came before
};

}  // namespace heddle
