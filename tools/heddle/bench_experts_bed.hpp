// What one product of the experts is measured on: layers of weights, token rows, results, and calls that go through
// the layers, so that no call finds its weights in the L2.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench_batch.hpp"
#include "bench_cutlass.hpp"
#include "bench_experts_kernels.hpp"
#include "bench_replay.hpp"
#include "experts/sm90/launch.hpp"

namespace heddle::tool {

/// Rows of every local expert.
struct RowCounts {
  std::string name;  ///< e.g. "24", "4 in 2 experts", "recorded 64"
  std::vector<int> rows;

  int touched() const;  ///< experts with rows
  int total() const;
  int most() const;
};

/// The matrix of one of the two products: gate and up in one [2 D, H], or down [H, D].
struct ProductShape {
  WeightKind kind = WeightKind::bf16;
  int hidden = 0;
  int intermediate = 0;
  bool down = false;
  int experts = 0;

  int rows() const { return down ? hidden : 2 * intermediate; }
  int cols() const { return down ? intermediate : hidden; }
  /// Tokens are e4m3 where the tensor cores multiply e4m3, else bf16.
  bool fp8() const { return kind == WeightKind::fp8_block || kind == WeightKind::mxfp4; }
};

/// Two multiply-adds a value of weights and row.
double flops(const ProductShape& shape, const RowCounts& counts);

class ProductBed {
 public:
  bool in_boxes = true;  ///< token rows are copied in boxes, not one by one

  /// Room for `most_rows` rows. The weights are drawn as they are stored, then laid out by the loader's kernels.
  ProductBed(Lanes& lanes, const ProductShape& shape, int most_rows, std::uint64_t seed);
  ~ProductBed();
  ProductBed(const ProductBed&) = delete;
  ProductBed& operator=(const ProductBed&) = delete;

  const ProductShape& shape() const { return shape_; }
  WeightKind kind() const { return shape_.kind; }
  int layers() const { return static_cast<int>(layers_.size()); }
  /// Device bytes of one expert's ordered weights.
  double expert_bytes() const;

  /// What the next calls multiply. Call `i` takes layer i % layers and, where not all experts have rows, others of them.
  void set_counts(const RowCounts& counts);
  const RowCounts& counts() const { return counts_; }
  /// Calls until the same weights come again; between them lie at least three times the L2, unless the matrix is too small for
  /// that.
  int cycle() const { return cycle_; }

  void queue_product(int call, sm90::RowBlocks blocks, bool activates, int ctas);
  /// The same weights, brought in and not multiplied.
  void queue_stream(int call, int ctas);
  /// The products of a call as others' kernels take them.
  std::vector<GroupedProblem> problems(int call) const;
  /// Stored weights of expert `expert` of a layer, and all tokens: for a dense product.
  const std::byte* stored_weights(int layer, int expert) const;
  const std::byte* tokens() const { return tokens_.values; }
  bf16* results() const;

  /// Runs `queue`, which must be call 0, over poisoned results, and returns how far the checked rows are off their reference:
  /// the norm of the difference over the reference's; NaN if a row was not written. `give_up` as in Lanes::settle.
  double error_of(bool activates, const std::function<void()>& queue, const std::function<void()>& give_up);
  /// What it may be.
  double allowed_error(bool activates) const;

 private:
  struct Layer;

  void draw_layer(Layer& layer, std::uint64_t seed);
  void choose_samples();
  sm90::ProductCall call_of(int call) const;
  int first_expert(int call) const;

  Lanes& lanes_;
  ProductShape shape_;
  int most_rows_;
  std::vector<std::unique_ptr<Layer>> layers_;
  TokenBuffer tokens_;
  std::unique_ptr<Block> token_values_, token_scales_, token_wide_scales_, routing_weights_;
  std::unique_ptr<Block> results_;  ///< bf16 rows, or activated rows and their scales
  std::unique_ptr<Block> counts_memory_, samples_, reference_, sums_;
  RowCounts counts_;
  int cycle_ = 1;
  int sample_count_ = 0;
};

}  // namespace heddle::tool
