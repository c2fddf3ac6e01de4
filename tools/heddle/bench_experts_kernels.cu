#include <cmath>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "bench_experts_kernels.hpp"
#include "formats/codes.hpp"
#include "group/cuda_driver.hpp"

namespace heddle::tool {

namespace {

using cuda::check;

constexpr unsigned fill_ctas = 132 * 8;
constexpr unsigned fill_threads = 256;

/// The output function of splitmix64: a hash of a number.
__device__ std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// About normally distributed: the sum of eight random bytes.
__device__ float draw(std::uint64_t seed, std::size_t index) {
  const std::uint64_t bits = mix(seed + index);
  int sum = 0;
  for (int i = 0; i < 8; ++i) sum += static_cast<int>(bits >> (8 * i) & 0xFFu);
  return static_cast<float>(sum - 1020) * (1.0f / 209.0f);
}

/// Calls work(index) for every index below `count`, over the whole grid.
template <class Work>
__device__ void for_all(std::size_t count, const Work& work) {
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count; i += threads) work(i);
}

/// Four bytes a thread and time.
__global__ void fill_values(WeightKind kind, std::uint32_t* words, std::size_t count, std::uint64_t seed) {
  for_all(count, [&](std::size_t i) {
    std::uint32_t word = 0;
    if (kind == WeightKind::bf16) {
      for (std::size_t v = 0; v < 2; ++v)
        word |= static_cast<std::uint32_t>(to_bf16(draw(seed, 2 * i + v) * 0x1p-6f).bits) << (16 * v);
    } else if (kind == WeightKind::fp8_block || kind == WeightKind::mxfp8) {
      for (std::size_t v = 0; v < 4; ++v) word |= static_cast<std::uint32_t>(to_e4m3(draw(seed, 4 * i + v) * 64.0f)) << (8 * v);
    } else {
      for (std::size_t v = 0; v < 8; ++v) word |= static_cast<std::uint32_t>(to_e2m1(draw(seed, 8 * i + v) * 2.0f)) << (4 * v);
    }
    words[i] = word;
  });
}

__global__ void fill_scales(WeightKind kind, std::byte* scales, std::size_t count, std::uint64_t seed) {
  for_all(count, [&](std::size_t i) {
    const auto random = static_cast<std::uint32_t>(mix(seed + i) >> 40);
    if (kind == WeightKind::fp8_block) {
      reinterpret_cast<float*>(scales)[i] = (1.0f + static_cast<float>(random) * 0x1p-24f) * 0x1p-12f;
    } else if (kind == WeightKind::nvfp4) {
      scales[i] = static_cast<std::byte>(0x38u + random % 8u);  // e4m3, from 1 to below 2; the tensor scale does the rest
    } else {
      const std::uint32_t usual = kind == WeightKind::mxfp4 ? 127u - 7u : 127u - 12u;
      scales[i] = static_cast<std::byte>(usual - random % 3u);
    }
  });
}

__global__ void fill_token_values(bool fp8, std::uint32_t* words, std::size_t count, std::uint64_t seed) {
  for_all(count, [&](std::size_t i) {
    std::uint32_t word = 0;
    if (fp8) {
      for (std::size_t v = 0; v < 4; ++v) word |= static_cast<std::uint32_t>(to_e4m3(draw(seed, 4 * i + v) * 64.0f)) << (8 * v);
    } else {
      for (std::size_t v = 0; v < 2; ++v) word |= static_cast<std::uint32_t>(to_bf16(draw(seed, 2 * i + v)).bits) << (16 * v);
    }
    words[i] = word;
  });
}

__global__ void fill_token_scales(TokenBuffer tokens, std::uint64_t seed) {
  const auto groups = static_cast<std::size_t>(tokens.cols / 128);
  for_all(static_cast<std::size_t>(tokens.rows) * groups, [&](std::size_t i) {
    const auto scale = static_cast<std::uint8_t>(127u - 6u + mix(seed + i) % 2u);
    tokens.scales[i / groups * tokens.scale_stride + i % groups] = scale;
    tokens.wide_scales[i] = from_ue8m0(scale);
  });
}

constexpr int ring_pieces = 12;
constexpr int stream_shared_bytes = ring_pieces * static_cast<int>(stream_piece) + 128;

struct StreamRange {
  const std::byte* base;
  std::size_t stride;  ///< bytes of an expert
  int experts, first;
  long long pieces_an_expert, pieces;
};

/// Piece i of the range goes to CTA i % gridDim.x; nobody looks at what arrives.
__global__ void __launch_bounds__(32, 1) stream_kernel(StreamRange range) {
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ std::uint64_t full[ring_pieces];
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  if (threadIdx.x != 0) return;
  for (std::uint64_t& barrier : full) Barrier::init(&barrier, 1);
  cutlass::arch::fence_barrier_init();
  long long asked = 0;
  for (long long piece = blockIdx.x; piece < range.pieces; piece += gridDim.x, ++asked) {
    const auto slot = static_cast<int>(asked % ring_pieces);
    if (asked >= ring_pieces) Barrier::wait(&full[slot], static_cast<std::uint32_t>(asked / ring_pieces - 1) & 1u);
    const auto expert = static_cast<std::size_t>((range.first + piece / range.pieces_an_expert) % range.experts);
    const std::size_t begin = static_cast<std::size_t>(piece % range.pieces_an_expert) * stream_piece;
    const std::size_t left = range.stride - begin;
    const auto bytes = static_cast<std::int32_t>(left < stream_piece ? left : stream_piece);
    Barrier::arrive_and_expect_tx(&full[slot], static_cast<std::uint32_t>(bytes));
    cute::SM90_BULK_COPY_G2S::copy(range.base + expert * range.stride + begin, &full[slot],
                                   ring + static_cast<std::size_t>(slot) * stream_piece, bytes);
  }
  for (long long last = asked > ring_pieces ? asked - ring_pieces : 0; last < asked; ++last)
    Barrier::wait(&full[last % ring_pieces], static_cast<std::uint32_t>(last / ring_pieces) & 1u);
}

__global__ void __launch_bounds__(640, 1) empty_product() {}

__device__ float weight_at(const StoredLayer& layer, int expert, int row, int col) {
  const auto e = static_cast<std::size_t>(expert);
  const std::byte* values = layer.values + e * layer.values_an_expert() + static_cast<std::size_t>(row) * layer.value_pitch;
  const std::size_t scale_row = static_cast<std::size_t>(layer.kind == WeightKind::fp8_block ? row / 128 : row);
  const std::byte* scales = layer.scales + e * layer.scales_an_expert() + scale_row * layer.scale_pitch;
  const auto byte = [](const std::byte* from, int index) { return static_cast<std::uint8_t>(from[index]); };
  const auto nibble = [&] { return static_cast<std::uint8_t>(byte(values, col / 2) >> (4 * (col % 2)) & 15); };
  switch (layer.kind) {
    case WeightKind::fp8_block:
      return from_e4m3(byte(values, col)) * reinterpret_cast<const float*>(scales)[col / 128];
    case WeightKind::mxfp4:
      return from_e2m1(nibble()) * from_ue8m0(byte(scales, col / 32));
    case WeightKind::nvfp4:
      return from_e2m1(nibble()) * from_e4m3(byte(scales, col / 16)) * layer.tensor_scale;
    case WeightKind::mxfp8:
      return from_e4m3(byte(values, col)) * from_ue8m0(byte(scales, col / 32));
    case WeightKind::bf16:
      break;
  }
  return to_float(reinterpret_cast<const bf16*>(values)[col]);
}

__device__ float token_at(const TokenBuffer& tokens, int row, int col) {
  const auto r = static_cast<std::size_t>(row);
  const std::size_t place = r * static_cast<std::size_t>(tokens.cols) + static_cast<std::size_t>(col);
  if (!tokens.fp8) return to_float(reinterpret_cast<const bf16*>(tokens.values)[place]);
  const float scale = from_ue8m0(tokens.scales[r * tokens.scale_stride + static_cast<std::size_t>(col / 128)]);
  return from_e4m3(static_cast<std::uint8_t>(tokens.values[place])) * scale;
}

/// A warp a value: sample blockIdx.y, weight row 8 * blockIdx.x + warp.
__global__ void reference_kernel(StoredLayer layer, TokenBuffer tokens, const Sample* samples, float* reference) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32);
  if (row >= layer.rows) return;
  const Sample sample = samples[blockIdx.y];
  float sum = 0.0f;
  for (int col = lane; col < layer.cols; col += 32) {
    sum = __fmaf_rn(weight_at(layer, sample.expert, row, col), token_at(tokens, sample.flat, col), sum);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (lane == 0)
    reference[static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(layer.rows) + static_cast<std::size_t>(row)] = sum;
}

/// Adds a difference and a reference, squared, over the CTA's warps.
__device__ void add_squares(float got, float wanted, double* sums) {
  double off = (static_cast<double>(got) - static_cast<double>(wanted)) * (static_cast<double>(got) - static_cast<double>(wanted));
  double whole = static_cast<double>(wanted) * static_cast<double>(wanted);
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    off += __shfl_xor_sync(0xFFFFFFFFu, off, lanes);
    whole += __shfl_xor_sync(0xFFFFFFFFu, whole, lanes);
  }
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(sums, off);
  atomicAdd(sums + 1, whole);
}

/// Sample blockIdx.y, column 256 * blockIdx.x + thread.
__global__ void compare_kernel(sm90::ResultStore results, const Sample* samples, int columns, const float* reference,
                               double* sums) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const bool inside = column < columns;
  const auto c = static_cast<std::size_t>(inside ? column : 0);
  const auto flat = static_cast<std::size_t>(samples[blockIdx.y].flat);
  const float got = to_float(results.values[flat * results.stride + c]);
  const float wanted = reference[static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(columns) + c];
  add_squares(inside ? got : 0.0f, inside ? wanted : 0.0f, sums);
}

__global__ void compare_activated_kernel(sm90::ActivatedStore out, const Sample* samples, int columns, const float* reference,
                                         double* sums) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const bool inside = column < columns;
  const auto c = static_cast<std::size_t>(inside ? column : 0);
  const auto flat = static_cast<std::size_t>(samples[blockIdx.y].flat);
  const float* both = reference + static_cast<std::size_t>(blockIdx.y) * 2 * static_cast<std::size_t>(columns);
  const float weight = out.weights == nullptr ? 1.0f : out.weights[flat];
  const float limit = out.clamp.kind == ClampKind::none ? INFINITY : out.clamp.limit;
  const float gate = fminf(to_float(to_bf16(both[c])), limit);
  const float up = fmaxf(fminf(to_float(to_bf16(both[static_cast<std::size_t>(columns) + c])), limit), -limit);
  const float wanted = gate / (1.0f + expf(-gate)) * up * weight;
  const std::byte* row = out.values + flat * out.value_stride;
  float got = 0.0f;
  if (out.format == Activation::fp8) {
    const std::byte scale = out.scales[flat * out.scale_stride + c / static_cast<std::size_t>(out.quantisation.group)];
    got = from_e4m3(static_cast<std::uint8_t>(row[c])) * from_ue8m0(static_cast<std::uint8_t>(scale));
  } else {
    got = to_float(reinterpret_cast<const bf16*>(row)[c]);
  }
  add_squares(inside ? got : 0.0f, inside ? wanted : 0.0f, sums);
}

__global__ void count_nan_kernel(const std::byte* codes, std::size_t count, unsigned long long* bad) {
  for_all(count, [&](std::size_t i) {
    if ((static_cast<std::uint32_t>(codes[i]) & 0x7Fu) == e4m3_nan) atomicAdd(bad, 1ull);
  });
}

dim3 samples_by(int columns, int a_cta, int count) {
  return dim3(static_cast<unsigned>((columns + a_cta - 1) / a_cta), static_cast<unsigned>(count));
}

}  // namespace

void fill_weights(const StoredLayer& layer, std::uint64_t seed, cudaStream_t stream) {
  const auto experts = static_cast<std::size_t>(layer.experts);
  fill_values<<<fill_ctas, fill_threads, 0, stream>>>(layer.kind, reinterpret_cast<std::uint32_t*>(layer.values),
                                                      experts * layer.values_an_expert() / 4, seed << 40);
  check(cudaGetLastError(), "launch of random weights");
  const std::size_t scales = experts * layer.scales_an_expert() / (layer.kind == WeightKind::fp8_block ? sizeof(float) : 1);
  if (scales == 0) return;
  fill_scales<<<fill_ctas, fill_threads, 0, stream>>>(layer.kind, layer.scales, scales, (seed << 40) + (1ull << 39));
  check(cudaGetLastError(), "launch of random scales");
}

void fill_tokens(const TokenBuffer& tokens, std::uint64_t seed, cudaStream_t stream) {
  const std::size_t values = static_cast<std::size_t>(tokens.rows) * static_cast<std::size_t>(tokens.cols);
  fill_token_values<<<fill_ctas, fill_threads, 0, stream>>>(tokens.fp8, reinterpret_cast<std::uint32_t*>(tokens.values),
                                                            values / (tokens.fp8 ? 4 : 2), seed << 40);
  check(cudaGetLastError(), "launch of random tokens");
  if (!tokens.fp8) return;
  fill_token_scales<<<fill_ctas, fill_threads, 0, stream>>>(tokens, (seed << 40) + (1ull << 39));
  check(cudaGetLastError(), "launch of random scales of tokens");
}

void prepare_streams() {
  const auto allow = [](auto* kernel) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               stream_shared_bytes),
          "shared memory of the stream");
  };
  allow(stream_kernel);
  allow(empty_product);
}

void launch_stream(const sm90::OrderedMatrix& weights, int experts, int first, int touched, int ctas, cudaStream_t stream) {
  const auto pieces = static_cast<long long>((weights.expert_stride + stream_piece - 1) / stream_piece);
  const StreamRange range{weights.chunks, weights.expert_stride, experts, first, pieces, pieces * touched};
  stream_kernel<<<static_cast<unsigned>(ctas), 32, stream_shared_bytes, stream>>>(range);
  check(cudaGetLastError(), "launch of the stream");
}

void launch_empty_product(int ctas, cudaStream_t stream) {
  empty_product<<<static_cast<unsigned>(ctas), 640, stream_shared_bytes, stream>>>();
  check(cudaGetLastError(), "launch of the empty kernel");
}

void launch_reference(const StoredLayer& layer, const TokenBuffer& tokens, const Sample* samples, int count, float* reference,
                      cudaStream_t stream) {
  reference_kernel<<<samples_by(layer.rows, 8, count), 256, 0, stream>>>(layer, tokens, samples, reference);
  check(cudaGetLastError(), "launch of the reference");
}

void compare_results(const sm90::ResultStore& results, const Sample* samples, int count, int columns, const float* reference,
                     double* sums, cudaStream_t stream) {
  compare_kernel<<<samples_by(columns, 256, count), 256, 0, stream>>>(results, samples, columns, reference, sums);
  check(cudaGetLastError(), "launch of the comparison");
}

void compare_activated(const sm90::ActivatedStore& activated, const Sample* samples, int count, int columns, const float* reference,
                       double* sums, cudaStream_t stream) {
  compare_activated_kernel<<<samples_by(columns, 256, count), 256, 0, stream>>>(activated, samples, columns, reference, sums);
  check(cudaGetLastError(), "launch of the comparison");
}

void count_nan_codes(const std::byte* codes, std::size_t count, unsigned long long* bad, cudaStream_t stream) {
  count_nan_kernel<<<fill_ctas, fill_threads, 0, stream>>>(codes, count, bad);
  check(cudaGetLastError(), "launch of the check");
}

}  // namespace heddle::tool
