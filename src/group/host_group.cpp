#include "group/host_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "signal/doorbell.hpp"

namespace heddle {

namespace {
constexpr int max_ranks = 1024;
}

void check_group_size(int rank, int ranks) {
  if (ranks < 1 || ranks > max_ranks) throw InputError(fmt::format("a group has 1 to {} ranks, not {}", max_ranks, ranks));
  if (rank < 0 || rank >= ranks) throw InputError(fmt::format("rank {} is outside of a group of {} ranks", rank, ranks));
}

HostGroup::HostGroup(std::shared_ptr<HostMemory> memory, int rank, int ranks, const GroupOptions& options,
                     std::unique_ptr<Door> door)
    : memory_(std::move(memory)),
      mapping_(memory_->map(0, control_stride * static_cast<std::size_t>(ranks))),
      control_{mapping_.get(), control_stride, rank, ranks},
      store_(control_),
      door_(std::move(door)),
      deadline_(options.deadline),
      live_(static_cast<std::size_t>(ranks), true),
      next_offset_(align_up(control_stride * static_cast<std::size_t>(ranks), 4096)) {}

void HostGroup::meet(Counter counter, Word value, const std::string& what, std::chrono::nanoseconds patience) {
  std::atomic_ref<Word>(part(rank()).*counter).store(value, std::memory_order_release);
  for (int peer = 0; peer < ranks(); ++peer) ring(part(peer).header);
  const auto since = std::chrono::steady_clock::now();
  const Doorbell bell(part(rank()).header, link_);
  for (int peer = 0; peer < ranks();) {
    const std::uint32_t rung = bell.read();
    const Word seen = std::atomic_ref<Word>(part(peer).*counter).load(std::memory_order_acquire);
    if (!live_[static_cast<std::size_t>(peer)]) {
      ++peer;
      continue;
    }
    throw_if_left_behind(peer, what);
    if (seen >= value) {
      ++peer;
      continue;
    }
    const auto left = patience - (std::chrono::steady_clock::now() - since);
    if (left <= std::chrono::nanoseconds(0)) throw FaultError({rank(), peer, what, "arrival", value, seen});
    bell.sleep(rung, left);
  }
}

/// Have the others met in a later reset without this rank? What it reads of them may then belong to what they do since.
void HostGroup::throw_if_left_behind(int peer, const std::string& what) const {
  const Word mine = std::atomic_ref<Word>(part(rank()).generation).load(std::memory_order_relaxed);
  const Word theirs = std::atomic_ref<Word>(part(peer).generation).load(std::memory_order_acquire);
  if (theirs <= mine + 1 && word_tag(theirs) <= word_tag(mine)) return;
  throw FaultError({rank(), peer, what, "arrival, but it has left in a later reset", mine, theirs});
}

void HostGroup::barrier(const std::string& what) { meet(&RankControl::arrived, ++barriers_, what, deadline_); }

std::vector<std::string> HostGroup::exchange(const std::string& mine, const std::string& what) {
  if (mine.size() > control_text_bytes) {
    throw InputError(
        fmt::format("{}: a text of {} bytes was to be exchanged, {} is the most", what, mine.size(), control_text_bytes));
  }
  RankControl& own = part(rank());
  std::memcpy(own.text, mine.data(), mine.size());
  own.text_length = static_cast<std::uint32_t>(mine.size());
  barrier(what);
  std::vector<std::string> all(static_cast<std::size_t>(ranks()));
  for (int peer = 0; peer < ranks(); ++peer) {
    if (live_[static_cast<std::size_t>(peer)]) all[static_cast<std::size_t>(peer)].assign(part(peer).text, part(peer).text_length);
  }
  barrier(what);  // nobody writes its next text while another still reads this one
  return all;
}

int HostGroup::leader() const { return static_cast<int>(std::find(live_.begin(), live_.end(), true) - live_.begin()); }

namespace {
/// Where a heap lies in the group's memory; it rides along with the mapping, for release_heap.
struct HeapPlace {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};
}  // namespace

HeapMapping HostGroup::create_part_of_heap(std::size_t bytes, int first, int parts) {
  const std::size_t stride = align_up(std::max<std::size_t>(bytes, 1), 4096);
  const std::size_t total = stride * static_cast<std::size_t>(parts);
  std::size_t offset = next_offset_;
  for (const std::string& text : exchange(fmt::format("{}", next_offset_), "heap creation")) {
    if (!text.empty()) offset = std::max<std::size_t>(offset, std::stoull(text));
  }
  // Also where what follows fails: a rank that was stopped in here and goes on later must not find its range in use.
  next_offset_ = offset + total;
  const auto reserve = [&] {
    const auto at = [&](int part) { return offset + stride * static_cast<std::size_t>(part); };
    int status = memory_->reserve(at(first), stride * static_cast<std::size_t>(ranks()));
    for (int part = 0; part < parts && status == 0; ++part) {
      if (part < first || part >= first + ranks()) status = memory_->reserve(at(part), align_up(heap_header_bytes, 4096));
    }
    return status;
  };
  const int status = rank() == leader() ? reserve() : 0;
  const std::string answer = exchange(fmt::format("{}", status), "heap creation")[static_cast<std::size_t>(leader())];
  if (answer != "0") {
    throw InputError(fmt::format("no memory for a heap of {} a rank, {} for {} ranks: {}", describe_bytes(bytes),
                                 describe_bytes(stride * static_cast<std::size_t>(ranks())), ranks(),
                                 std::strerror(std::stoi(answer))));
  }
  auto mapping = memory_->map(offset, total);
  HeapMapping heap;
  heap.view = {mapping.get(), stride, first + rank(), parts};
  heap.bytes = bytes;
  heap.keep = std::shared_ptr<const void>(new HeapPlace{offset, total},
                                          [mapping](const void* p) { delete static_cast<const HeapPlace*>(p); });
  return heap;
}

void HostGroup::release_heap(const HeapMapping& heap) {
  barrier("heap release");
  const auto* place = static_cast<const HeapPlace*>(heap.keep.get());
  if (rank() == leader()) memory_->discard(place->offset, place->bytes);
  barrier("heap release");
}

void HostGroup::abandon_heap(const HeapMapping& heap) {
  const auto* place = static_cast<const HeapPlace*>(heap.keep.get());
  memory_->discard(place->offset, place->bytes);
}

void HostGroup::answer_door() {
  if (door_) door_->answer(*memory_, ranks());
}

void HostGroup::reset(const std::vector<bool>& live) {
  meet_anew(word_tag(std::atomic_ref<Word>(part(rank()).generation).load(std::memory_order_relaxed)), live);
}

void HostGroup::begin_era(std::uint32_t era, const std::vector<bool>& live) { meet_anew(era, live); }

void HostGroup::meet_anew(std::uint32_t era, const std::vector<bool>& live) {
  if (live.size() != live_.size())
    throw InputError(fmt::format("reset with {} live flags for {} ranks", live.size(), live_.size()));
  if (live != live_) live_ = live;  // another context of this rank may be reading it
  // A barrier that failed left the counters apart. They never go back, since a rank may still be on its
  // way out of a barrier that others have left: all go on from the furthest. The others may come later
  // by a whole wait of their own, and by the wait that their abort ended.
  // Likewise the meetings of a reset that failed: a reset arrives at an odd number and leaves at the
  // next even one, and all take the first number of the era that nobody has passed.
  RankControl& own = part(rank());
  Word begun = pack_word(era, 0);
  for (int peer = 0; peer < ranks(); ++peer) {
    if (!live_[static_cast<std::size_t>(peer)]) continue;
    const Word theirs = std::atomic_ref<Word>(part(peer).generation).load();
    if (word_tag(theirs) > era) throw FaultError({rank(), peer, "group reset", "arrival in era", era, word_tag(theirs)});
    begun = std::max(begun, theirs);
  }
  const Word arrival = begun / 2 * 2 + 1;
  meet(&RankControl::generation, arrival, "group reset", 3 * deadline_);
  for (int peer = 0; peer < ranks(); ++peer) {
    barriers_ = std::max(barriers_, std::atomic_ref<Word>(part(peer).arrived).load(std::memory_order_acquire));
  }
  meet(&RankControl::generation, arrival + 1, "group reset", deadline_);
  std::atomic_ref<Word>(own.arrived).store(barriers_, std::memory_order_release);
}

std::shared_ptr<HostMemory> create_group_memory(int ranks) {
  auto memory = HostMemory::create();
  const std::size_t bytes = control_stride * static_cast<std::size_t>(ranks);
  if (const int status = memory->reserve(0, bytes); status != 0) {
    throw InputError(fmt::format("no memory for the control segment of {} ranks: {} are wanted, {} can be taken here; {}", ranks,
                                 describe_bytes(bytes), describe_bytes(available_memory()), std::strerror(status)));
  }
  return memory;
}

std::vector<std::unique_ptr<Group>> create_thread_group(int ranks, const GroupOptions& options) {
  check_group_size(0, ranks);
  const auto memory = create_group_memory(ranks);
  std::vector<std::unique_ptr<Group>> group;
  for (int rank = 0; rank < ranks; ++rank) group.push_back(std::make_unique<HostGroup>(memory, rank, ranks, options));
  return group;
}

}  // namespace heddle
