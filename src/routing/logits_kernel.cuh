// Logits with the host's sums (router_logits): 16 lanes, each of every 16th element in ascending order, then added in halves. Eight
// threads share a dot product, two neighbouring lanes each. In a header, so that the emulator can run it
// (tests/emulator_router_test.cpp).
#pragma once

#include <cstddef>
#include <cute/arch/copy_sm80.hpp>

#include "routing/router_kernel.hpp"
#include "signal/ptx.cuh"

namespace heddle::router_kernel {

inline constexpr int sum_lanes = 16;
inline constexpr int threads_a_dot = 8;
inline constexpr unsigned all_lanes = 0xFFFFFFFFu;

/// What a CTA computes at once: cells of eight threads, each with some dot products.
template <int experts_a_cell_, int tokens_a_cell_, int expert_cells_, int token_cells_, int chunk_, int stages_>
struct Tile {
  static constexpr int experts_a_cell = experts_a_cell_, tokens_a_cell = tokens_a_cell_;
  static constexpr int token_cells = token_cells_;
  static constexpr int experts = experts_a_cell * expert_cells_, tokens = tokens_a_cell * token_cells;
  static constexpr int threads = expert_cells_ * token_cells * threads_a_dot;
  static constexpr int chunk = chunk_;  ///< elements of a row that are copied together
  static constexpr int stages = stages_;
};
// From few tokens, whose CTAs keep many copies under way, to many, whose registers use what they read several times.
using TileOf4 = Tile<1, 1, 2, 4, 512, 8>;
using TileOf16 = Tile<1, 1, 4, 4, 256, 8>;
using TileOf64 = Tile<2, 2, 4, 4, 256, 6>;
using TileOfMany = Tile<4, 4, 4, 4, 256, 4>;

/// The stages of a CTA's shared memory: rows of weights, then rows of tokens, padded so that four cells read other banks.
template <class Weight, class Tile>
struct Stages {
  static constexpr int padding = 32;  // bytes
  static constexpr int weight_row = Tile::chunk * static_cast<int>(sizeof(Weight)) + padding;
  static constexpr int token_row = Tile::chunk * static_cast<int>(sizeof(bf16)) + padding;
  static constexpr int tokens_at = Tile::experts * weight_row;
  static constexpr int stage = tokens_at + Tile::tokens * token_row;
  static constexpr int bytes = Tile::stages * stage;
};

struct Pair {
  float low;
  float high;
};
__device__ inline Pair load_pair(const std::byte* at, float) {
  const float2 pair = *reinterpret_cast<const float2*>(at);
  return {pair.x, pair.y};
}
__device__ inline Pair load_pair(const std::byte* at, bf16) {
  const auto pair = *reinterpret_cast<const std::uint32_t*>(at);
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xFFFF0000u)};
}
__device__ inline void add_product(float& sum, float weight, float token, float) { sum += weight * token; }
/// The product of two bf16 values is exact in f32 and so loses nothing in one rounding instead of two.
__device__ inline void add_product(float& sum, float weight, float token, bf16) { sum = __fmaf_rn(weight, token, sum); }

/// Copies elements [at, at + chunk) of `rows` rows from row `first` on; those that are not there become zeros.
template <int rows, int row_bytes, class Tile, class Value>
__device__ void copy_rows(std::byte* to, const Value* from, int first, int count, int at, int length) {
  constexpr int values = 16 / static_cast<int>(sizeof(Value));
  constexpr int pieces = Tile::chunk / values;
  for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += Tile::threads) {
    const int row = i / pieces, column = i % pieces * values;
    const bool real = first + row < count && at + column < length;
    const Value* source =
        real ? from + static_cast<std::size_t>(first + row) * static_cast<std::size_t>(length) + at + column : from;
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<const cute::uint128_t*>(source),
        *reinterpret_cast<cute::uint128_t*>(to + row * row_bytes + column * static_cast<int>(sizeof(Value))), real);
  }
}

/// The dot products of one tile, from expert and token on.
template <class Weight, class Tile>
struct LogitsOfTile {
  using Place = Stages<Weight, Tile>;
  const RouterCall& call;
  const Weight* weights;
  std::byte* shared;
  int expert, token, tokens;
  Pair sums[Tile::experts_a_cell][Tile::tokens_a_cell] = {};

  __device__ int lane() const { return static_cast<int>(threadIdx.x) % threads_a_dot; }
  __device__ int expert_of_cell() const {
    return static_cast<int>(threadIdx.x) / threads_a_dot / Tile::token_cells * Tile::experts_a_cell;
  }
  /// Tokens of a cell are as far apart as there are cells, so that neighbouring cells read neighbouring rows.
  __device__ int token_of_cell() const { return static_cast<int>(threadIdx.x) / threads_a_dot % Tile::token_cells; }

  __device__ void copy(int chunk) const {
    const int at = chunk * Tile::chunk;
    if (at < call.hidden_size) {
      std::byte* to = shared + chunk % Tile::stages * Place::stage;
      copy_rows<Tile::experts, Place::weight_row, Tile>(to, weights, expert, call.experts, at, call.hidden_size);
      copy_rows<Tile::tokens, Place::token_row, Tile>(to + Place::tokens_at, call.hidden, token, tokens, at, call.hidden_size);
    }
    cute::cp_async_fence();
  }

  __device__ void add(int chunk) {
    const std::byte* of_weights = shared + chunk % Tile::stages * Place::stage + expert_of_cell() * Place::weight_row +
                                  lane() * 2 * static_cast<int>(sizeof(Weight));
    const std::byte* of_tokens = shared + chunk % Tile::stages * Place::stage + Place::tokens_at +
                                 token_of_cell() * Place::token_row + lane() * 2 * static_cast<int>(sizeof(bf16));
    const int steps = min(Tile::chunk, call.hidden_size - chunk * Tile::chunk) / sum_lanes;
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
      Pair w[Tile::experts_a_cell], t[Tile::tokens_a_cell];
#pragma unroll
      for (int e = 0; e < Tile::experts_a_cell; ++e)
        w[e] = load_pair(of_weights + e * Place::weight_row + step * sum_lanes * static_cast<int>(sizeof(Weight)), Weight{});
#pragma unroll
      for (int i = 0; i < Tile::tokens_a_cell; ++i)
        t[i] = load_pair(of_tokens + i * Tile::token_cells * Place::token_row + step * sum_lanes * static_cast<int>(sizeof(bf16)),
                         bf16{});
#pragma unroll
      for (int e = 0; e < Tile::experts_a_cell; ++e) {
#pragma unroll
        for (int i = 0; i < Tile::tokens_a_cell; ++i) {
          add_product(sums[e][i].low, w[e].low, t[i].low, Weight{});
          add_product(sums[e][i].high, w[e].high, t[i].high, Weight{});
        }
      }
    }
  }

  /// Lanes j and j + 8, then + 4, + 2, + 1: a thread has lanes 2j and 2j + 1.
  __device__ void store() const {
#pragma unroll
    for (int e = 0; e < Tile::experts_a_cell; ++e) {
#pragma unroll
      for (int i = 0; i < Tile::tokens_a_cell; ++i) {
        Pair sum = sums[e][i];
#pragma unroll
        for (int distance = threads_a_dot / 2; distance > 0; distance /= 2) {
          sum.low += __shfl_xor_sync(all_lanes, sum.low, distance);
          sum.high += __shfl_xor_sync(all_lanes, sum.high, distance);
        }
        const int to_expert = expert + expert_of_cell() + e, to_token = token + token_of_cell() + i * Tile::token_cells;
        if (lane() == 0 && to_expert < call.experts && to_token < tokens)
          call.logits[static_cast<std::size_t>(to_token) * static_cast<std::size_t>(call.experts) + to_expert] = sum.low + sum.high;
      }
    }
  }

  __device__ void run() {
    const int chunks = (call.hidden_size + Tile::chunk - 1) / Tile::chunk;
#pragma unroll
    for (int chunk = 0; chunk < Tile::stages - 1; ++chunk) copy(chunk);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      cute::cp_async_wait<Tile::stages - 2>();
      __syncthreads();  // the chunk is there for all, and all are done with the one before, whose stage is next
      copy(chunk + Tile::stages - 1);
      add(chunk);
    }
    __syncthreads();
    store();
  }
};

/// `shared`: Stages<Weight, Tile>::bytes.
template <class Weight, class Tile>
__device__ void compute_logits(const RouterCall& call, const Weight* weights, std::byte* shared) {
  const int tokens = max(0, min(*call.tokens, call.most_tokens));
  const int expert_tiles = (call.experts + Tile::experts - 1) / Tile::experts;
  const int tiles = (tokens + Tile::tokens - 1) / Tile::tokens * expert_tiles;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    LogitsOfTile<Weight, Tile>{call,  weights, shared, tile % expert_tiles * Tile::experts, tile / expert_tiles * Tile::tokens,
                               tokens}
        .run();
  }
}

}  // namespace heddle::router_kernel
