// The Worker of a GPU: a warp. Verbs are called by all 32 lanes; ordinary loops around them run in every
// lane alike. A rank's workers are the warps of gridDim.x CTAs, a CTA is a squad; with virtual ranks blockIdx.y says
// which rank, and all CTAs of a launch are resident at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "signal/device_rows.cuh"
#include "signal/device_send.cuh"
#include "signal/device_tagged.cuh"
#include "signal/device_words.cuh"

namespace heddle {

/// Where rows travel as bf16 and nothing else, kernels hold no conversions and step over none.
template <RowMover mover, class Place = WholeCta>
class DeviceWorker : public WarpWords<mover, Place> {
  static constexpr bool plain = mover != RowMover::any;
  using Base = WarpWords<mover, Place>;

 protected:
  using Base::verb, Base::order, Base::counters, Base::team_, Base::heap_, Base::epoch_, Base::bulk;
  using typename Base::Ring;

 public:
  using Base::aborted, Base::squad_array, Base::lane, Base::lanes_of_warp, Base::all_lanes, Base::prefix_sums, Base::deal_over,
      Base::index, Base::count, Base::first_squad, Base::squad_index;
  using Base::Base;

  // --- Rows and values ---

  template <class T>
  __device__ T read(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    verb();
    return *address;
  }
  /// By one lane, inside of spread.
  template <class T>
  __device__ T load(const T* address) {
    return *address;
  }
  template <class T>
  __device__ void write(T* address, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    verb();
    if (lane() == 0) *address = value;
  }
  template <class To>
  __device__ void send_row(int n, To to, const bf16* from, const RowFormat& format, const RowPart& part) {
    verb();
    if constexpr (bulk) {
      const int passes = (format.hidden + row_piece_values - 1) / row_piece_values;
      const std::size_t begin = sizeof(bf16) * static_cast<std::size_t>(part.begin(passes) * row_piece_values);
      const std::size_t end = sizeof(bf16) * static_cast<std::size_t>(min(part.end(passes) * row_piece_values, format.hidden));
      if (Ring::takes(end - begin)) return Ring::copy(n, to, reinterpret_cast<const std::byte*>(from), begin, end);
    }
    RowSender<plain>::send(lane(), n, to, from, format, part);
  }
  template <class To>
  __device__ void copy_row_to(int n, To to, const std::byte* from, const RowFormat& format, const RowPart& part) {
    verb();
    const int vectors = static_cast<int>(format.row_bytes() / 16);
    if constexpr (bulk) {
      const std::size_t begin = 16 * static_cast<std::size_t>(part.begin(vectors));
      const std::size_t end = 16 * static_cast<std::size_t>(part.end(vectors));
      if (Ring::takes(end - begin)) return Ring::copy(n, to, from, begin, end);
    }
    copy_vectors(lane(), n, to, from, part.begin(vectors), part.end(vectors));
  }
  __device__ Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
    copy_row_to(1, [to](int) { return to; }, from, format, {});
    if constexpr (bulk) return {Ring::has_stored() ? 1u : 0u};
    return {};
  }
  __device__ Ticket copy_bytes(void* to, const void* from, std::size_t bytes) {
    verb();
    order();
    const auto bits = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if (bits % 16 == 0) {
      copy_vectors(
          lane(), 1, [to](int) { return static_cast<std::byte*>(to); }, static_cast<const std::byte*>(from), 0,
          static_cast<int>(bytes / 16));
    } else {
#pragma unroll 1
      for (std::size_t i = static_cast<std::size_t>(lane()); i < bytes / 4; i += lanes_of_warp) {
        static_cast<std::uint32_t*>(to)[i] = static_cast<const std::uint32_t*>(from)[i];
      }
    }
    return {};
  }
  __device__ Ticket quantise_row(std::byte* to, const bf16* from, const RowFormat& format) {
    send_row(1, [to](int) { return to; }, from, format, {});
    return {};
  }
  __device__ void complete(Ticket ticket) {
    if constexpr (bulk) {
      if (ticket.number != 0) Ring::finish();
    }
    __syncwarp();
  }
  __device__ void complete_all() {
    if constexpr (bulk) Ring::finish();
    __syncwarp();
  }
  __device__ void clear(std::byte* to, std::size_t bytes) {
    verb();
#pragma unroll 1
    for (std::size_t i = static_cast<std::size_t>(lane()); i < bytes / 16; i += lanes_of_warp)
      reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ void add_values(bf16* to, const bf16* from, int n) {
    verb();
    order();
#pragma unroll 1
    for (int i = 2 * lane(); i < n; i += 2 * lanes_of_warp)
      ptx::add_bf16_pair_system(to + i, *reinterpret_cast<const std::uint32_t*>(from + i));
  }
  __device__ void add_words(std::byte* to, const std::byte* from, std::size_t bytes) {
    verb();
    order();
    for (std::size_t i = static_cast<std::size_t>(lane()); i < bytes / 4; i += lanes_of_warp) {
      reinterpret_cast<std::uint32_t*>(to)[i] += reinterpret_cast<const std::uint32_t*>(from)[i];
    }
    __syncwarp();
  }
  template <class To, class T>
  __device__ void send_values(int n, To to, const T* values, int size) {
    verb();
#pragma unroll 1
    for (int at = lane(); at < size; at += lanes_of_warp) {
      const T value = values[at];
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        T* place = to(i);
        if (place != nullptr) place[at] = value;
      }
    }
  }
  template <class To, class Value>
  __device__ void write_each(int n, To to, Value value) {
    verb();
#pragma unroll 1
    for (int i = lane(); i < n; i += lanes_of_warp) {
      auto* place = to(i);
      if (place != nullptr) *place = value(i);
    }
  }
  /// A column a lane, so that no index is divided: columns are rounded up to a power of two.
  template <class F>
  __device__ void spread(int rows, int columns, F f) {
    verb();
    const int shift = bits_of(columns);
    const int thread = index() * lanes_of_warp + lane();
    const int column = thread & ((1 << shift) - 1);
    if (column < columns) {
#pragma unroll 1
      for (int row = thread >> shift; row < rows; row += count() * lanes_of_warp >> shift) f(row, column);
    }
    __syncwarp();
  }
  /// Where regions begin is summed up once a squad; a row finds its region by bisection.
  template <class CountOf, class Visit>
  __device__ int deal(int regions, int group, int bits, CountOf count_of, Visit visit) {
    verb();
    std::int32_t* begins = squad_array(regions + 1);
    if (begins == nullptr) return deal_over(index(), count(), regions, group, bits, count_of, visit);
#pragma unroll 1
    for (int region = static_cast<int>(threadIdx.x); region <= regions; region += static_cast<int>(blockDim.x))
      begins[region] = region < regions ? count_of(region) : 0;
    __syncthreads();
    if (squad_index() == 0) prefix_sums(regions + 1, begins, 1);
    __syncthreads();
    const int rows = begins[regions];
#pragma unroll 1
    for (int item = index(); item < rows << bits; item += count()) {
      const int row = row_of(item, bits);
      const int region = last_begun(begins, regions, row);
      visit(region, row - begins[region], begins[region] - begins[region - region % group], part_of(item, bits));
    }
    return regions < group ? rows : rows - begins[regions - group];
  }
  template <class Terms>
  __device__ void reduce_rows(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last,
                              const RowPart& part = {}) {
    verb();
    __syncwarp();
    const int pieces = (format.row.hidden + row_piece_values - 1) / row_piece_values;
    const int end = part.end(pieces) * row_piece_values;
    order();
    if constexpr (bulk) {
      const int begin = part.begin(pieces) * row_piece_values;
      const int stop = min(end, format.row.hidden);
      if (Ring::takes(sizeof(bf16) * static_cast<std::size_t>(stop - begin))) {
        Ring::sum(out, n, terms, format, last, begin, stop);
        return order();
      }
    }
    RowSum<plain>::sum(lane(), out, n, terms, format, last, part.begin(pieces) * row_piece_values, min(end, format.row.hidden));
  }
  template <class To>
  __device__ void send_tagged(int n, To to, const std::byte* from, int words, const RowPart& part) {
    verb();
    tagged().send(n, to, from, words, part);
  }
  template <class To, class Value>
  __device__ void send_tagged_values(int n, To to, int size, Value value) {
    verb();
    tagged().send_values(n, to, size, value);
  }
  __device__ Taken take_tagged(std::byte* to, const TaggedRow& row, int words, const RowPart& part) {
    verb();
    return tagged().take(to, row, words, part);
  }
  template <class F>
  __device__ Taken take_tagged_values(const TaggedRow& row, int first, int size, F f) {
    verb();
    return tagged().take_values(row, first, size, f);
  }
  template <class Rows>
  __device__ bool reduce_tagged(bf16* out, int n, Rows rows, const SumFormat& format, const LastTerm& last, const RowPart& part) {
    verb();
    return tagged().sum(out, n, rows, format, last, part);
  }
  /// Pieces are 512 values at least.
  __device__ int part_bits(int rows, int hidden) const {
    // Powers of two: of workers at most as many as there are, of rows at least.
    const int workers_a_row = 31 - __clz(count()) - bits_of(rows);
    const int pieces = 31 - __clz(hidden / row_piece_values);
    return max(0, min(workers_a_row, pieces));
  }

  /// f(i) for i < n, a lane each, to be asked for by all lanes alike.
  template <class F>
  __device__ auto side_by_side(int n, F f) {
    using T = decltype(f(0));
    return LaneValues<T, F>{lane() < n && n <= lanes_of_warp ? f(lane()) : T{}, n, f};
  }

  template <class F>
  __device__ auto those_that_count(int& n, F f) {
    auto values = side_by_side(n, f);
    if (n > lanes_of_warp) return values;
    unsigned left = __ballot_sync(all_lanes, lane() < n && values.mine.counts());
    n = __popc(left);
    // Lane i takes the value of the i-th lane that counts.
#pragma unroll 1
    for (int i = lane(); i > 0; --i) left &= left - 1;
    values.mine = values.from(left == 0 ? 0 : __ffs(static_cast<int>(left)) - 1);
    return values;
  }

  // --- Memory of the squad ---

  /// In memory of squad_array: counts[c] grows by the items i < n of class c. By all warps of the squad.
  template <class ClassOf>
  __device__ void add_kinds(int n, ClassOf class_of, std::int32_t* counts) {
    constexpr int ahead = 8;  // classes that are looked up together
    verb();
    const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x); base < n; base += ahead * threads) {
      int some[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) some[j] = base + j * threads < n ? class_of(base + j * threads) : -1;
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        if (some[j] >= 0) atomicAdd(counts + some[j], 1);
      }
    }
  }
  template <class From, class Convert>
  __device__ const std::int32_t* squad_copy(int rows, int columns, From from, Convert convert) {
    std::int32_t* copy = squad_array(rows * columns);
    if (copy == nullptr) return nullptr;
    verb();
    const int shift = bits_of(columns);
    const int column = static_cast<int>(threadIdx.x) & ((1 << shift) - 1);
    if (column < columns) {
#pragma unroll 4
      for (int row = static_cast<int>(threadIdx.x) >> shift; row < rows; row += static_cast<int>(blockDim.x) >> shift) {
        copy[row * columns + column] = convert(*from(row, column));
      }
    }
    __syncthreads();
    return copy;
  }
  template <class From>
  __device__ const std::int32_t* take_values(int n, From from, std::int32_t* values) {
    verb();
    std::int32_t* mine = squad_array(n);
    if (mine == nullptr) mine = values;  // too many for the squad's memory: all squads write the same
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
      const std::int32_t* place = from(i);
      const std::int32_t value = place == nullptr ? 0 : *place;
      mine[i] = value;
      if (first_squad()) values[i] = value;
    }
    __syncthreads();
    return mine;
  }

  // --- Meeting ---

  __device__ void note_progress() {
    if (lane() == 0) ptx::add_relaxed_gpu(&counters()->moved, 1);
  }
  __device__ bool squad_barrier() {
    verb();
    __syncthreads();
    order();
    return true;
  }
  /// All warps of the rank; those that have left do not hold it up. Few CTAs are one CTA or one cluster and meet
  /// in hardware, without memory. Many CTAs count their arrivals, and the abort word ends the wait. False where it stands.
  __device__ bool team_barrier() {
    verb();
    const trace::WarpWait waiting({WordKind::team, heap_.rank, -1});
    bool fine = true;
    if (one_cluster()) {
      ptx::cluster_barrier_release_acquire();
    } else if (one_squad()) {
      __syncthreads();
    } else {
      fine = meet_by_counting(team_, heap_.rank);
    }
    order();
    // Who gave up comes here too, and nobody may go on to what it has left undone.
    if (threadIdx.x == 0) fine &= !aborted();
    return __syncthreads_and(static_cast<int>(fine)) != 0;
  }

 private:
  __device__ static bool one_squad() { return gridDim.x == 1; }
  __device__ static bool one_cluster() { return gridDim.x > 1 && ptx::cluster_ctas() == gridDim.x; }

  __device__ WarpTagged tagged() const { return {team_, heap_.rank, lane(), epoch_}; }

  /// The last of n ascending begins that is not beyond `row`.
  __device__ static int last_begun(const std::int32_t* begins, int n, int row) {
    int low = 0;
#pragma unroll 1
    for (int high = n; high - low > 1;) {
      const int middle = (low + high) / 2;
      if (begins[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  /// The least n with 2^n >= columns.
  __device__ static int bits_of(int columns) { return columns <= 1 ? 0 : 32 - __clz(columns - 1); }
};

}  // namespace heddle
