#include "explorer/worker.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "formats/rows.hpp"

namespace heddle::explorer {

static_assert(CountingWorker<ExplorerWorker>);

namespace {
constexpr std::byte unfinished{0xEE};  // what the destination of a copy under way shows

std::size_t size_of(const RowFormat& format) { return format.row_bytes(); }
}  // namespace

ExplorerWorker::ExplorerWorker(Machine& machine, int rank, int index)
    : machine_(machine),
      heap_(machine.view(rank)),
      index_(index - machine.team_begin(index)),
      count_(machine.team_size(index)),
      id_(machine.worker_id(rank, index)) {}

void ExplorerWorker::violate_race(const char* now, const Race& race) {
  machine_.violate(fmt::format("race: {} {} {}, not ordered after the {} by {} in step {}", machine_.worker_name(id_), now,
                               machine_.describe(race.offset), race.earlier, machine_.worker_name(race.earlier_worker),
                               race.earlier_step));
}

void ExplorerWorker::local_verb() {
  if (!machine_.options().every_verb) return;
  machine_.prepare(id_, VerbKind::local);
  machine_.step(id_);
}

bool ExplorerWorker::begin() {
  local_verb();
  return true;
}

bool ExplorerWorker::in_heap(const void* address) const {
  if (machine_.misses_heap(address))
    machine_.violate(fmt::format("{} computed an address outside of every part", machine_.worker_name(id_)));
  return heap_.owner(address) >= 0;
}

void ExplorerWorker::add_access(Verb& verb, const void* address, std::size_t bytes, bool writes) const {
  if (!in_heap(address)) return;
  const Range range = machine_.range(address, bytes);
  if (machine_.memory().holds_word(range)) {
    machine_.violate(
        fmt::format("{} touches the word at {} as plain memory", machine_.worker_name(id_), machine_.describe(range.begin)));
  }
  verb.accesses.push_back({range, Access::To::plain, writes});
}

bool ExplorerWorker::stop(const Verb& verb) {
  if (verb.accesses.empty() && !machine_.options().every_verb) return false;
  machine_.step(id_);
  return true;
}

See ExplorerWorker::decide_what_to_see() {
  for (const Access& access : machine_.happening().accesses) {
    if (access.writes) continue;
    const auto race = machine_.memory().find_read_race(id_, access.range);
    if (!race) continue;
    if (machine_.options().races) violate_race("reads", *race);
    return machine_.choose(2) == 0 ? See::newest : See::stalest;
  }
  return See::newest;
}

void ExplorerWorker::read_plain(const void* from, std::byte* to, std::size_t bytes, See see, std::uint32_t ticket) {
  if (in_heap(from)) {
    machine_.memory().read(id_, machine_.range(from, bytes), see, to, ticket, machine_.now());
  } else {
    std::memcpy(to, from, bytes);
  }
}

void ExplorerWorker::write_plain(void* to, const std::byte* from, std::size_t bytes, std::uint32_t ticket) {
  if (!in_heap(to)) {
    std::memcpy(to, from, bytes);
    return;
  }
  const Range range = machine_.range(to, bytes);
  if (machine_.options().races) {
    if (const auto race = machine_.memory().find_write_race(id_, range)) violate_race("writes", *race);
  }
  machine_.memory().write(id_, range, from, ticket, machine_.now());
}

void ExplorerWorker::load(const void* address, void* value, std::size_t bytes) {
  Verb& verb = machine_.prepare(id_, VerbKind::read);
  add_access(verb, address, bytes, false);
  const See see = stop(verb) ? decide_what_to_see() : See::newest;
  read_plain(address, static_cast<std::byte*>(value), bytes, see);
}

void ExplorerWorker::store(void* address, const void* value, std::size_t bytes) {
  Verb& verb = machine_.prepare(id_, VerbKind::write);
  add_access(verb, address, bytes, true);
  stop(verb);
  write_plain(address, static_cast<const std::byte*>(value), bytes);
}

Ticket ExplorerWorker::start_copy(void* to, const void* from, std::size_t from_bytes, const RowFormat* convert, bool source_stays) {
  const std::size_t to_bytes = convert == nullptr ? from_bytes : size_of(*convert);
  Verb& verb = machine_.prepare(id_, VerbKind::copy);
  add_access(verb, from, from_bytes, false);
  add_access(verb, to, to_bytes, true);
  const See see = stop(verb) ? decide_what_to_see() : See::newest;
  Copy copy;
  copy.ticket = ++tickets_;
  copy.to = to;
  copy.from = from;
  copy.reads_heap = in_heap(from);
  copy.writes_heap = in_heap(to);
  copy.source.resize(from_bytes);
  read_plain(from, copy.source.data(), from_bytes, see, copy.ticket);
  copy.heap_source_bytes = copy.reads_heap ? from_bytes : 0;
  copy.source_bytes = source_stays && !copy.reads_heap ? from_bytes : 0;
  if (convert == nullptr) {
    copy.result = copy.source;
  } else {
    copy.result.resize(to_bytes);
    std::vector<bf16> values(static_cast<std::size_t>(convert->hidden));
    std::memcpy(values.data(), copy.source.data(), from_bytes);
    heddle::quantise_row(values.data(), *convert, copy.result.data());
  }
  if (copy.writes_heap) {
    write_plain(to, copy.result.data(), to_bytes, copy.ticket);
  } else {
    std::memset(to, static_cast<int>(unfinished), to_bytes);
  }
  under_way_.push_back(std::move(copy));
  if (!machine_.options().late_copies) complete({tickets_});
  return {tickets_};
}

void ExplorerWorker::settle(const Copy& copy) {
  if (copy.source_bytes != 0 && std::memcmp(copy.from, copy.source.data(), copy.source_bytes) != 0) {
    machine_.violate(fmt::format("{} changed the source of a copy before it was completed", machine_.worker_name(id_)));
  }
  if (copy.reads_heap) machine_.memory().settle_reads(id_, machine_.range(copy.from, copy.heap_source_bytes));
  if (copy.writes_heap) {
    machine_.memory().settle_writes(id_, machine_.range(copy.to, copy.result.size()), copy.ticket);
  } else {
    std::memcpy(copy.to, copy.result.data(), copy.result.size());
  }
}

Ticket ExplorerWorker::copy_row(std::byte* to, const std::byte* from, const RowFormat& format) {
  return start_copy(to, from, format.row_bytes(), nullptr, true);
}

Ticket ExplorerWorker::copy_bytes(void* to, const void* from, std::size_t bytes) {
  return start_copy(to, from, bytes, nullptr, false);
}

Ticket ExplorerWorker::quantise_row(std::byte* to, const bf16* from, const RowFormat& format) {
  return start_copy(to, from, static_cast<std::size_t>(format.hidden) * sizeof(bf16), &format, true);
}

std::byte* ExplorerWorker::staging(const RowFormat& format) {
  for (std::size_t i = under_way_.size(); i-- > 0;) {
    if (under_way_[i].from == staging_.data()) complete({under_way_[i].ticket});
  }
  if (staging_.size() < format.row_bytes()) staging_.resize(format.row_bytes());
  return staging_.data();
}

void ExplorerWorker::complete(Ticket ticket) {
  const auto copy = std::find_if(under_way_.begin(), under_way_.end(), [&](const Copy& c) { return c.ticket == ticket.number; });
  if (copy == under_way_.end()) return;
  settle(*copy);
  under_way_.erase(copy);
}

void ExplorerWorker::complete_all() {
  for (const Copy& copy : under_way_) settle(copy);
  under_way_.clear();
}

void ExplorerWorker::clear(std::byte* to, std::size_t bytes) {
  const std::vector<std::byte> zeros(bytes);
  store(to, zeros.data(), bytes);
}

void ExplorerWorker::add_values(bf16* to, const bf16* from, int n) {
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(bf16);
  Verb& verb = machine_.prepare(id_, VerbKind::add);
  add_access(verb, to, bytes, true);
  stop(verb);
  const Range range = machine_.range(to, bytes);
  if (machine_.options().races) {
    if (const auto race = machine_.memory().find_add_race(id_, range)) violate_race("adds to", *race);
  }
  machine_.memory().add(id_, range, from, machine_.now());
}

void ExplorerWorker::add_words(std::byte* to, const std::byte* from, std::size_t bytes) {
  Verb& verb = machine_.prepare(id_, VerbKind::add);
  add_access(verb, from, bytes, false);
  add_access(verb, to, bytes, false);
  add_access(verb, to, bytes, true);
  const See see = stop(verb) ? decide_what_to_see() : See::newest;
  std::vector<std::uint32_t> sum(bytes / sizeof(std::uint32_t));
  std::vector<std::uint32_t> addend(sum.size());
  read_plain(to, reinterpret_cast<std::byte*>(sum.data()), bytes, see);
  read_plain(from, reinterpret_cast<std::byte*>(addend.data()), bytes, see);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += addend[i];
  write_plain(to, reinterpret_cast<const std::byte*>(sum.data()), bytes);
}

void ExplorerWorker::sum_terms(bf16* out, const SumFormat& format, const LastTerm& last) {
  const auto hidden = static_cast<std::size_t>(format.row.hidden);
  Verb& verb = machine_.prepare(id_, VerbKind::reduce);
  for (const SumTerm& term : terms_) {
    if (term.row != nullptr) add_access(verb, term.row, format.row.row_bytes(), false);
  }
  if (last.row != nullptr) add_access(verb, last.row, hidden * sizeof(bf16), false);
  add_access(verb, out, hidden * sizeof(bf16), true);
  const See see = stop(verb) ? decide_what_to_see() : See::newest;
  std::vector<float> sum(hidden, 0.0f);
  std::vector<float> values(hidden);
  std::vector<std::byte> row(format.row.row_bytes());
  for (const SumTerm& term : terms_) {
    if (term.row == nullptr) continue;
    read_plain(term.row, row.data(), row.size(), see);
    widen_row(row.data(), format.row, values.data());
    for (std::size_t i = 0; i < hidden; ++i)
      sum[i] = format.weighted ? std::fma(term.weight, values[i], sum[i]) : sum[i] + values[i];
  }
  std::vector<bf16> result(hidden);
  if (last.row != nullptr) {
    read_plain(last.row, reinterpret_cast<std::byte*>(result.data()), hidden * sizeof(bf16), see);
    for (std::size_t i = 0; i < hidden; ++i) sum[i] += last.factor * to_float(result[i]);
  }
  for (std::size_t i = 0; i < hidden; ++i) result[i] = to_bf16(sum[i]);
  write_plain(out, reinterpret_cast<const std::byte*>(result.data()), hidden * sizeof(bf16));
}

void ExplorerWorker::end_launch() {
  ExplorerWorker::complete_all();
  if (machine_.rank_size() > 1) meet(Machine::Meeting::rank);
}

}  // namespace heddle::explorer
