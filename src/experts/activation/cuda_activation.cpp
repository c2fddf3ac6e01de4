// The host side of the activation step on a GPU: what is checked, and how many CTAs are launched.
#include <fmt/format.h>

#include <algorithm>
#include <climits>

#include "experts/activation/device.hpp"
#include "experts/activation/flat_list.hpp"
#include "experts/activation/kernel.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

constexpr int fixed_ctas = 132 * 32;

template <class... Values>
void require(bool holds, fmt::format_string<Values...> text, Values&&... values) {
  if (!holds) throw InputError("activation: " + fmt::format(text, std::forward<Values>(values)...));
}

void require_aligned(const void* pointer, std::size_t bytes, const char* name) {
  require(pointer != nullptr, "{} is null", name);
  require(reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0, "{} is at {}, it has to be aligned to {} bytes", name,
          fmt::ptr(pointer), bytes);
}

void check_scales(const DeviceActivation& step) {
  const ScaleLayout& layout = step.scale_layout;
  require(step.group == 128 || step.group == 32, "{} values share a scale, 128 or 32 are supported", step.group);
  require(layout.groups == step.groups(), "the scale layout has {} groups, but D = {} in groups of {} makes {}", layout.groups,
          step.intermediate, step.group, step.groups());
  require(layout.order != ScaleOrder::column_major || layout.format == ScaleFormat::f32, "column-major scales are f32, not ue8m0");
  require(layout.order != ScaleOrder::packed || layout.format == ScaleFormat::ue8m0, "packed scales are ue8m0, not f32");
  if (layout.order != ScaleOrder::row_major) {
    require(layout.padded_rows > 0 && layout.padded_rows % ScaleLayout::row_multiple == 0,
            "the scale layout has {} padded rows, it needs a multiple of {}", layout.padded_rows, ScaleLayout::row_multiple);
    require(step.block_rows == 0 || step.row_begin != nullptr || std::int64_t{step.experts} * step.block_rows <= layout.padded_rows,
            "the scale layout has {} padded rows, but {} experts have {} rows each", layout.padded_rows, step.experts,
            step.block_rows);
  }
  const bool bytes = layout.order == ScaleOrder::row_major && layout.format == ScaleFormat::ue8m0;
  require_aligned(step.scales, bytes ? 1 : 4, "scales");
}

void check(const DeviceActivation& step) {
  require(step.experts >= 1 && step.experts <= most_activation_experts, "{} local experts, 1 to {} are supported", step.experts,
          most_activation_experts);
  require(step.intermediate >= 64 && step.intermediate % 64 == 0, "D = {}, it has to be a multiple of 64", step.intermediate);
  require(step.intermediate <= (1 << 28), "D = {} is too large", step.intermediate);
  require(step.most_rows >= 0, "at most {} rows, it cannot be negative", step.most_rows);
  require(step.block_rows >= 0, "blocks of {} rows, it cannot be negative", step.block_rows);
  require(std::int64_t{step.experts} * step.block_rows <= INT_MAX, "{} experts of {} rows each are more places than 2^31 - 1",
          step.experts, step.block_rows);
  require(!step.clamp.has_value() || *step.clamp >= 0.0f, "the clamp is {}, it has to be at least 0", step.clamp.value_or(0.0f));
  require_aligned(step.counts, sizeof(int), "counts");
  require_aligned(step.gate_up, 16, "gate_up");
  require_aligned(step.values, 16, "values");
  if (step.format == Activation::fp8) check_scales(step);
}

ActivationCall call_of(const DeviceActivation& step) {
  ActivationCall call;
  call.gate_up = reinterpret_cast<const std::byte*>(step.gate_up);
  call.counts = step.counts;
  call.row_begin = step.row_begin;
  call.weights = step.weights;
  call.values = static_cast<std::byte*>(step.values);
  call.scales = static_cast<std::byte*>(step.scales);
  call.experts = step.experts;
  call.intermediate = step.intermediate;
  call.block_rows = step.block_rows;
  call.most_count = step.row_begin == nullptr && step.block_rows > 0 ? step.block_rows : INT_MAX;
  call.most_rows = step.most_rows;
  call.clamp = DeviceClamp::of(step.clamp);
  call.group = step.group;
  call.scale_layout = step.scale_layout;
  call.scale_row_stride = static_cast<unsigned>(step.scale_layout.row_stride());
  return call;
}

const void* kernel_of(const DeviceActivation& step) { return activation_kernel(step.format, step.scale_layout.format); }

}  // namespace

int activation_threads(int intermediate) {
  constexpr int warp_columns = 32 * activation_columns;
  return std::min(most_activation_threads, (intermediate + warp_columns - 1) / warp_columns * 32);
}

int activation_slots(const DeviceActivation& step) {
  int device = 0, sms = 0, ctas = 0;
  cuda::check(cudaGetDevice(&device), "current device");
  cuda::check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
  cuda::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel_of(step), activation_threads(step.intermediate), 0),
              "occupancy of the activation kernel");
  return ctas * sms;
}

int activation_ctas(const DeviceActivation& step, const ActivationLaunch& launch) {
  if (launch.grid == DeviceGrid::padded) return step.most_rows;
  if (launch.grid == DeviceGrid::fixed) return fixed_ctas;
  return persistent_blocks(launch.slots > 0 ? launch.slots : activation_slots(step), step.most_rows, 1);
}

void launch_activation(const DeviceActivation& step, const ActivationLaunch& launch, cudaStream_t stream) {
  check(step);
  if (step.most_rows == 0) return;
  ActivationCall call = call_of(step);
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(activation_ctas(step, launch)));
  config.blockDim = dim3(static_cast<unsigned>(activation_threads(step.intermediate)));
  config.stream = stream;
  config.attrs = &attribute;
  if (launch.ahead) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  void* arguments[] = {&call};
  cuda::check(cudaLaunchKernelExC(&config, kernel_of(step), arguments), "launch of the activation kernel");
}

}  // namespace heddle
