// The Worker of a GPU: a warp. Verbs are called by all 32 lanes; ordinary loops around them run in every
// lane alike. A rank's workers are the warps of gridDim.x CTAs; with virtual ranks blockIdx.y says which
// rank, and all CTAs of a launch are resident at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "signal/device_rows.cuh"
#include "signal/device_team.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"

namespace heddle {

class DeviceWorker {
 public:
  static constexpr int lanes_of_warp = WarpRows::lanes_of_warp;
  static constexpr unsigned all_lanes = WarpRows::all_lanes;
  struct Patience {
    std::uint64_t since = 0;
  };

  /// `staging`: shared memory, `staging_bytes` for each warp of the CTA. `verdict`: one shared int of the CTA.
  __device__ DeviceWorker(const DeviceTeam& team, std::byte* staging, std::size_t staging_bytes, int* verdict)
      : team_(team), heap_(team.heap), verdict_(verdict), lane_(static_cast<int>(threadIdx.x) % lanes_of_warp), rows_(lane_) {
    heap_.rank += static_cast<int>(blockIdx.y);
    const int warp = static_cast<int>(threadIdx.x) / lanes_of_warp;
    const int warps = static_cast<int>(blockDim.x) / lanes_of_warp;
    index_ = static_cast<int>(blockIdx.x) * warps + warp;
    count_ = static_cast<int>(gridDim.x) * warps;
    staging_ = staging + static_cast<std::size_t>(warp) * staging_bytes;
    epoch_ = static_cast<std::uint32_t>(ptx::load_relaxed_system(&header()->epoch)) + 1;
    aborted_at_start_ = aborted_now();
    longest_delay_ = team.settings->delay_nanoseconds;
    all_live_ = team.settings->all_live != 0;
  }

  __device__ int index() const { return index_; }
  __device__ int count() const { return count_; }
  __device__ int lane() const { return lane_; }
  __device__ const HeapView& heap() const { return heap_; }
  __device__ std::uint32_t epoch() const { return epoch_; }
  __device__ bool live(int rank) const { return all_live_ || team_.settings->live[rank] != 0; }

  /// The abort word as this launch found it; waits look at it anew.
  __device__ bool begin() {
    verb();
    return !aborted_at_start_;
  }
  /// The abort word as it is now, for all lanes alike.
  __device__ bool aborted_now() const { return __shfl_sync(all_lanes, static_cast<int>(aborted()), 0) != 0; }

  template <class T>
  __device__ T read(const T* address) {
    static_assert(sizeof(T) == 4);
    verb();
    return *static_cast<const volatile T*>(address);
  }
  template <class T>
  __device__ void write(T* address, T value) {
    static_assert(sizeof(T) == 4);
    verb();
    if (lane_ == 0) *address = value;
  }

  __device__ Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
    verb();
    rows_.copy(to, from, format.row_bytes());
    return {};
  }
  __device__ Ticket copy_bytes(void* to, const void* from, std::size_t bytes) {
    verb();
    const auto a = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if (a % 16 == 0) {
      rows_.copy(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
    } else {
      for (std::size_t i = static_cast<std::size_t>(lane_); i < bytes / 4; i += lanes_of_warp) {
        static_cast<std::uint32_t*>(to)[i] = static_cast<const std::uint32_t*>(from)[i];
      }
    }
    return {};
  }
  __device__ Ticket quantise_row(std::byte* to, const bf16* from, const RowFormat& format) {
    verb();
    rows_.quantise(to, from, format);
    return {};
  }
  /// Earlier copies out of the staging row have been read when their instructions were issued: all are
  /// synchronous here, so only the lanes have to agree.
  __device__ std::byte* staging(const RowFormat&) {
    __syncwarp();
    return staging_;
  }
  __device__ void complete(Ticket) { __syncwarp(); }
  __device__ void complete_all() { __syncwarp(); }
  __device__ void add_words(std::byte* to, const std::byte* from, std::size_t bytes) {
    verb();
    for (std::size_t i = static_cast<std::size_t>(lane_); i < bytes / 4; i += lanes_of_warp) {
      reinterpret_cast<std::uint32_t*>(to)[i] += reinterpret_cast<const std::uint32_t*>(from)[i];
    }
    __syncwarp();
  }

  /// All lanes' writes, and through earlier barriers those of the team, are seen before the word.
  __device__ void publish(Word* word, std::uint32_t value) {
    verb();
    __syncwarp();
    if (lane_ == 0) {
      __threadfence_system();
      ptx::store_release_system(word, pack_word(epoch_, value));
    }
    __syncwarp();
  }
  __device__ bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    return acquire_at_least(word, name, 0, value);
  }
  __device__ bool acquire_at_least(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value) {
    verb();
    Word seen = 0;
    bool arrived = false;
    if (lane_ == 0) {
      arrived = spin(word, name, pack_word(epoch_, least), [&](Word found) {
        seen = found;
        return word_tag(found) == epoch_ && word_value(found) >= least;
      });
    }
    value = word_value(__shfl_sync(all_lanes, seen, 0));
    __syncwarp();  // what lane 0 acquired, all lanes may read
    return __shfl_sync(all_lanes, static_cast<int>(arrived), 0) != 0;
  }
  __device__ bool peek(const Word* word, std::uint32_t& value) {
    verb();
    Word seen = 0;
    if (lane_ == 0) seen = ptx::load_acquire_system(word);
    seen = __shfl_sync(all_lanes, seen, 0);
    __syncwarp();  // what lane 0 acquired, all lanes may read
    value = word_value(seen);
    return word_tag(seen) == epoch_;
  }
  __device__ Patience look() { return {__shfl_sync(all_lanes, ptx::nanoseconds(), 0)}; }
  __device__ bool rest(Patience& patience, const WordName& name, Word expected, Word seen) {
    int go_on = 1;
    if (lane_ == 0) {
      if (aborted()) {
        go_on = 0;
      } else if (ptx::nanoseconds() - patience.since > team_.settings->deadline_nanoseconds) {
        fail(name, expected, seen);
        go_on = 0;
      }
    }
    return __shfl_sync(all_lanes, go_on, 0) != 0;
  }

  /// All warps of the rank; those that have left do not hold it up. Few CTAs are one CTA or one cluster and meet
  /// in hardware, without memory; the abort word is then seen by the next verb that waits. Many CTAs count
  /// their arrivals, and the abort word ends the wait.
  __device__ bool team_barrier() {
    verb();
    if (gridDim.x == 1) {
      __syncthreads();
      return true;
    }
    if (ptx::cluster_ctas() == gridDim.x) {
      ptx::cluster_barrier_release_acquire();
      return true;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Word* arrivals = team_.team_counters + blockIdx.y;
      const Word before = ptx::add_acquire_release_gpu(arrivals, 1);
      const Word ctas = gridDim.x;
      const Word target = (before / ctas + 1) * ctas;
      const WordName name{WordKind::team, heap_.rank, -1};
      *verdict_ = spin(arrivals, name, target, [&](Word seen) { return seen >= target; }) ? 1 : 0;
    }
    __syncthreads();
    return *static_cast<volatile int*>(verdict_) != 0;
  }

  template <class Wanted, class Found>
  __device__ int enumerate(int n, Wanted wanted, Found found) {
    constexpr int ahead = 8;  // looks at this many indices a lane before it numbers them
    verb();
    int number = 0;
    for (int base = 0; base < n; base += ahead * lanes_of_warp) {
      bool mine[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        const int i = base + j * lanes_of_warp + lane_;
        mine[j] = i < n && wanted(i);
      }
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        const unsigned matches = __ballot_sync(all_lanes, mine[j]);
        if (mine[j]) found(base + j * lanes_of_warp + lane_, number + __popc(matches & ((1u << lane_) - 1u)));
        number += __popc(matches);
      }
    }
    __syncwarp();
    return number;
  }
  /// Few items are numbered faster by one worker a class than by chunks, which cost two barriers.
  __device__ int chunk(int preferred, int n) const { return n <= 8 * preferred ? (n > 0 ? n : 1) : preferred; }
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
  template <class CountOf, class Visit>
  __device__ int deal(int regions, int group, CountOf count_of, Visit visit) {
    int row = 0;
    int next = index_;
    int before = 0;
    for (int base = 0; base < regions; base += lanes_of_warp) {
      const int mine = base + lane_ < regions ? count_of(base + lane_) : 0;
      for (int region = base; region < regions && region < base + lanes_of_warp; ++region) {
        if (region % group == 0) before = 0;
        const int rows = __shfl_sync(all_lanes, mine, region - base);
        for (; next < row + rows; next += count_) visit(region, next - row, before);
        row += rows;
        before += rows;
      }
    }
    return before;
  }
  /// f(i) for i < n, each by one lane.
  template <class F>
  __device__ void lanes(int n, F f) {
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

  /// How many workers share the sum of a row, so that all of them have work when rows are few.
  __device__ int row_parts(int rows, int hidden) const {
    int parts = 1;
    while (rows * parts * 2 <= count_ && hidden / (parts * 2) >= 8 * lanes_of_warp) parts *= 2;
    return parts;
  }
  template <class Terms>
  __device__ void reduce_rows(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int part = 0,
                              int parts = 1) {
    verb();
    __syncwarp();
    // Parts are multiples of eight values; the last one takes what is left.
    const int share = format.row.hidden / parts / 8 * 8;
    const int begin = part * share;
    const int end = part + 1 == parts ? format.row.hidden : begin + share;
    rows_.sum(out, n, terms, format, last, begin, end);
  }
  __device__ void finish_epoch() {
    verb();
    if (lane_ == 0) ptx::store_relaxed_system(&header()->epoch, epoch_);
  }

  /// Gives up: this rank's record, for the host as well, then the abort word of every rank. One lane.
  __device__ void fail(const WordName& name, std::uint64_t expected, std::uint64_t seen) {
    const Word code = static_cast<Word>(heap_.rank) + 1;
    if (ptx::compare_exchange_system(&header()->abort, 0, ~Word{0}) != 0) return;
    const FaultRecord record{name, heap_.rank, expected, seen};
    header()->fault = record;
    HostFault* host = team_.host_faults + blockIdx.y;
    host->record = record;
    __threadfence_system();
    ptx::store_release_system(&host->raised, 1);
    ptx::store_release_system(&header()->abort, code);
    for (int peer = 0; peer < heap_.ranks; ++peer) {
      if (peer != heap_.rank) ptx::compare_exchange_system(&heap_.template at<HeapHeader>(peer, 0)->abort, 0, code);
    }
  }
  __device__ bool aborted() const { return ptx::load_relaxed_system(&header()->abort) != 0; }

 private:
  __device__ HeapHeader* header() const { return heap_.template mine<HeapHeader>(0); }

  /// Tests inject delays here.
  __device__ void verb() {
    if (longest_delay_ == 0) return;
    delays_ = delays_ * 1664525u + 1013904223u + team_.settings->delay_seed + static_cast<std::uint32_t>(index_) * 2654435761u;
    if ((delays_ >> 28) == 0) __nanosleep((delays_ >> 4) % longest_delay_);
    __syncwarp();
  }

  template <class Arrived>
  __device__ bool spin(const Word* word, const WordName& name, std::uint64_t expected, Arrived arrived) {
    Word seen = ptx::load_acquire_system(word);
    if (arrived(seen)) return true;
    const std::uint64_t since = ptx::nanoseconds();
    for (std::uint32_t look = 1;; ++look) {
      seen = ptx::load_acquire_system(word);
      if (arrived(seen)) return true;
      if (look % 64 != 0) continue;
      if (aborted()) return false;
      if (ptx::nanoseconds() - since > *static_cast<volatile std::uint64_t*>(&team_.settings->deadline_nanoseconds)) {
        fail(name, expected, seen);
        return false;
      }
    }
  }

  const DeviceTeam& team_;
  HeapView heap_;
  int* verdict_;
  int lane_;
  WarpRows rows_;
  int index_ = 0;
  int count_ = 1;
  std::uint32_t epoch_ = 0;
  std::uint32_t delays_ = 0;
  std::uint32_t longest_delay_ = 0;
  bool all_live_ = true;
  bool aborted_at_start_ = false;
  std::byte* staging_ = nullptr;
};

}  // namespace heddle
