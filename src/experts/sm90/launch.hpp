// Launches of the tile engine, for code that is not compiled for a device.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "experts/sm90/call.hpp"
#include "experts/sm90/tile.hpp"
#include "heddle/device_experts.hpp"

namespace heddle::sm90 {

/// The configurations of the engine. Small row blocks (8 to 32 tokens) have weights first and in registers. Large ones have
/// more registers a warp or, with e4m3 operands (64 or 128 tokens), tokens first and weights in shared memory; with bf16 operands
/// 32, 64 or 96 tokens. Medium ones (16 to 64 tokens) are small ones with more tokens; mxfp4 has them, for other kinds they are
/// the large ones. The choice changes no bit, and any count of rows is right with each.
enum class RowBlocks : std::uint8_t { small, medium, large };
inline constexpr RowBlocks every_row_blocks[] = {RowBlocks::small, RowBlocks::medium, RowBlocks::large};

constexpr const char* name(RowBlocks blocks) {
  constexpr const char* names[] = {"small", "medium", "large"};
  return names[static_cast<int>(blocks)];
}

/// What is asked for or, where nothing is, the row blocks that were measured to take least time (docs/performance.md, "A tile of 24
/// tokens, and row blocks of up to 64").
struct BlockChoice {
  DeviceRowBlocks wish = DeviceRowBlocks::automatic;
  bool has_medium = false;  ///< whether there are kernels for them: has_medium_blocks of all weights that one kernel multiplies by
  int most_of_small = 24;   ///< rows an expert, on average, up to where small ones do, beside medium ones

  RowBlocks choose(int rows) const;
  /// Whether it is chosen for some number of rows.
  bool includes(RowBlocks blocks) const;
};

/// A kernel of the engine as the runtime wants it.
struct ProductKernel {
  const void* function = nullptr;
  int threads = 0;
  int most_tokens = 0;           ///< of a row block
  int box_rows = 0;              ///< of token rows that are copied together
  std::size_t shared_bytes = 0;  ///< without the lists of experts

  std::size_t shared_bytes_for(int experts) const { return shared_bytes + static_cast<std::size_t>(experts) * 2 * sizeof(int); }
};

/// The most local experts whose lists fit beside every configuration.
inline constexpr int most_experts = 1024;

/// Of which calls a kernel is wanted: of the usual ones (see Plain), where there is one for them alone, or of any.
enum class KernelCalls : std::uint8_t { plain, any };

ProductKernel find_kernel(WeightKind kind, RowBlocks blocks, bool activates, KernelCalls calls);

/// Rows as the unit that copies tensors takes them, in boxes of `box_rows` rows x 128 bytes, swizzled: rows at `values`, `stride`
/// bytes apart, `row_bytes` of each are theirs, and what a box has beyond them is zeros. Throws CudaError.
RowTensor make_row_tensor(const std::byte* values, std::size_t stride, std::size_t row_bytes, std::size_t rows, int box_rows);

/// Loads the kernels of a kind on the current device, so that no launch has to. Throws CudaError.
void prepare_products(WeightKind kind);

/// Queues the product on the current device with `ctas` CTAs (at most one a SM). The weights' kind picks the kernel; `activates`
/// says whether gate and up are activated (ProductCall::activated) or stored. Allocates nothing; may be captured.
void launch_product(const ProductCall& product, RowBlocks blocks, bool activates, int ctas, cudaStream_t stream);

}  // namespace heddle::sm90
