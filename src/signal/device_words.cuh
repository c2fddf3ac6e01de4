// Words in the hands of a warp: told to other ranks and to this one's warps, waited for with a deadline.
#pragma once

#include <cstdint>

#include "signal/device_call.cuh"

namespace heddle {

template <RowMover mover, class Place>
class WarpWords : public WarpInCall<mover, Place> {
  using Base = WarpInCall<mover, Place>;

 protected:
  using Base::verb, Base::order, Base::counters, Base::times_waits, Base::deadline, Base::team_, Base::heap_, Base::epoch_;

 public:
  using Base::aborted, Base::fail, Base::squad_array, Base::lane, Base::lanes_of_warp, Base::all_lanes, Base::first_squad,
      Base::squad_index;
  using Base::Base;
  struct Patience {
    std::uint64_t since = 0;
    std::uint64_t rested_until = 0;  ///< the last rest, 0: none since then
  };

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

  /// The longest of all warps' is kept.
  __device__ void note_rests() {
    if (team_.tallies != nullptr && lane() == 0 && rested_ != 0) ptx::max_relaxed_gpu(&counters()->rested, rested_);
    rested_ = 0;
  }
  /// After a team barrier behind which all warps have told theirs: it is waited time of this rank like any other.
  __device__ void count_rests() {
    if (times_waits()) ptx::add_relaxed_gpu(&counters()->waited, ptx::exchange_relaxed_gpu(&counters()->rested, 0));
  }

 private:
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

  std::uint64_t rested_ = 0;  ///< nanoseconds of the first lane in rest()
};

}  // namespace heddle
