#include "signal/host_worker.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "trace/recorder.hpp"

namespace heddle {

HostWorker::HostWorker(const HostTeam& team, int index) : team_(team), index_(index) {}

void start_team(const HeapView& heap) {
  auto* header = heap.mine<HeapHeader>(0);
  std::atomic_ref<Word>(header->team).store(0);
  std::atomic_ref<std::uint32_t>(header->arrivals).store(0);
}

void HostWorker::start(CallPart part) {
  auto* header = team_.heap.mine<HeapHeader>(0);
  const std::atomic_ref<Word> used(header->epoch);
  const std::atomic_ref<Word> call(header->call);
  const bool begins = part == CallPart::dispatch_send;
  const Word last = used.load(std::memory_order_relaxed);
  const Word now = call.load(std::memory_order_relaxed);
  // To receive without having sent is to wait for a call that nobody has begun.
  const bool lost = part == CallPart::dispatch_receive && now == last;
  epoch_ = static_cast<std::uint32_t>(begins || lost ? last + 1 : now);
  if (index_ != 0) return;
  if (begins) call.store(epoch_, std::memory_order_relaxed);
  if (part == CallPart::combine) used.store(epoch_, std::memory_order_relaxed);
}

bool HostWorker::aborted() const {
  return std::atomic_ref<Word>(team_.heap.mine<HeapHeader>(0)->abort).load(std::memory_order_acquire) != 0;
}

bool HostWorker::begin() {
  verb();
  return !aborted();
}

bool HostWorker::fail(const WordName& name, std::uint64_t expected, std::uint64_t seen) {
  raise_abort(team_.heap, {name, team_.heap.rank, expected, seen});
  return false;
}

Ticket HostWorker::copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
  verb();
  std::memcpy(to, from, format.row_bytes());
  return {};
}

Ticket HostWorker::copy_bytes(void* to, const void* from, std::size_t bytes) {
  verb();
  std::memcpy(to, from, bytes);
  return {};
}

Ticket HostWorker::quantise_row(std::byte* to, const bf16* from, const RowFormat& format) {
  verb();
  heddle::quantise_row(from, format, to);
  return {};
}

std::byte* HostWorker::staging(const RowFormat& format) {
  if (staging_.size() < format.row_bytes()) staging_.resize(format.row_bytes());
  return staging_.data();
}

void HostWorker::clear(std::byte* to, std::size_t bytes) {
  verb();
  std::memset(to, 0, bytes);
}

void HostWorker::add_values(bf16* to, const bf16* from, int n) {
  verb();
  for (int i = 0; i < n; ++i) {
    const std::atomic_ref<std::uint16_t> sum(to[i].bits);
    std::uint16_t seen = sum.load(std::memory_order_relaxed);
    const auto grown = [&] { return to_bf16(to_float(bf16{seen}) + to_float(from[i])).bits; };
    while (!sum.compare_exchange_weak(seen, grown(), std::memory_order_relaxed)) continue;
  }
}

void HostWorker::add_words(std::byte* to, const std::byte* from, std::size_t bytes) {
  verb();
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint32_t)) {
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::memcpy(&a, to + at, sizeof a);
    std::memcpy(&b, from + at, sizeof b);
    a += b;
    std::memcpy(to + at, &a, sizeof a);
  }
}

void HostWorker::publish(Word* word, std::uint32_t value) {
  verb();
  std::atomic_ref<Word>(*word).store(pack_word(epoch_, value), std::memory_order_release);
  const int owner = team_.heap.owner(word);
  ring(*team_.heap.at<HeapHeader>(owner, 0));
}

void HostWorker::start_count(Word* word) {
  verb();
  std::atomic_ref<Word>(*word).store(pack_word(epoch_, 0), std::memory_order_relaxed);
}

std::uint32_t HostWorker::add(Word* word, std::uint32_t n) {
  verb();
  const Word before = std::atomic_ref<Word>(*word).fetch_add(n, std::memory_order_acq_rel);
  ring(*team_.heap.mine<HeapHeader>(0));
  return word_value(before);
}

template <class Arrived, class Moved>
bool HostWorker::wait(const Word* word, const WordName& name, std::uint64_t expected, std::chrono::nanoseconds longest,
                      Arrived arrived, Moved moved) {
  const std::atomic_ref<Word> atomic(*const_cast<Word*>(word));
  for (int look = 0; look < team_.spins; ++look) {
    if (arrived(atomic.load(std::memory_order_acquire))) return true;
  }
  auto since = Clock::now();
  const Doorbell bell = doorbell();
  auto last = moved(bell.read());
  std::optional<trace::Recorded> waiting;
  for (;;) {
    const std::uint32_t rung = bell.read();
    const Word seen = atomic.load(std::memory_order_acquire);
    if (arrived(seen)) return true;
    if (aborted()) return false;
    if (const auto now = moved(rung); now != last) {
      last = now;
      since = Clock::now();
    }
    const auto left = longest - (Clock::now() - since);
    if (left <= std::chrono::nanoseconds(0)) {
      fail(name, expected, seen);
      return false;
    }
    if (!waiting) waiting.emplace(name);
    bell.sleep(rung, left);
  }
}

bool HostWorker::acquire_at_least(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value) {
  verb();
  return wait(word, name, pack_word(epoch_, least), team_.deadline, [&](Word seen) {
    value = word_value(seen);
    return word_tag(seen) == epoch_ && value >= least;
  });
}

bool HostWorker::acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
  verb();
  return wait(
      word, name, pack_word(epoch_, least), 2 * team_.deadline,
      [&](Word seen) { return word_tag(seen) == epoch_ && word_value(seen) >= least; }, [](std::uint32_t rung) { return rung; });
}

bool HostWorker::peek(const Word* word, std::uint32_t& value) {
  verb();
  const Word seen = std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_acquire);
  value = word_value(seen);
  return word_tag(seen) == epoch_;
}

bool HostWorker::take_word(const Word* word, const WordName& name, std::uint32_t& value) {
  Word seen = std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_relaxed);
  const auto arrived = [&](Word now) {
    seen = now;
    return word_tag(now) == epoch_;
  };
  const bool there = arrived(seen) || wait(word, name, pack_word(epoch_, 0), team_.deadline, arrived);
  value = word_value(seen);
  return there;
}

HostWorker::Patience HostWorker::look() {
  verb();
  return {Clock::now(), Doorbell(*team_.heap.mine<HeapHeader>(0)).read()};
}

bool HostWorker::rest(Patience& patience, const WordName& name, Word expected, Word seen) {
  verb();
  if (aborted()) return false;
  const Doorbell bell = doorbell();
  if (bell.read() == patience.rung) {
    const auto left = team_.deadline - (Clock::now() - patience.since);
    if (left <= std::chrono::nanoseconds(0)) {
      fail(name, expected, seen);
      return false;
    }
    const trace::Recorded waiting(name);
    bell.sleep(patience.rung, left);
  }
  // Something may have come since the peeks: it is looked at before a deadline counts.
  patience.rung = bell.read();
  return true;
}

void HostWorker::note_progress() { std::atomic_ref<std::uint64_t>(team_.progress).fetch_add(1, std::memory_order_relaxed); }

bool HostWorker::team_barrier() {
  verb();
  if (team_.count == 1) return !aborted();
  auto* header = team_.heap.mine<HeapHeader>(0);
  const std::atomic_ref<Word> arrivals(header->team);
  const auto count = static_cast<Word>(team_.count);
  const Word target = (arrivals.fetch_add(1) / count + 1) * count;
  ring(*header);
  const WordName name{WordKind::team, team_.heap.rank, -1};
  // Longer than any word's deadline: a fellow worker that waits for another rank names that rank first.
  return wait(
      &header->team, name, target, 2 * team_.deadline, [target](Word seen) { return seen >= target; },
      [this](std::uint32_t) { return progress(); });
}

bool HostWorker::last_of_team() {
  verb();
  const std::atomic_ref<std::uint32_t> arrivals(team_.heap.mine<HeapHeader>(0)->arrivals);
  return (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1) % static_cast<std::uint32_t>(team_.count) == 0;
}

void HostWorker::start_sum(int hidden) {
  sum_.assign(static_cast<std::size_t>(hidden), 0.0f);
  widened_.resize(static_cast<std::size_t>(hidden));
}

void HostWorker::add_to_sum(const SumTerm& term, const SumFormat& format) {
  const auto n = static_cast<std::size_t>(format.row.hidden);
  widen_row(term.row, format.row, widened_.data());
  if (format.weighted) {
    for (std::size_t i = 0; i < n; ++i) sum_[i] = std::fma(term.weight, widened_[i], sum_[i]);
  } else {
    for (std::size_t i = 0; i < n; ++i) sum_[i] += widened_[i];
  }
}

void HostWorker::finish_sum(bf16* out, int hidden, const LastTerm& last) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(hidden); ++i) {
    out[i] = to_bf16(last.row == nullptr ? sum_[i] : sum_[i] + last.factor * to_float(last.row[i]));
  }
}

}  // namespace heddle
