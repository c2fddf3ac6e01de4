#include "experts/sm90/launch.hpp"

#include <fmt/format.h>

#include <cstring>

#include "experts/sm90/tile.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "trace/cuda_arena.hpp"

namespace heddle::sm90 {

template <WeightKind kind>
ProductKernel kernel_of(RowBlocks blocks, bool activates);
extern template ProductKernel kernel_of<WeightKind::bf16>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::fp8_block>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::mxfp4>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::nvfp4>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::mxfp8>(RowBlocks, bool);

template <WeightKind kind>
ProductKernel plain_kernel_of(RowBlocks blocks, bool activates);
extern template ProductKernel plain_kernel_of<WeightKind::mxfp4>(RowBlocks, bool);

namespace {

/// See Plain.
KernelCalls calls_of(const ProductCall& call, bool activates) {
  const auto usual = [](Activation format, const Quantisation& scales) {
    return format == Activation::fp8 && scales.group == 128 && scales.scale == ScaleFormat::ue8m0;
  };
  const TokenRows& tokens = call.tokens;
  const bool rows = tokens.scaling == TokenScales::by_128 && tokens.format == ScaleFormat::ue8m0;
  const bool results = !activates || usual(call.activated.format, call.activated.quantisation);
  return rows && results && !call.weights.plan.step_exponents ? KernelCalls::plain : KernelCalls::any;
}

}  // namespace

ProductKernel find_kernel(WeightKind kind, RowBlocks blocks, bool activates, KernelCalls calls) {
  if (calls == KernelCalls::plain && kind == WeightKind::mxfp4) return plain_kernel_of<WeightKind::mxfp4>(blocks, activates);
  switch (kind) {
    case WeightKind::bf16:
      return kernel_of<WeightKind::bf16>(blocks, activates);
    case WeightKind::fp8_block:
      return kernel_of<WeightKind::fp8_block>(blocks, activates);
    case WeightKind::mxfp4:
      return kernel_of<WeightKind::mxfp4>(blocks, activates);
    case WeightKind::nvfp4:
      return kernel_of<WeightKind::nvfp4>(blocks, activates);
    case WeightKind::mxfp8:
      return kernel_of<WeightKind::mxfp8>(blocks, activates);
  }
  throw InputError(fmt::format("unknown weight kind {}", static_cast<int>(kind)));
}

RowBlocks BlockChoice::choose(int rows) const {
  constexpr int most_of_small_without_medium = 32;
  constexpr int most_of_medium = 56;
  const bool none_wished = wish == DeviceRowBlocks::automatic;
  const int small = has_medium ? most_of_small : most_of_small_without_medium;
  if (none_wished ? rows <= small : wish == DeviceRowBlocks::small) return RowBlocks::small;
  const bool medium = none_wished ? rows <= most_of_medium : wish == DeviceRowBlocks::medium;
  return medium && has_medium ? RowBlocks::medium : RowBlocks::large;
}

bool BlockChoice::includes(RowBlocks blocks) const {
  if (wish != DeviceRowBlocks::automatic) return choose(0) == blocks;
  return blocks != RowBlocks::medium || has_medium;
}

void prepare_products(WeightKind kind) {
  for (const RowBlocks blocks : every_row_blocks) {
    for (const bool activates : {false, true}) {
      for (const KernelCalls calls : {KernelCalls::plain, KernelCalls::any}) {
        const ProductKernel kernel = find_kernel(kind, blocks, activates, calls);
        const auto most = static_cast<int>(kernel.shared_bytes_for(most_experts));
        cuda::check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
                    "cudaFuncSetAttribute for a product of the experts");
      }
    }
  }
}

RowTensor make_row_tensor(const std::byte* values, std::size_t stride, std::size_t row_bytes, std::size_t rows, int box_rows) {
  const cuuint64_t sizes[] = {row_bytes, rows};
  const cuuint64_t strides[] = {stride};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(panel_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  cuda::check(cuda::driver().encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<std::byte*>(values), sizes, strides,
                                          box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
              "the description of token rows for the tensor copies");
  RowTensor tensor;
  static_assert(sizeof tensor == sizeof map);
  std::memcpy(tensor.words, &map, sizeof map);
  return tensor;
}

void launch_product(const ProductCall& product, RowBlocks blocks, bool activates, int ctas, cudaStream_t stream) {
  const WeightPlan& plan = product.weights.plan;
  const ProductKernel kernel = find_kernel(plan.kind, blocks, activates, calls_of(product, activates));
  ProductCall call = product;
  if (call.tokens.in_boxes()) {
    const std::size_t row_bytes = static_cast<std::size_t>(plan.cols) * (plan.shape().operand == Operand::e4m3 ? 1 : 2);
    call.tokens.tensor = make_row_tensor(call.tokens.values, call.tokens.value_stride, row_bytes,
                                         static_cast<std::size_t>(call.tokens.readable), kernel.box_rows);
  }
  constexpr int most_spans = 1024;
  trace::record_launch(call, {0, 1, ctas, kernel.threads, most_spans, 0, !plan.paired});
  void* arguments[] = {&call};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = kernel.shared_bytes_for(call.experts);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = call.start == ProductStart::in_order ? 0 : 1;
  cuda::check(cudaLaunchKernelExC(&config, kernel.function, arguments), "launch of a product of the experts");
}

}  // namespace heddle::sm90
