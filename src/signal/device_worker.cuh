// The Worker of a GPU: a warp. Verbs are called by all 32 lanes; ordinary loops around them run in every
// lane alike. A rank's workers are the warps of gridDim.x CTAs, a CTA is a squad; with virtual ranks blockIdx.y says
// which rank, and all CTAs of a launch are resident at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "signal/device_bulk.cuh"
#include "signal/device_faults.cuh"
#include "signal/device_numbers.cuh"
#include "signal/device_roles.cuh"
#include "signal/device_rows.cuh"
#include "signal/device_send.cuh"
#include "signal/device_tagged.cuh"
#include "signal/device_team.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"
#include "trace/device.cuh"

namespace heddle {

/// Where rows travel as bf16 and nothing else, kernels hold no conversions and step over none.
template <RowMover mover, class Place = WholeCta>
class DeviceWorker : public WarpNumbers, public Place, private BulkRing<mover == RowMover::bulk> {
  static constexpr bool bulk = mover == RowMover::bulk;
  static constexpr bool plain = mover != RowMover::any;
  using Ring = BulkRing<bulk>;

 public:
  static constexpr bool is_warp = true;
  struct Patience {
    std::uint64_t since = 0;
    std::uint64_t rested_until = 0;  ///< the last rest, 0: none since then
  };

  /// `shared`: the squad's memory, `shared_bytes` of it, and behind it with bulk copies bulk_ring_bytes more; `bulk_bytes`: the
  /// least that they take.
  __device__ DeviceWorker(const DeviceTeam& team, CallPart part, std::byte* shared, std::size_t shared_bytes, int bulk_bytes = 0)
      : WarpNumbers(static_cast<int>(threadIdx.x) % lanes_of_warp),
        Ring(lane(), shared + shared_bytes, bulk_bytes),
        team_(team),
        heap_(team.heap),
        shared_(shared),
        shared_end_(shared + shared_bytes) {
    heap_.rank += static_cast<int>(blockIdx.y);
    trace::begin_warp();
    // Everything is asked for before anything is looked at.
    const bool begins = part == CallPart::dispatch_send;
    const Word epoch = ptx::load_relaxed_system(begins ? &header()->epoch : &header()->call);
    const Word used = part == CallPart::dispatch_receive ? ptx::load_relaxed_system(&header()->epoch) : ~epoch;
    const Word abort = ptx::load_relaxed_system(&header()->abort);
    longest_delay_ = team.settings->delay_nanoseconds;
    all_live_ = team.settings->all_live != 0;
    // To receive without having sent is to wait for a call that nobody has begun.
    epoch_ = static_cast<std::uint32_t>(epoch) + (begins || epoch == used ? 1 : 0);
    // For the whole squad alike: warps that leave by themselves would be missed at its barriers.
    aborted_at_start_ = __syncthreads_or(static_cast<int>(abort != 0)) != 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (begins) ptx::store_relaxed_system(&header()->call, epoch_);
      if (part == CallPart::combine) ptx::store_relaxed_system(&header()->epoch, epoch_);
    }
  }

  /// In a role.
  __device__ DeviceWorker(const DeviceTeam& team, const BegunCall& begun, const Place& place)
      : WarpNumbers(static_cast<int>(threadIdx.x) % lanes_of_warp),
        Place(place),
        Ring(lane(), nullptr, 0),
        team_(team),
        heap_(begun.heap),
        shared_(nullptr),
        shared_end_(nullptr),
        epoch_(begun.epoch),
        longest_delay_(begun.longest_delay),
        all_live_(begun.all_live) {
    static_assert(!bulk, "a bulk ring is a warp's from the launch on");
  }

  using Place::count;
  using Place::first_squad;
  using Place::index;
  using Place::squad_count;
  using Place::squad_index;
  __device__ const HeapView& heap() const { return heap_; }
  __device__ std::uint32_t epoch() const { return epoch_; }
  __device__ bool all_live() const { return all_live_; }
  __device__ bool live(int rank) const { return all_live_ || team_.settings->live[rank] != 0; }

  /// The abort word as this launch found it; waits look at it anew.
  __device__ bool begin() {
    verb();
    if (aborted_at_start_ && lane() == 0) hear_of_fault(team_, heap_.rank);
    return !aborted_at_start_;
  }

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

  /// n values that the squad shares until the launch ends; null if there is no room. All warps of the squad make the same calls.
  __device__ std::int32_t* squad_array(int n) {
    const std::size_t bytes = align_up(static_cast<std::size_t>(n) * sizeof(std::int32_t), 16);
    if (bytes > static_cast<std::size_t>(shared_end_ - shared_)) return nullptr;
    auto* array = reinterpret_cast<std::int32_t*>(shared_);
    shared_ += bytes;
    return array;
  }
  /// In such memory: counts[c] grows by the items i < n of class c. By all warps of the squad.
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

  // --- Words ---

  /// All lanes' writes, and through earlier barriers those of the team, are seen before the word: the release of one
  /// lane covers what the barriers ordered before it.
  __device__ void publish(Word* word, std::uint32_t value) {
    verb();
    __syncwarp();
    if (lane() == 0) ptx::store_release_system(word, pack_word(epoch_, value));
    __syncwarp();
  }
  /// This squad's word for each i, when all its warps are here; beside the value it says how many squads will speak.
  template <class WordOf, class Value>
  __device__ void announce(int n, WordOf word, Value value) {
    verb();
    __syncthreads();
    if (squad_index() == 0) speak(n, word, value, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
  template <class WordOf, class Value>
  __device__ void announce_alone(int n, WordOf word, Value value) {
    verb();
    speak(n, word, value, 0, 1);
  }
  /// One squad speaks for all of the rank, the last one that comes here: few words to hear for one more step on the way.
  template <class WordOf, class Value>
  __device__ void announce_together(int n, WordOf word, Value value) {
    verb();
    __syncthreads();
    if (squad_index() != 0) return;
    int last = 0;
    if (lane() == 0) last = static_cast<int>(come_last(counters()->met));
    if (__shfl_sync(all_lanes, last, 0) == 0) return;
    __syncwarp();  // what lane 0 acquired, all lanes may tell of
    speak(n, word, value, 0, 1);
    if (lane() == 0) end_meeting(counters()->met);
  }
  __device__ bool acquire(const Word* word, const WordName& name, std::uint32_t& value) {
    return acquire_at_least(word, name, 0, value);
  }
  __device__ bool acquire_at_least(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value) {
    verb();
    const trace::WarpWait waiting(name);
    Word seen = 0;
    bool arrived = false;
    if (lane() == 0) {
      arrived = spin(word, name, pack_word(epoch_, least), [&](Word found) {
        seen = found;
        return word_tag(found) == epoch_ && word_value(found) >= least;
      });
    }
    value = word_value(__shfl_sync(all_lanes, seen, 0));
    __syncwarp();  // what lane 0 acquired, all lanes may read
    order();
    return __shfl_sync(all_lanes, static_cast<int>(arrived), 0) != 0;
  }
  /// Every squad looks for itself, a word a thread: as many squads are looked for as this launch has, and then the rest.
  template <class WordOf, class NameOf>
  __device__ bool hear_each(int n, WordOf word, NameOf name, std::int32_t* values, const std::int32_t** seen) {
    verb();
    const trace::WarpWait waiting(n, name);
    std::int32_t* mine = values == nullptr ? nullptr : squad_array(n);
    if (mine == nullptr) mine = values;  // too many for the squad's memory: all squads write the same
    // Taken off now and added at the end, so that nothing is kept meanwhile.
    if (times_waits()) ptx::add_relaxed_gpu(&counters()->waited, 0 - ptx::nanoseconds());
    const int squads = static_cast<int>(gridDim.x);
    bool fine = true;
    int i = 0;
    int squad = static_cast<int>(threadIdx.x);
    while (fine) {
      for (; squad >= squads && i < n; ++i) squad -= squads;
      if (i >= n) break;
      const Word* words = word(i);
      std::uint32_t found = 0;
      if (words != nullptr) fine = hear_squad(words, squad, name(i), found);
      // More squads than here: whoever looks for the last of ours looks for the others too.
      for (int more = squads; fine && squad == squads - 1 && more < static_cast<int>(found >> announced_bits); ++more)
        fine = hear_squad(words, more, name(i), found);
      if (squad == 0 && mine != nullptr) {
        const int value = announced_value(found);
        mine[i] = value;
        if (first_squad()) values[i] = value;
      }
      squad += static_cast<int>(blockDim.x);
    }
    if (seen != nullptr) *seen = mine;
    fine = __syncthreads_and(static_cast<int>(fine)) != 0;
    order();
    if (times_waits()) ptx::add_relaxed_gpu(&counters()->waited, ptx::nanoseconds());
    return fine;
  }
  __device__ bool peek(const Word* word, std::uint32_t& value) {
    verb();
    Word seen = 0;
    if (lane() == 0) seen = ptx::load_acquire_system(word);
    seen = __shfl_sync(all_lanes, seen, 0);
    __syncwarp();  // what lane 0 acquired, all lanes may read
    order();
    value = word_value(seen);
    return word_tag(seen) == epoch_;
  }
  /// This warp by itself: a word a lane, null ones left out. In the name of the team, what is missing are squads of this rank.
  template <class WordOf, class NameOf>
  __device__ bool acquire_each(int n, WordOf word, NameOf name) {
    verb();
    const trace::WarpWait waiting(n, name);
    bool fine = true;
#pragma unroll 1
    for (int i = lane(); fine && i < n; i += lanes_of_warp) {
      const Word* place = word(i);
      if (place != nullptr) fine = spin_for_tag(place, name(i));
    }
    fine = __all_sync(all_lanes, static_cast<int>(fine)) != 0;
    __syncwarp();
    order();
    return fine;
  }

  // --- Words of this rank alone ---

  __device__ void start_count(Word* word) { ptx::store_relaxed_system(word, pack_word(epoch_, 0)); }
  __device__ std::uint32_t add(Word* word, std::uint32_t n) {
    verb();
    __syncwarp();
    Word before = 0;
    if (lane() == 0) before = ptx::add_acquire_release_gpu(word, n);
    before = __shfl_sync(all_lanes, before, 0);
    __syncwarp();
    order();
    return word_value(before);
  }
  /// By the first lane, whose answer is waited for when answer() is called; orders nothing.
  __device__ Word ask_next(Word* word) {
    verb();
    return lane() == 0 ? ptx::fetch_add_relaxed_gpu(word, 1) : 0;
  }
  __device__ std::uint32_t answer(Word asked) const { return word_value(__shfl_sync(all_lanes, asked, 0)); }
  /// A lane each, all behind one fence; nobody waits for what the counters were.
  template <class WordOf, class Number>
  __device__ void add_each(int begin, int end, WordOf word, Number number) {
    verb();
    __syncwarp();
    if (lane() >= begin && lane() < end) {
      ptx::fence_acquire_release_gpu();
      ptx::add_relaxed_gpu(word(lane()), number(lane()));
    }
    __syncwarp();
  }
  __device__ void publish_own(Word* word, std::uint32_t value) {
    verb();
    __syncwarp();
    if (lane() == 0) ptx::store_release_gpu(word, pack_word(epoch_, value));
    __syncwarp();
  }
  __device__ bool acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
    return acquire_own_run(
               1, [&](int) { return word; }, name, least) == 1;
  }
  /// A lane looks at a word, so a run is seen at once.
  template <class WordOf>
  __device__ int acquire_own_run(int n, WordOf word, const WordName& name, std::uint32_t least) {
    verb();
    const trace::WarpWait waiting(name);
    const bool looks = lane() < n;
    const Word* mine = word(looks ? lane() : 0);
    FellowWait wait;
#pragma unroll 1
    for (std::uint32_t look = 0;; ++look) {
      const Word seen = ptx::load_acquire_gpu(mine);
      const bool here = looks && word_tag(seen) == epoch_ && word_value(seen) >= least;
      const unsigned missing = ~__ballot_sync(all_lanes, static_cast<int>(here));
      const int run = missing == 0 ? lanes_of_warp : __ffs(static_cast<int>(missing)) - 1;
      if (run > 0) {
        __syncwarp();  // what a lane acquired, all lanes may read
        order();
        return run;
      }
      if (look % 64 != 0) continue;
      int going = 1;
      if (lane() == 0) going = wait.go_on(team_, heap_.rank, name, pack_word(epoch_, least), seen) ? 1 : 0;
      if (__shfl_sync(all_lanes, going, 0) == 0) return 0;
    }
  }

  __device__ Patience look() { return {__shfl_sync(all_lanes, ptx::nanoseconds(), 0)}; }
  __device__ bool rest(Patience& patience, const WordName& name, Word expected, Word seen) {
    int go_on = 1;
    if (lane() == 0) {
      const std::uint64_t now = ptx::nanoseconds();
      rested_ += now - (patience.rested_until == 0 ? patience.since : patience.rested_until);
      patience.rested_until = now;
      if (aborted()) {
        hear_of_fault(team_, heap_.rank);
        go_on = 0;
      } else if (now - patience.since > deadline()) {
        fail(name, expected, seen);
        go_on = 0;
      }
    }
    return __shfl_sync(all_lanes, go_on, 0) != 0;
  }

  // --- Meeting ---

  __device__ void note_progress() {
    if (lane() == 0) ptx::add_relaxed_gpu(&counters()->moved, 1);
  }
  /// The longest of all warps' is kept.
  __device__ void note_rests() {
    if (team_.tallies != nullptr && lane() == 0 && rested_ != 0) ptx::max_relaxed_gpu(&counters()->rested, rested_);
    rested_ = 0;
  }
  /// After a team barrier behind which all warps have told theirs: it is waited time of this rank like any other.
  __device__ void count_rests() {
    if (times_waits()) ptx::add_relaxed_gpu(&counters()->waited, ptx::exchange_relaxed_gpu(&counters()->rested, 0));
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

  /// Gives up, by one lane or by several that say the same; returns false.
  __device__ bool fail(const WordName& name, std::uint64_t expected, std::uint64_t seen) {
    give_up(team_, heap_.rank, name, expected, seen);
    return false;
  }
  __device__ bool aborted() const { return ptx::load_relaxed_system(&header()->abort) != 0; }

 private:
  __device__ HeapHeader* header() const { return heap_.template mine<HeapHeader>(0); }
  __device__ TeamCounters* counters() const { return team_.counters + blockIdx.y; }
  /// One thread a rank, where the host wants to know.
  __device__ bool times_waits() const { return team_.tallies != nullptr && first_squad() && threadIdx.x == 0; }
  __device__ static bool one_squad() { return gridDim.x == 1; }
  __device__ static bool one_cluster() { return gridDim.x > 1 && ptx::cluster_ctas() == gridDim.x; }
  __device__ std::uint64_t deadline() const {
    return *static_cast<const volatile std::uint64_t*>(&team_.settings->deadline_nanoseconds);
  }

  /// Tests inject delays here.
  __device__ void verb() {
    if constexpr (!Place::delays) return;
    if (longest_delay_ != 0) delays_ = delay(*team_.settings, index(), delays_);
  }

  /// Memory was ordered, or this warp writes what a bulk copy may read: the next one comes after it.
  __device__ void order() {
    if constexpr (bulk) Ring::order();
  }

  __device__ WarpTagged tagged() const { return {team_, heap_.rank, lane(), epoch_}; }

  template <class WordOf, class Value>
  __device__ void speak(int n, WordOf word, Value value, int squad, int squads) {
#pragma unroll 1
    for (int i = lane(); i < n; i += lanes_of_warp) {
      Word* words = word(i);
      const std::uint32_t said = static_cast<std::uint32_t>(value(i)) | static_cast<std::uint32_t>(squads) << announced_bits;
      if (words != nullptr) ptx::store_release_system(words + squad, pack_word(epoch_, said));
    }
    __syncwarp();
  }
  /// Waits until squad number `squad` has spoken, or the first one says that there are fewer; found: what the first says.
  __device__ bool hear_squad(const Word* words, int squad, const WordName& name, std::uint32_t& found) {
    std::uint64_t since = 0;
    for (std::uint32_t look = 0;; ++look) {
      const Word first = ptx::load_acquire_system(words);
      const Word own = squad == 0 ? first : ptx::load_acquire_system(words + squad);
      found = word_value(first);
      if (word_tag(first) == epoch_ && (word_tag(own) == epoch_ || squad >= static_cast<int>(found >> announced_bits))) return true;
      if (look % 64 != 0) continue;
      since = go_on_waiting(team_, heap_.rank, since, name, pack_word(epoch_, 0), word_tag(first) == epoch_ ? own : first);
      if (since == 0) return false;
    }
  }
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

  template <class Arrived>
  __device__ bool spin(const Word* word, const WordName& name, std::uint64_t expected, Arrived arrived) {
    std::uint64_t since = 0;
    for (std::uint32_t look = 0;; ++look) {
      const Word seen = ptx::load_acquire_system(word);
      if (arrived(seen)) return true;
      if (look % 64 != 0) continue;
      since = go_on_waiting(team_, heap_.rank, since, name, expected, seen);
      if (since == 0) return false;
    }
  }

  /// Until a word carries this call's tag.
  __device__ bool spin_for_tag(const Word* word, const WordName& name) {
    const bool squads = name.kind == WordKind::team;
    FellowWait wait;
#pragma unroll 1
    for (std::uint32_t look = 0;; ++look) {
      const Word seen = ptx::load_acquire_system(word);
      if (word_tag(seen) == epoch_) return true;
      if (look % 64 != 0) continue;
      const Word expected = squads ? gridDim.x : pack_word(epoch_, 0);
      if (!wait.go_on(team_, heap_.rank, name, expected, squads ? word_value(ptx::load_relaxed_system(&counters()->met)) : seen))
        return false;
    }
  }

  const DeviceTeam& team_;
  HeapView heap_;
  std::byte* shared_;
  std::byte* shared_end_;
  std::uint32_t epoch_ = 0;
  std::uint32_t delays_ = 0;
  std::uint32_t longest_delay_ = 0;
  std::uint64_t rested_ = 0;  ///< nanoseconds of the first lane in rest()
  bool all_live_ = true;
  bool aborted_at_start_ = false;
};

}  // namespace heddle
