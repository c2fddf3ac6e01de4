// The activation step between the GEMMs, on a GPU: clamp, SwiGLU, routing weight, quantisation of every real row, by one
// of three grids that give the same bits (persistent-grid article).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "experts/activation/scale_layout.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// One activation step. All pointers are into device memory; gate_up and values are 16-byte aligned.
///
/// Buffers are rows at places. Row j of expert e lies at place row_begin[e] + j where row_begin is given; else at
/// e * block_rows + j; with block_rows = 0 the rows of all experts follow each other without gaps. Only the first counts[e]
/// rows of an expert are read and written. Counts are kernels' results and trusted, but for two bounds: with block_rows a
/// count is taken as at most block_rows, a negative one always as 0, and of all rows, in order of experts, the first
/// most_rows alone are computed.
struct DeviceActivation {
  int experts = 0;                 ///< local ones, 1 to 1024
  int intermediate = 0;            ///< D, a multiple of 64
  const bf16* gate_up = nullptr;   ///< [places, 2 D]: the gate half, then the up half
  const int* counts = nullptr;     ///< [experts], the masked_m of masked layouts
  const int* row_begin = nullptr;  ///< [experts] or null
  int block_rows = 0;
  int most_rows = 0;               ///< rows there can be in all: T x topk
  const float* weights = nullptr;  ///< [places] or null: 1
  std::optional<float> clamp;      ///< at least 0
  Activation format = Activation::fp8;
  int group = 128;           ///< values a scale, 128 or 32 (fp8)
  ScaleLayout scale_layout;  ///< its `groups` are ceil(D / group)
  void* values = nullptr;    ///< [places, D] e4m3 or bf16
  void* scales = nullptr;    ///< fp8: as scale_layout says; f32 and packed are 4-byte aligned

  int groups() const { return (intermediate + group - 1) / group; }
};

/// How many CTAs are launched, of which CTA c computes the flat rows c, c + CTAs, ...
enum class DeviceGrid : std::uint8_t {
  padded,      ///< one for each row there can be
  persistent,  ///< one for each slot, that is, as many as can be resident at once, and no more than padded
  fixed        ///< 132 x 32, whatever the GPU and the step
};

struct ActivationLaunch {
  DeviceGrid grid = DeviceGrid::persistent;
  int slots = 0;       ///< persistent: activation_slots(), or 0: ask the driver now
  bool ahead = false;  ///< may begin before the kernel before it on the stream has ended, for whose end it waits then
};

/// CTAs of this step that the current device holds at once: the driver's occupancy times the SMs. It takes the host some
/// microseconds; it depends on the format, the scale format and D alone.
int activation_slots(const DeviceActivation& step);

/// CTAs that a launch of this step has.
int activation_ctas(const DeviceActivation& step, const ActivationLaunch& launch);

/// Threads of a CTA: 8 columns each, whole warps, at most 1024 (wider rows take several passes). 256 for D = 2048.
int activation_threads(int intermediate);

/// Queues the step on a stream of the current device; it can be captured. Throws InputError for shapes, layouts and
/// alignments that do not fit, before anything is launched, and Error if the launch fails.
void launch_activation(const DeviceActivation& step, const ActivationLaunch& launch, cudaStream_t stream);

}  // namespace heddle
