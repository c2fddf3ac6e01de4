#include "explorer/memory.hpp"

#include <algorithm>
#include <cstring>

namespace heddle::explorer {

namespace {
constexpr std::uint32_t poison = 0xDEADDEADu;  // as two bf16 values: about -6e18
std::size_t at(int worker) { return static_cast<std::size_t>(worker); }
}  // namespace

void Clock::join(const Clock& other) {
  for (std::size_t i = 0; i < max_workers; ++i) at[i] = std::max(at[i], other.at[i]);
}

HeapMemory::HeapMemory(int parts, std::size_t stride, std::size_t poisoned)
    : stride_(stride),
      poisoned_(poisoned),
      cells_(static_cast<std::size_t>(parts) * stride / cell_bytes),
      words_(static_cast<std::size_t>(parts) * stride / sizeof(Word)),
      rings_(static_cast<std::size_t>(parts)) {
  clear();
}

void HeapMemory::clear() {
  for (const std::size_t index : touched_) {
    Cell& cell = cells_[index];
    cell.versions.clear();
    cell.read_time.fill(0);
    cell.touched = false;
  }
  touched_.clear();
  for (const std::size_t index : used_words_) {
    words_[index].versions.clear();
    words_[index].floor.fill(0);
    words_[index].is_word = false;
  }
  used_words_.clear();
  std::fill(rings_.begin(), rings_.end(), 0);
  for (int worker = 0; worker < max_workers; ++worker) {
    clock(worker) = {};
    advance(worker);
  }
}

bool HeapMemory::knows(int worker, const Version& version) const {
  return version.time != under_way && version.time <= clocks_[at(worker)].at[at(version.worker)];
}

HeapMemory::Cell& HeapMemory::touch(std::size_t index) {
  Cell& cell = cells_[index];
  if (!cell.touched) {
    cell.touched = true;
    touched_.push_back(index);
  }
  return cell;
}

std::uint32_t HeapMemory::first_value(std::size_t index) const { return index * cell_bytes % stride_ < poisoned_ ? 0 : poison; }

std::optional<Race> HeapMemory::find_read_race(int worker, Range range) const {
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i) {
    for (auto version = cells_[i].versions.rbegin(); version != cells_[i].versions.rend(); ++version) {
      if (!knows(worker, *version)) return Race{i * cell_bytes, version->worker, version->step, "write"};
      if (!version->added) break;
    }
  }
  return {};
}

/// A read of a cell that this worker does not know of.
std::optional<Race> HeapMemory::find_read(int worker, std::size_t index) const {
  const Cell& cell = cells_[index];
  if (!cell.touched) return {};
  for (std::size_t reader = 0; reader < max_workers; ++reader) {
    if (cell.read_time[reader] == 0) continue;
    const bool own = reader == at(worker) && cell.read_time[reader] != under_way;
    if (!own && (cell.read_time[reader] == under_way || cell.read_time[reader] > clocks_[at(worker)].at[reader])) {
      return Race{index * cell_bytes, static_cast<int>(reader), cell.read_step[reader], "read"};
    }
  }
  return {};
}

std::optional<Race> HeapMemory::find_write_race(int worker, Range range) const {
  if (auto race = find_read_race(worker, range)) return race;
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i) {
    if (auto race = find_read(worker, i)) return race;
  }
  return {};
}

std::optional<Race> HeapMemory::find_add_race(int worker, Range range) const {
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i) {
    const auto& versions = cells_[i].versions;
    const auto written = std::find_if(versions.rbegin(), versions.rend(), [](const Version& v) { return !v.added; });
    if (written != versions.rend() && !knows(worker, *written))
      return Race{i * cell_bytes, written->worker, written->step, "write"};
    if (auto race = find_read(worker, i)) return race;
  }
  return {};
}

void HeapMemory::read(int worker, Range range, See see, std::byte* to, std::uint32_t ticket, int step) {
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i, to += cell_bytes) {
    Cell& cell = touch(i);
    auto version = cell.versions.rbegin();
    if (see == See::stalest)
      version = std::find_if(version, cell.versions.rend(), [&](const Version& v) { return knows(worker, v); });
    const std::uint32_t value = version == cell.versions.rend() ? first_value(i) : version->value;
    std::memcpy(to, &value, sizeof value);
    cell.read_time[at(worker)] = ticket == 0 ? clocks_[at(worker)].at[at(worker)] : under_way;
    cell.read_step[at(worker)] = step;
  }
}

void HeapMemory::write(int worker, Range range, const std::byte* from, std::uint32_t ticket, int step) {
  const std::uint32_t time = ticket == 0 ? clocks_[at(worker)].at[at(worker)] : under_way;
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i, from += cell_bytes) {
    Version version{0, time, ticket, step, worker, false};
    std::memcpy(&version.value, from, sizeof version.value);
    touch(i).versions.push_back(version);
  }
}

void HeapMemory::add(int worker, Range range, const bf16* values, int step) {
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i, values += 2) {
    Cell& cell = touch(i);
    const std::uint32_t before = cell.versions.empty() ? first_value(i) : cell.versions.back().value;
    bf16 sums[2];
    for (std::size_t half = 0; half < 2; ++half) sums[half].bits = static_cast<std::uint16_t>(before >> (16 * half));
    for (std::size_t half = 0; half < 2; ++half) sums[half] = to_bf16(to_float(sums[half]) + to_float(values[half]));
    Version version{0, clocks_[at(worker)].at[at(worker)], 0, step, worker, true};
    std::memcpy(&version.value, sums, sizeof version.value);
    cell.versions.push_back(version);
  }
}

void HeapMemory::settle_reads(int worker, Range range) {
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i) {
    cells_[i].read_time[at(worker)] = clocks_[at(worker)].at[at(worker)];
  }
}

void HeapMemory::settle_writes(int worker, Range range, std::uint32_t ticket) {
  for (std::size_t i = range.begin / cell_bytes; i < range.end / cell_bytes; ++i) {
    for (Version& version : cells_[i].versions) {
      if (version.worker == worker && version.ticket == ticket && version.time == under_way) {
        version.time = clocks_[at(worker)].at[at(worker)];
      }
    }
  }
}

bool HeapMemory::holds_word(Range range) const {
  for (std::size_t i = range.begin / sizeof(Word); i * sizeof(Word) < range.end; ++i) {
    if (words_[i].is_word) return true;
  }
  return false;
}

bool HeapMemory::make_word(std::size_t offset) {
  WordCell& word = words_[offset / sizeof(Word)];
  if (word.is_word) return true;
  if (cells_[offset / cell_bytes].touched || cells_[offset / cell_bytes + 1].touched) return false;
  word.is_word = true;
  word.versions.emplace_back();
  used_words_.push_back(offset / sizeof(Word));
  return true;
}

void HeapMemory::store_word(int worker, std::size_t offset, Word value, bool release) {
  WordCell& word = words_[offset / sizeof(Word)];
  word.versions.push_back({value, worker, clock(worker).at[at(worker)], release ? clock(worker) : Clock{}});
  word.floor[at(worker)] = static_cast<std::uint32_t>(word.versions.size() - 1);
  ++rings_[offset / stride_];
  advance(worker);
}

Word HeapMemory::add_to_word(int worker, std::size_t offset, std::uint32_t n) {
  const std::size_t newest = newest_version(offset);
  const Word before = word(offset, newest).value;
  see_word(worker, offset, newest, true);
  store_word(worker, offset, before + n, true);
  return before;
}

std::size_t HeapMemory::oldest_version(int worker, std::size_t offset) const {
  const WordCell& word = words_[offset / sizeof(Word)];
  for (std::size_t version = word.versions.size() - 1; version > word.floor[at(worker)]; --version) {
    const WordVersion& candidate = word.versions[version];
    if (candidate.worker < 0 || candidate.time <= clocks_[at(worker)].at[at(candidate.worker)]) return version;
  }
  return word.floor[at(worker)];
}

void HeapMemory::see_word(int worker, std::size_t offset, std::size_t version, bool acquire) {
  WordCell& word = words_[offset / sizeof(Word)];
  word.floor[at(worker)] = std::max(word.floor[at(worker)], static_cast<std::uint32_t>(version));
  if (acquire) clock(worker).join(word.versions[version].released);
}

void HeapMemory::look_at_part(int worker, int part) {
  for (const std::size_t index : used_words_) {
    if (index * sizeof(Word) / stride_ != at(part)) continue;
    words_[index].floor[at(worker)] = static_cast<std::uint32_t>(words_[index].versions.size() - 1);
  }
}

}  // namespace heddle::explorer
