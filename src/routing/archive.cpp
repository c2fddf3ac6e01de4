// The format: APPNOTE.TXT of PKWARE, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16 (end records) and
// 4.5.3 (sizes of 64 bits).
#include "routing/archive.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "heddle/error.hpp"
#include "routing/file_bytes.hpp"

namespace heddle {

namespace {

constexpr std::uint32_t local_mark = 0x04034b50, entry_mark = 0x02014b50, end_mark = 0x06054b50, end64_mark = 0x06064b50,
                        locator64_mark = 0x07064b50;
constexpr std::size_t local_bytes = 30, entry_bytes = 46, end_bytes = 22, end64_bytes = 56, locator64_bytes = 20;
constexpr std::uint32_t in_extra = std::numeric_limits<std::uint32_t>::max();  // the value stands in a field of 64 bits

bool has(std::span<const char> bytes, std::uint64_t offset, std::uint64_t count) {
  return offset <= bytes.size() && count <= bytes.size() - offset;
}

/// Where the directory begins, and how many members it has.
struct Directory {
  std::uint64_t offset = 0, members = 0;
};

/// The end record is the last thing of the file but a comment.
std::size_t find_end(std::span<const char> bytes) {
  constexpr std::size_t longest_comment = 65535, none = std::numeric_limits<std::size_t>::max();
  if (bytes.size() < end_bytes) return none;
  const std::size_t last = bytes.size() - end_bytes;
  for (std::size_t back = 0; back <= std::min(last, longest_comment); ++back) {
    if (value_in<std::uint32_t>(bytes, last - back) == end_mark) return last - back;
  }
  return none;
}

/// A file's size and place, from its directory entry or from the entry's field of 64 bits.
struct Place {
  std::uint64_t packed = 0, size = 0, header = 0;
};

Place place_of(std::span<const char> entry, std::span<const char> extra) {
  Place place{value_in<std::uint32_t>(entry, 20), value_in<std::uint32_t>(entry, 24), value_in<std::uint32_t>(entry, 42)};
  constexpr std::uint16_t sizes_of_64_bits = 1;
  for (std::size_t at = 0; has(extra, at, 4);) {
    const auto kind = value_in<std::uint16_t>(extra, at), length = value_in<std::uint16_t>(extra, at + 2);
    at += 4;
    if (kind == sizes_of_64_bits) {
      for (std::uint64_t* const value :
           {&place.size, &place.packed, &place.header}) {  // only those that are missing, in this order
        if (*value != in_extra || !has(extra, at, 8)) continue;
        *value = value_in<std::uint64_t>(extra, at);
        at += 8;
      }
      break;
    }
    at += length;
  }
  return place;
}

}  // namespace

void Archive::fail(const std::string& what) const { throw InputError(fmt::format("{}: damaged archive: {}", path_, what)); }

Archive Archive::open(const std::string& path) {
  Archive archive;
  archive.path_ = path;
  archive.bytes_ = read_file(path);
  archive.read_directory();
  return archive;
}

void Archive::read_directory() {
  const std::span<const char> all(bytes_);
  const std::size_t end = find_end(all);
  if (end > all.size()) fail("it has no directory; was the file cut?");
  Directory directory{value_in<std::uint32_t>(all, end + 16), value_in<std::uint16_t>(all, end + 10)};
  if (end >= locator64_bytes && value_in<std::uint32_t>(all, end - locator64_bytes) == locator64_mark) {
    const auto end64 = value_in<std::uint64_t>(all, end - locator64_bytes + 8);
    if (!has(all, end64, end64_bytes) || value_in<std::uint32_t>(all, end64) != end64_mark)
      fail("its 64-bit end record is not there");
    directory = {value_in<std::uint64_t>(all, end64 + 48), value_in<std::uint64_t>(all, end64 + 32)};
  }
  std::uint64_t at = directory.offset;
  for (std::uint64_t member = 0; member < directory.members; ++member) {
    if (!has(all, at, entry_bytes) || value_in<std::uint32_t>(all, at) != entry_mark)
      fail(fmt::format("entry {} is not there", member));
    const std::size_t name_bytes = value_in<std::uint16_t>(all, at + 28), extra_bytes = value_in<std::uint16_t>(all, at + 30);
    const std::size_t comment_bytes = value_in<std::uint16_t>(all, at + 32);
    if (!has(all, at + entry_bytes, name_bytes + extra_bytes + comment_bytes)) fail(fmt::format("entry {} is cut", member));
    const std::string name(all.data() + at + entry_bytes, name_bytes);
    const Place place = place_of(all.subspan(at, entry_bytes), all.subspan(at + entry_bytes + name_bytes, extra_bytes));
    if (value_in<std::uint16_t>(all, at + 10) != 0 || place.packed != place.size) {
      throw InputError(fmt::format("{}: {} is compressed; write it with numpy.savez instead of savez_compressed", path_, name));
    }
    members_[name] = stored(place.header, place.size, name);
    at += entry_bytes + name_bytes + extra_bytes + comment_bytes;
  }
}

std::span<const char> Archive::stored(std::size_t header, std::size_t bytes, const std::string& name) const {
  const std::span<const char> all(bytes_);
  if (!has(all, header, local_bytes) || value_in<std::uint32_t>(all, header) != local_mark)
    fail(name + " is not where the directory says");
  const std::size_t begin =
      header + local_bytes + value_in<std::uint16_t>(all, header + 26) + value_in<std::uint16_t>(all, header + 28);
  if (!has(all, begin, bytes)) fail(name + " is cut");
  return all.subspan(begin, bytes);
}

}  // namespace heddle
