// Rows on their way into a product: quantised, widened, listed by expert, and summed on the way out. Launches for code that is
// not compiled for a device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "experts/sm90/call.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle::sm90 {

/// What becomes of a row's values.
enum class RowChange : std::uint8_t {
  none,             ///< nothing: weights and counts alone are listed
  quantise,         ///< bf16 to e4m3 and scales
  quantise_widely,  ///< the same codes widened to bf16, and scales
  widen,            ///< e4m3 to bf16; scales are copied
};

/// How many tokens a routed call has: a bound, or what is found in memory if that is less.
struct TokenCount {
  int most = 0;
  const int* here = nullptr;
};

/// Real rows of experts, each to its flat place; or with `ids` tokens, each to its own place, those without an own expert left out.
struct RowsCall {
  const int* counts = nullptr;  ///< as ProductCall's
  int experts = 0;
  RowLimits limits;
  RowMap map;

  const std::int32_t* ids = nullptr;  ///< [tokens, topk]
  TokenCount tokens;
  int topk = 0;

  const std::byte* values = nullptr;  ///< rows at 16-byte multiples, their scales at multiples of 4
  std::size_t value_stride = 0;
  const std::byte* scales = nullptr;
  std::size_t scale_stride = 0;
  int columns = 0;  ///< a multiple of 64
  Quantisation quantisation;

  std::byte* to = nullptr;
  std::size_t to_stride = 0;
  std::byte* to_scales = nullptr;  ///< null: widen leaves scales where they are
  std::size_t to_scale_stride = 0;

  const float* weights = nullptr;  ///< at the places of `map`; null: 1
  float* flat_weights = nullptr;   ///< where weights go in flat order, or null
  int* flat_counts = nullptr;      ///< [experts], where counts within the limits go, or null
};

/// Queues it with at most `ctas` CTAs; most_rows: rows (tokens) there can be. Allocates nothing; may be captured.
void launch_rows(const RowsCall& call, RowChange change, int most_rows, int ctas, cudaStream_t stream);

/// The pairs of a routed call listed by expert, in (token, choice) order within one.
struct ListCall {
  const std::int32_t* ids = nullptr;  ///< [tokens, topk]; others than 0 .. experts - 1 are not listed
  const float* weights = nullptr;     ///< [tokens, topk] or null: 1
  TokenCount tokens;
  int topk = 0;
  int experts = 0;
  int most_rows = 0;  ///< of the lists; pairs behind them are counted alone

  int* counts = nullptr;       ///< [experts]
  int* token_of = nullptr;     ///< [most_rows], as the next three
  int* pair_of = nullptr;      ///< token * topk + choice
  float* weight_of = nullptr;  ///< or null
  int* place_of = nullptr;     ///< [tokens, topk]: where a listed pair is, perhaps behind the lists
};

void launch_list(const ListCall& call, cudaStream_t stream);

/// Each token's own pairs in choice order from +0, rounded once; zeros where there are none.
struct SumCall {
  const std::int32_t* ids = nullptr;
  const float* weights = nullptr;  ///< weight_at = combine; null: weights were applied before
  TokenCount tokens;
  int topk = 0;
  int experts = 0;
  int most_rows = 0;
  const int* place_of = nullptr;  ///< of ListCall
  const bf16* results = nullptr;  ///< [most_rows, columns]
  int columns = 0;
  bf16* out = nullptr;
  std::size_t stride = 0;  ///< values
};

void launch_sum(const SumCall& call, int ctas, cudaStream_t stream);

/// Loads these kernels on the current device.
void prepare_rows();

}  // namespace heddle::sm90
