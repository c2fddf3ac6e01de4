#include "checkpoint/dtype.hpp"

#include <array>

namespace heddle::checkpoint {

namespace {
struct Entry {
  Dtype dtype;
  std::string_view name;
  int bits;
};

// In the order of the enumeration, so that it can be indexed by it.
constexpr std::array entries{
    Entry{Dtype::boolean, "BOOL", 8},
    Entry{Dtype::f4, "F4", 4},
    Entry{Dtype::f6_e2m3, "F6_E2M3", 6},
    Entry{Dtype::f6_e3m2, "F6_E3M2", 6},
    Entry{Dtype::u8, "U8", 8},
    Entry{Dtype::i8, "I8", 8},
    Entry{Dtype::f8_e5m2, "F8_E5M2", 8},
    Entry{Dtype::f8_e4m3, "F8_E4M3", 8},
    Entry{Dtype::f8_e8m0, "F8_E8M0", 8},
    Entry{Dtype::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    Entry{Dtype::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    Entry{Dtype::i16, "I16", 16},
    Entry{Dtype::u16, "U16", 16},
    Entry{Dtype::f16, "F16", 16},
    Entry{Dtype::bf16, "BF16", 16},
    Entry{Dtype::i32, "I32", 32},
    Entry{Dtype::u32, "U32", 32},
    Entry{Dtype::f32, "F32", 32},
    Entry{Dtype::i64, "I64", 64},
    Entry{Dtype::u64, "U64", 64},
    Entry{Dtype::f64, "F64", 64},
    Entry{Dtype::c64, "C64", 64},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (static_cast<std::size_t>(entries[i].dtype) != i) return false;
  }
  return true;
}
static_assert(in_order());
}  // namespace

std::string_view name(Dtype dtype) { return entries[static_cast<std::size_t>(dtype)].name; }

int bits_per_value(Dtype dtype) { return entries[static_cast<std::size_t>(dtype)].bits; }

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

std::string known_dtypes() {
  std::string names;
  for (const Entry& entry : entries) {
    if (!names.empty()) names += ' ';
    names += entry.name;
  }
  return names;
}

}  // namespace heddle::checkpoint
