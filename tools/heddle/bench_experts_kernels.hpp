// Kernels of `heddle bench experts`: weights and tokens drawn on the GPU, a stream of weights that multiplies nothing, and what a
// product is checked against. Launches throw Error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "experts/sm90/call.hpp"
#include "heddle/experts.hpp"

namespace heddle::tool {

/// One matrix of every expert as checkpoints store it (heddle/experts.hpp), in device memory.
struct StoredLayer {
  WeightKind kind = WeightKind::bf16;
  int experts = 0;
  int rows = 0;
  int cols = 0;
  std::byte* values = nullptr;
  std::byte* scales = nullptr;
  std::size_t value_pitch = 0;  ///< bytes of a row
  std::size_t scale_pitch = 0;  ///< bytes of a row of scales; fp8_block (f32): of 128 rows
  float tensor_scale = 1.0f;    ///< nvfp4

  HEDDLE_HOST_DEVICE std::size_t values_an_expert() const { return static_cast<std::size_t>(rows) * value_pitch; }
  HEDDLE_HOST_DEVICE std::size_t scales_an_expert() const {
    return static_cast<std::size_t>(kind == WeightKind::fp8_block ? (rows + 127) / 128 : rows) * scale_pitch;
  }
};

/// Weights of about 1/64, normally distributed, in valid codes; scales differ by up to two binades.
void fill_weights(const StoredLayer& layer, std::uint64_t seed, cudaStream_t stream);

/// Token rows: e4m3 with a ue8m0 scale for 128 values and the same scales as f32 (for others' kernels), or bf16 without.
struct TokenBuffer {
  bool fp8 = false;
  int rows = 0;
  int cols = 0;  ///< a multiple of 128
  std::byte* values = nullptr;
  std::uint8_t* scales = nullptr;
  std::size_t scale_stride = 0;  ///< bytes
  float* wide_scales = nullptr;  ///< [rows, cols / 128]
};
/// Values of about 1.
void fill_tokens(const TokenBuffer& tokens, std::uint64_t seed, cudaStream_t stream);

/// Bytes of one bulk copy of the stream, as large as the engine's stages.
inline constexpr std::size_t stream_piece = 16 * 1024;

/// Brings `touched` experts' ordered weights, `first` and those that follow it, into shared memory by bulk copies.
void launch_stream(const sm90::OrderedMatrix& weights, int experts, int first, int touched, int ctas, cudaStream_t stream);
/// A kernel that returns at once, as large as a product's: 640 threads and 200 KB of shared memory a CTA.
void launch_empty_product(int ctas, cudaStream_t stream);
/// Lets both be launched. To be called once.
void prepare_streams();

/// A row that is checked: its expert, and its number among all rows.
struct Sample {
  int expert = 0;
  int flat = 0;
};
/// reference [count, layer.rows]: f32 sums of products of the widened values.
void launch_reference(const StoredLayer& layer, const TokenBuffer& tokens, const Sample* samples, int count, float* reference,
                      cudaStream_t stream);

/// sums[0] += the squares of what the results are off by, sums[1] += the reference's squares.
void compare_results(const sm90::ResultStore& results, const Sample* samples, int count, int columns, const float* reference,
                     double* sums, cudaStream_t stream);
/// The same for activated rows, whose reference is made of gate and up, `columns` each.
void compare_activated(const sm90::ActivatedStore& activated, const Sample* samples, int count, int columns, const float* reference,
                       double* sums, cudaStream_t stream);
/// Adds to *bad how many e4m3 codes are NaN.
void count_nan_codes(const std::byte* codes, std::size_t count, unsigned long long* bad, cudaStream_t stream);

}  // namespace heddle::tool
