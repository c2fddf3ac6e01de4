// Places where a rank's process can be told to end or stop: before verbs, at the first read of weights, before accesses to the
// store, before an expert is loaded; and the board on which a test says so and sees what became of it.
#pragma once

#include <signal.h>

#include <array>
#include <atomic>

#include "recovery_support.hpp"

namespace heddle::layer_test {

/// Where a rank's process meets its fault.
enum class Place : int {
  none,
  verb,     ///< before a verb of a protocol: dispatch and combine
  gemm,     ///< at the first read of an expert's weights: rows are laid out, the products begin
  store,    ///< before an access to the store: the agreement, the end of a step
  experts,  ///< before an expert is loaded: while experts move
  between,  ///< between two steps
};

constexpr int most_ranks = 6;
constexpr int most_generations = 4096;

/// Shared by the test and all processes; all zeros at first.
struct Board {
  struct Seat {
    std::atomic<std::uint32_t> steps;
    std::atomic<std::uint32_t> live;  ///< bits: its mask
    std::atomic<std::uint32_t> wrong, losses, interruptions, comebacks, cuts;
    // The next fault: at which place, which time it comes there, by which signal.
    std::atomic<int> place, countdown, signal;
    std::array<std::atomic<std::uint32_t>, most_generations> masks;  ///< bits, by generation
  };
  std::array<Seat, most_ranks> seats;
  std::atomic<std::uint32_t> last_step;  ///< the group ends with it; 0: not yet known
};

/// A board that forks share.
class SharedBoard {
 public:
  SharedBoard()
      : board_(static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedBoard() { munmap(board_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board* operator->() const { return board_; }
  Board& operator*() const { return *board_; }

 private:
  Board* board_;
};

inline std::uint32_t bits_of(const std::vector<bool>& live) {
  std::uint32_t bits = 0;
  for (std::size_t rank = 0; rank < live.size(); ++rank) bits |= live[rank] ? 1u << rank : 0u;
  return bits;
}

/// Ends or stops this process if its turn has come.
inline void pass(Board::Seat& seat, Place place) {
  if (seat.place != static_cast<int>(place) || --seat.countdown != 0) return;
  seat.place = static_cast<int>(Place::none);
  raise(seat.signal);
}

/// The words of a group, with places for faults.
class FaultyStore final : public Store {
 public:
  FaultyStore(Store& inner, Board::Seat& seat) : inner_(inner), seat_(seat) {}
  std::uint64_t get(const StoreKey& key) const override {
    pass(seat_, Place::store);
    return inner_.get(key);
  }
  bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) override {
    pass(seat_, Place::store);
    return inner_.compare_set(key, expected, desired);
  }
  bool wait(const std::function<bool()>& there, Clock::time_point end) override { return inner_.wait(there, end); }

 private:
  Store& inner_;
  Board::Seat& seat_;
};

class FaultyGroup final : public Group {
 public:
  FaultyGroup(std::unique_ptr<Group> inner, Board::Seat& seat) : inner_(std::move(inner)), store_(inner_->store(), seat) {}
  int rank() const override { return inner_->rank(); }
  int ranks() const override { return inner_->ranks(); }
  std::chrono::nanoseconds deadline() const override { return inner_->deadline(); }
  void set_deadline(std::chrono::nanoseconds deadline) override { inner_->set_deadline(deadline); }
  void barrier(const std::string& what) override { inner_->barrier(what); }
  std::vector<std::string> exchange(const std::string& mine, const std::string& what) override {
    return inner_->exchange(mine, what);
  }
  HeapMapping create_heap(std::size_t bytes) override { return inner_->create_heap(bytes); }
  void release_heap(const HeapMapping& heap) override { inner_->release_heap(heap); }
  void reset(const std::vector<bool>& live) override { inner_->reset(live); }
  void begin_era(std::uint32_t era, const std::vector<bool>& live) override { inner_->begin_era(era, live); }
  const std::vector<bool>& live() const override { return inner_->live(); }
  Store& store() override { return store_; }
  void abandon_heap(const HeapMapping& heap) override { inner_->abandon_heap(heap); }
  void answer_door() override { inner_->answer_door(); }
  int nodes() const override { return inner_->nodes(); }
  NodeLink* link() const override { return inner_->link(); }

 private:
  std::unique_ptr<Group> inner_;
  FaultyStore store_;
};

/// Expert weights in pages that can be closed: who reads them then gets the fault.
class GuardedWeights {
 public:
  /// `shape` of the experts in `source`; all are copied.
  explicit GuardedWeights(const LayerSource& source) : source_(source) {
    for (int id = 0; id < source.shape.experts; ++id) bytes_ += room(source.expert(id));
    bytes_ = align_up(bytes_, 4096);
    pages_ = static_cast<std::byte*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::size_t used = 0;
    for (int id = 0; id < source.shape.experts; ++id) {
      experts_.push_back(source.expert(id));
      for (WeightMatrix* matrix : {&experts_.back().gate, &experts_.back().up, &experts_.back().down}) {
        matrix->values = keep(matrix->values, used);
        matrix->scales = keep(matrix->scales, used);
      }
    }
    source_.expert = [this](int id) {
      if (seat_ != nullptr) pass(*seat_, Place::experts);
      return experts_[static_cast<std::size_t>(id)];
    };
  }
  ~GuardedWeights() { munmap(pages_, bytes_); }
  GuardedWeights(const GuardedWeights&) = delete;
  GuardedWeights& operator=(const GuardedWeights&) = delete;

  const LayerSource& source() const { return source_; }
  void watch(Board::Seat& seat) {
    seat_ = &seat;
    guarded() = this;
    struct sigaction action {};
    action.sa_handler = [](int) { guarded()->opened(); };
    sigaction(SIGSEGV, &action, nullptr);
  }
  /// Before a step: closes the pages if the next fault is to be in a product.
  void close_pages() {
    if (seat_->place == static_cast<int>(Place::gemm)) mprotect(pages_, bytes_, PROT_NONE);
  }

 private:
  static GuardedWeights*& guarded() {
    static GuardedWeights* the_one = nullptr;
    return the_one;
  }
  static std::size_t room(const ExpertWeights& expert) {
    std::size_t bytes = 0;
    for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down})
      bytes += align_up(matrix->values.size(), 64) + align_up(matrix->scales.size(), 64);
    return bytes;
  }
  std::span<const std::byte> keep(std::span<const std::byte> from, std::size_t& used) {
    std::byte* to = pages_ + used;
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    used += align_up(from.size(), 64);
    return {to, from.size()};
  }
  void opened() {
    mprotect(pages_, bytes_, PROT_READ | PROT_WRITE);
    pass(*seat_, Place::gemm);
  }

  LayerSource source_;
  std::vector<ExpertWeights> experts_;
  std::byte* pages_ = nullptr;
  std::size_t bytes_ = 0;
  Board::Seat* seat_ = nullptr;
};

}  // namespace heddle::layer_test
