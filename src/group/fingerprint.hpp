// Hashes of what ranks compare and people see: short, and the same on every machine.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

namespace heddle {

/// FNV-1a of 64 bits (http://www.isthe.com/chongo/tech/comp/fnv/), a step a value; of characters the published one.
template <class Value>
std::uint64_t fingerprint(std::span<const Value> values) {
  std::uint64_t hash = 14695981039346656037u;
  for (const Value value : values) hash = (hash ^ static_cast<std::make_unsigned_t<Value>>(value)) * 1099511628211u;
  return hash;
}

}  // namespace heddle
