// A whole file in memory, and little-endian values anywhere in it.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace heddle {

/// Throws InputError with the system's reason.
std::vector<char> read_file(const std::string& path);

/// The caller has checked that the value lies inside.
template <class Value>
Value value_in(std::span<const char> bytes, std::size_t offset) {
  Value value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

}  // namespace heddle
