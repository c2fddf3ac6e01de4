// In the place of CuTe's header: the warpgroup's products with A from registers or swizzled shared memory and B from the latter, by
// the fragment layouts of the PTX manual.
#pragma once

#include <map>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "emulator/device.hpp"
#include "formats/codes.hpp"

namespace heddle::emulator {

/// One product as a thread issued it.
struct Product {
  const std::uint32_t* a[4];  ///< null: from shared memory, by `first`
  std::uint64_t first;
  std::uint64_t second;
  std::vector<float*> sums;
  bool fresh;
  bool e4m3;
};
inline std::vector<Product>& products_under_way() {
  static std::map<int, std::vector<Product>> all;
  return all[thread()];
}

/// Value k of a row of 128 bytes, of the panel that a descriptor names; both sides' panels begin at multiples of 1024.
inline float panel_value(std::uint64_t descriptor, int row, int k, bool e4m3) {
  if (descriptor >> 62 != 1 || (descriptor >> 32 & 0x3FFF) != 64) throw std::logic_error("not a descriptor of swizzled panels");
  const auto begin = static_cast<std::uint32_t>(descriptor & 0x3FFF) << 4;
  const std::uint32_t linear = begin + static_cast<std::uint32_t>(row * 128 + (e4m3 ? k : 2 * k));
  const std::byte* at = shared_memory() + (linear ^ (linear >> 3 & 0x70));
  if (e4m3) return from_e4m3(static_cast<std::uint8_t>(*at));
  bf16 value;
  std::memcpy(&value, at, sizeof value);
  return to_float(value);
}

/// A value of a row (g, half) as the four threads of the row hold it.
inline float register_value(const std::uint64_t* group, int row_thread, int half, int k, bool e4m3) {
  const int quad = e4m3 ? k % 16 / 4 : k % 8 / 2;
  const int which = half + 2 * (e4m3 ? k / 16 : k / 8);
  const auto* product = reinterpret_cast<const Product*>(group[row_thread + quad]);
  const std::uint32_t word = *product->a[which];
  return e4m3 ? from_e4m3(static_cast<std::uint8_t>(word >> (8 * (k % 4))))
              : to_float(bf16{static_cast<std::uint16_t>(word >> (16 * (k % 2)))});
}

/// All threads of the warpgroup multiply what they issued in the same place.
inline void multiply(const Product& mine) {
  const std::uint64_t* group = exchange(reinterpret_cast<std::uint64_t>(&mine), 128);
  const int depth = mine.e4m3 ? 32 : 16;
  const int row_thread = thread() % 128 / 4 * 4;
  std::vector<float> results(mine.sums.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const int half = static_cast<int>(i) % 4 / 2;
    const int column = static_cast<int>(i) / 4 * 8 + thread() % 4 * 2 + static_cast<int>(i) % 2;
    double sum = mine.fresh ? 0.0 : static_cast<double>(*mine.sums[i]);
    for (int k = 0; k < depth; ++k) {
      const float first = mine.a[0] != nullptr
                              ? register_value(group, row_thread, half, k, mine.e4m3)
                              : panel_value(mine.first, row_thread / 32 * 16 + row_thread % 32 / 4 + 8 * half, k, mine.e4m3);
      sum += static_cast<double>(first) * static_cast<double>(panel_value(mine.second, column, k, mine.e4m3));
    }
    results[i] = static_cast<float>(sum);
  }
  exchange(0, 128);  // nobody's registers change before all have read them
  for (std::size_t i = 0; i < results.size(); ++i) *mine.sums[i] = results[i];
}

template <bool e4m3, int columns>
struct Multiply {
  template <class... Arguments>
  static void fma(const std::uint32_t& a0, const std::uint32_t& a1, const std::uint32_t& a2, const std::uint32_t& a3,
                  std::uint64_t descriptor, Arguments&&... arguments) {
    issue({{&a0, &a1, &a2, &a3}, 0, descriptor, {}, false, e4m3}, std::tie(arguments...));
  }

 protected:
  template <class All>
  static void issue(Product product, const All& all) {
    product.fresh = static_cast<int>(std::get<columns / 2>(all)) == 0;
    std::apply([&](auto&... each) { (add(product, each), ...); }, all);
    if (products() == Products::at_issue) {
      multiply(product);
    } else {
      products_under_way().push_back(product);
    }
  }

 private:
  static void add(Product& product, float& sum) { product.sums.push_back(&sum); }
  template <class Scale>
  static void add(Product&, const Scale&) {}
};

template <bool e4m3, int columns>
struct MultiplyShared : Multiply<e4m3, columns> {
  template <class... Arguments>
  static void fma(std::uint64_t first, std::uint64_t second, Arguments&&... arguments) {
    MultiplyShared::issue({{}, first, second, {}, false, e4m3}, std::tie(arguments...));
  }
};

}  // namespace heddle::emulator

namespace cute {

namespace SM90::GMMA {
enum class Major { K, MN };
enum class ScaleOut { Zero = 0, One = 1 };
#define HEDDLE_EMULATED(n)                                                           \
  template <int = 1, int = 1>                                                        \
  struct MMA_64x##n##x32_F32E4M3E4M3_RS_TN : heddle::emulator::Multiply<true, n> {}; \
  template <Major, Major>                                                            \
  struct MMA_64x##n##x16_F32BF16BF16_RS : heddle::emulator::Multiply<false, n> {};
HEDDLE_EMULATED(8)
HEDDLE_EMULATED(16)
HEDDLE_EMULATED(32)
HEDDLE_EMULATED(64)
HEDDLE_EMULATED(96)
HEDDLE_EMULATED(128)
#undef HEDDLE_EMULATED
template <int = 1, int = 1>
struct MMA_64x128x32_F32E4M3E4M3_SS_TN : heddle::emulator::MultiplyShared<true, 128> {};
}  // namespace SM90::GMMA

inline std::uint32_t cast_smem_ptr_to_uint(const void* at) {
  return static_cast<std::uint32_t>(static_cast<const std::byte*>(at) - heddle::emulator::shared_memory());
}

inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <class T>
void warpgroup_fence_operand(T&) {}

/// All products of this thread are done (the engine waits for nothing less).
template <int left>
void warpgroup_wait() {
  static_assert(left == 0);
  auto& under_way = heddle::emulator::products_under_way();
  for (const auto& product : under_way) heddle::emulator::multiply(product);
  under_way.clear();
}

}  // namespace cute
