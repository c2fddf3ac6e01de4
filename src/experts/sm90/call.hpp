// What a product is given: one source for host and device, passed to the kernel by value.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "experts/activation/clamp.hpp"
#include "experts/sm90/tasks.hpp"
#include "experts/sm90/weight_order.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"
#include "trace/device.hpp"

namespace heddle::sm90 {

/// Where the rows of a task lie: one after another without gaps (flat), in a region of `block_rows` an expert, or where the
/// expert's rows begin by `begin`. With `rows`, the place found so holds the number of the row.
struct RowMap {
  enum class Kind : std::uint8_t { flat, blocks, listed };

  Kind kind = Kind::flat;
  int block_rows = 0;
  const int* begin = nullptr;
  const int* rows = nullptr;

  /// Of row `row` of a task.
  HEDDLE_HOST_DEVICE std::size_t place(const Task& task, int row) const {
    std::size_t first = static_cast<std::size_t>(task.flat);
    if (kind == Kind::blocks) {
      first = static_cast<std::size_t>(task.expert) * static_cast<std::size_t>(block_rows) + static_cast<std::size_t>(task.first);
    } else if (kind == Kind::listed) {
      first = static_cast<std::size_t>(begin[task.expert]) + static_cast<std::size_t>(task.first);
    }
    const std::size_t index = first + static_cast<std::size_t>(row);
    return rows != nullptr ? static_cast<std::size_t>(rows[index]) : index;
  }
};

/// How tokens are scaled: not at all, by 128 values of K, or by 32.
enum class TokenScales : std::uint8_t { none, by_128, by_32 };

/// Rows as the unit that copies tensors knows them: opaque, and the same for all calls with these rows.
struct alignas(64) RowTensor {
  std::uint64_t words[16] = {};
};

/// The token side: rows of e4m3 or bf16, as the weights' kind wants them. Rows begin at multiples of 16 bytes, their
/// scales at multiples of 4 and can be read to a multiple of 4.
struct TokenRows {
  const std::byte* values = nullptr;
  std::size_t value_stride = 0;
  const std::byte* scales = nullptr;
  std::size_t scale_stride = 0;
  TokenScales scaling = TokenScales::none;
  ScaleFormat format = ScaleFormat::ue8m0;
  RowMap map;
  /// Rows from `values` on that may be read, whether they are anybody's or not; 0: not known, then rows are gathered one by one.
  int readable = 0;
  RowTensor tensor = {};  ///< made at launch, if in_boxes()

  /// Whether the rows of a task lie one behind another and may be copied as boxes.
  HEDDLE_HOST_DEVICE bool in_boxes() const { return readable > 0 && map.rows == nullptr; }
};

/// Sums rounded to bf16 and stored by token.
struct ResultStore {
  bf16* values = nullptr;
  std::size_t stride = 0;  ///< values from a row to the next
  int second = 0;          ///< paired weights: where the up half begins in a row
  RowMap map;
};

/// Gate and up activated and quantised in the epilogue, a row each at its flat place: rows of the operand that the weights' kind
/// wants. With bf16 operands and fp8 a value is an e4m3 code widened to bf16.
struct ActivatedStore {
  Activation format = Activation::fp8;
  Quantisation quantisation;
  DeviceClamp clamp;
  const float* weights = nullptr;  ///< routing weights, at the places of `map`; null: 1
  RowMap map;
  std::byte* values = nullptr;
  std::size_t value_stride = 0;  ///< bytes
  std::byte* scales = nullptr;
  std::size_t scale_stride = 0;  ///< bytes
};

/// A count that a kernel could not take as it was, in a word that the host reads.
struct RefusedCount {
  int expert = 0;
  int count = 0;

  HEDDLE_HOST_DEVICE static unsigned long long pack(int expert, int count) {
    return static_cast<unsigned long long>(expert + 1) << 32 | static_cast<unsigned>(count);
  }
  static RefusedCount unpack(unsigned long long word) { return {static_cast<int>(word >> 32) - 1, static_cast<int>(word)}; }
};

/// What is made of counts that kernels find in memory: negative ones are 0, larger ones than `an_expert` that; and of all rows in
/// the order of experts the first `all` are there, others are neither read nor written.
struct RowLimits {
  int an_expert = INT_MAX;
  int all = INT_MAX;
  unsigned long long* refused = nullptr;  ///< a RefusedCount in memory that the host can read, or null
  int first_expert = 0;                   ///< how a RefusedCount calls the first expert of the call
};

/// When a product's kernel may begin. Ahead of the end of the kernel before it on the stream it finds its place on SMs as they
/// become free, and has done by then what needs nothing of that kernel.
enum class ProductStart : std::uint8_t {
  in_order,
  ahead,               ///< waits for that end, then begins
  ahead_with_weights,  ///< rows and their scales wait; counts and maps are of kernels before that one, so weights may stream
};

/// One grouped product: for every expert its rows times its weights.
struct ProductCall {
  OrderedMatrix weights;
  TokenRows tokens;
  const int* counts = nullptr;  ///< rows by expert, device memory; null: limits.an_expert each
  int experts = 0;
  RowLimits limits;
  ResultStore results;
  ActivatedStore activated;  ///< instead of results where the epilogue activates
  ProductStart start = ProductStart::in_order;
#if defined(HEDDLE_TRACE)
  trace::DeviceTrace recorded{};
#endif
};

}  // namespace heddle::sm90
