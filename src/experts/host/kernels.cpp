#include "experts/host/kernels.hpp"

#include <array>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(HEDDLE_SANITIZED)
#define HEDDLE_VECTOR_KERNELS
#include <immintrin.h>
#endif

#include "experts/host/tile.hpp"
#include "formats/codes.hpp"

namespace heddle {
namespace {

template <class T>
[[gnu::always_inline]] inline T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

constexpr int prefetch_rows = 8;

int bits_a_value(WeightKind kind) {
  return kind == WeightKind::bf16 ? 16 : (kind == WeightKind::mxfp4 || kind == WeightKind::nvfp4 ? 4 : 8);
}

/// Values of the scale bytes.
struct ScaleTables {
  std::array<float, 256> ue8m0;
  std::array<float, 256> e4m3;

  ScaleTables() {
    for (std::size_t code = 0; code < 256; ++code) {
      ue8m0[code] = from_ue8m0(static_cast<std::uint8_t>(code));
      e4m3[code] = from_e4m3(static_cast<std::uint8_t>(code));
    }
  }
};

const ScaleTables& scale_tables() {
  static const ScaleTables tables;
  return tables;
}

namespace baseline {
constexpr int lanes = 1;
[[maybe_unused]] void widen_e4m3_vector(const std::byte*, float, float*) {}
[[maybe_unused]] void widen_e2m1_vector(const std::byte*, float, float*) {}
#include "experts/host/kernels_body.hpp"
}  // namespace baseline

#ifdef HEDDLE_VECTOR_KERNELS
/// Magnitudes by code, as tables that a register holds: e4m3's subnormals and all of e2m1's.
alignas(32) constexpr float e4m3_small[8] = {0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f};
alignas(32) constexpr float e2m1_magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
constexpr int e4m3_bias_bits = (127 - 7) << 23;
constexpr int f32_nan_bits = 0x7FC00000;

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int lanes = 8;

inline void widen_e4m3_vector(const std::byte* in, float scale, float* out) {
  const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
  const __m256i magnitudes = _mm256_and_si256(codes, _mm256_set1_epi32(0x7F));
  const __m256 small = _mm256_permutevar8x32_ps(_mm256_load_ps(e4m3_small), magnitudes);
  const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(magnitudes, 20), _mm256_set1_epi32(e4m3_bias_bits));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitudes);
  const __m256i is_nan = _mm256_cmpeq_epi32(magnitudes, _mm256_set1_epi32(0x7F));
  const __m256i finite = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), is_small);
  const __m256i value = _mm256_blendv_epi8(finite, _mm256_set1_epi32(f32_nan_bits), is_nan);
  const __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(0x7F), codes), 24);
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(value, sign)), _mm256_set1_ps(scale)));
}

inline void widen_e2m1_vector(const std::byte* in, float scale, float* out) {
  // A byte in each 64 bits; shifted up by 28, its high nibble is the low one of the upper half.
  const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load<int>(in)));
  const __m256i codes = _mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28));
  const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_load_ps(e2m1_magnitudes), codes);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_or_ps(magnitudes, _mm256_castsi256_ps(sign)), _mm256_set1_ps(scale)));
}

#include "experts/host/kernels_body.hpp"
}  // namespace avx2
#pragma GCC pop_options
#endif

#define HEDDLE_KERNELS(set) \
  TileKernels { #set, set::widen_weights, set::widen_e4m3, set::widen_bf16, set::promote, set::round }

struct Versions {
  std::array<TileKernels, 2> list;
  std::size_t count = 0;

  Versions() {
    list[count++] = HEDDLE_KERNELS(baseline);
#ifdef HEDDLE_VECTOR_KERNELS
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      list[count++] = HEDDLE_KERNELS(avx2);
    }
#endif
  }
};

const Versions& versions() {
  static const Versions found;
  return found;
}

}  // namespace

std::span<const TileKernels> all_tile_kernels() { return {versions().list.data(), versions().count}; }

const TileKernels& tile_kernels() {
  static const TileKernels& fastest = all_tile_kernels().back();
  return fastest;
}

}  // namespace heddle
