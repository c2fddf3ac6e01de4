// The explorer's memory: what each worker may see of the heap under release and acquire.
//
// Plain memory is made of 4-byte cells. A cell keeps every version ever written to it, stamped with the
// writer and the writer's time; a worker knows a version if its clock has reached the stamp, which only
// publish, acquire and barriers bring about. What it does not know it may see or not: that is a race.
// Words keep every version too, each with the clock its publisher released.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heddle/formats.hpp"
#include "signal/words.hpp"

namespace heddle::explorer {

constexpr int max_workers = 16;

/// For every worker, the time up to which its writes are known.
struct Clock {
  std::array<std::uint32_t, max_workers> at{};
  void join(const Clock& other);
};

/// Heap bytes [begin, end), counted from the first rank's part.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// Two accesses that nothing orders.
struct Race {
  std::size_t offset = 0;
  int earlier_worker = -1;
  int earlier_step = -1;
  const char* earlier = "write";
};

enum class See : std::uint8_t { newest, stalest };

struct WordVersion {
  Word value = 0;
  int worker = -1;  ///< -1: as the heap was created
  std::uint32_t time = 0;
  Clock released;
};

class HeapMemory {
 public:
  /// Parts of `stride` bytes. Plain cells at `poisoned` or later in a part start as poison, earlier ones as zero.
  HeapMemory(int parts, std::size_t stride, std::size_t poisoned);
  void clear();

  Clock& clock(int worker) { return clocks_[static_cast<std::size_t>(worker)]; }
  /// What this worker does from now on is not covered by what it has released.
  void advance(int worker) { ++clock(worker).at[static_cast<std::size_t>(worker)]; }

  // Plain memory. `ticket` 0: done at once; otherwise under way, and unknown to all, until settled.
  std::optional<Race> find_read_race(int worker, Range range) const;
  std::optional<Race> find_write_race(int worker, Range range) const;
  /// As of a write, but additions by others are no race: only reads are, and writes.
  std::optional<Race> find_add_race(int worker, Range range) const;
  void read(int worker, Range range, See see, std::byte* to, std::uint32_t ticket, int step);
  void write(int worker, Range range, const std::byte* from, std::uint32_t ticket, int step);
  /// Adds bf16 values to the newest ones.
  void add(int worker, Range range, const bf16* values, int step);
  void settle_reads(int worker, Range range);
  void settle_writes(int worker, Range range, std::uint32_t ticket);
  /// The words that plain accesses to a range would hit, if any.
  bool holds_word(Range range) const;

  // Words, by their heap offset.
  void store_word(int worker, std::size_t offset, Word value, bool release);
  const WordVersion& word(std::size_t offset, std::size_t version) const { return words_[offset / sizeof(Word)].versions[version]; }
  std::size_t newest_version(std::size_t offset) const { return words_[offset / sizeof(Word)].versions.size() - 1; }
  /// Adds to the newest version and sees it: what its adders released is known, and released again. Returns what it was.
  Word add_to_word(int worker, std::size_t offset, std::uint32_t n);
  /// The oldest version that this worker may still see.
  std::size_t oldest_version(int worker, std::size_t offset) const;
  void see_word(int worker, std::size_t offset, std::size_t version, bool acquire);
  /// Words are plain no more: false if plain accesses came before.
  bool make_word(std::size_t offset);
  /// This worker cannot see older versions of its part's words than the newest from now on.
  void look_at_part(int worker, int part);
  /// Word stores into a part so far.
  std::uint32_t rings(int part) const { return rings_[static_cast<std::size_t>(part)]; }

 private:
  static constexpr std::uint32_t under_way = 0xFFFFFFFFu;
  static constexpr std::size_t cell_bytes = 4;
  struct Version {
    std::uint32_t value = 0;
    std::uint32_t time = 0;
    std::uint32_t ticket = 0;
    std::int32_t step = 0;
    int worker = 0;
    bool added = false;  ///< to the version before, in one with it
  };
  struct Cell {
    std::vector<Version> versions;
    std::array<std::uint32_t, max_workers> read_time{};
    std::array<std::int32_t, max_workers> read_step{};
    bool touched = false;
  };
  struct WordCell {
    std::vector<WordVersion> versions;
    std::array<std::uint32_t, max_workers> floor{};
    bool is_word = false;
  };
  bool knows(int worker, const Version& version) const;
  std::optional<Race> find_read(int worker, std::size_t index) const;
  Cell& touch(std::size_t index);
  std::uint32_t first_value(std::size_t index) const;

  std::size_t stride_;
  std::size_t poisoned_;
  std::vector<Cell> cells_;
  std::vector<WordCell> words_;
  std::vector<std::size_t> touched_;
  std::vector<std::size_t> used_words_;
  std::vector<std::uint32_t> rings_;
  std::array<Clock, max_workers> clocks_;
};

}  // namespace heddle::explorer
