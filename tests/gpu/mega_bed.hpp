// The fused layer on GPUs beside the chain that it has to agree with, bit for bit: the same weights in one workspace.
#pragma once

#include "exchange/host_exchange.hpp"
#include "gpu/layer_bed.hpp"
#include "mega/options.hpp"

namespace heddle::layer_test {

/// Weights that the fused kernel multiplies.
inline constexpr WeightKind fused_kinds[] = {WeightKind::mxfp4, WeightKind::fp8_block, WeightKind::bf16};

/// A small fused layer.
inline Case fused_case(int ranks, WeightKind kind) {
  Case c = plain_case(ranks, kind);
  c.take({Way::mega, Reduce::rank});
  return c;
}

/// The slots chain with the same weights and options.
inline Case chain_of(Case c) {
  c.take({Way::low_latency, Reduce::rank});
  c.options.combine = Combine::slots;
  return c;
}

/// The same case, its ring and row blocks apart.
inline Case with_ring(Case c, int block_rows, RingSize ring, int workers = 1) {
  c.options.block_rows = block_rows;
  c.options.ring = ring;
  c.options.workers = workers;
  return c;
}

/// Another batch for the same layer: other tokens, routing and numbers, up to `most` a rank.
inline Case another_batch(const Case& c, int most, std::uint64_t seed) {
  Chance chance(seed);
  Case other = c;
  if (!c.options.tensor_parallel) other.tokens = random_split(chance, c.ranks(), most);  // else the whole batch is the step's
  other.seed = seed;
  other.missing = chance.one_of({0.0, 0.1, 0.6});
  other.hot_rank = chance.one_in(3) ? chance.between(0, c.ranks() - 1) : -1;
  return other;
}

/// Case n of a random series that the fused kernel computes.
inline Case random_fused_case(std::uint64_t seed, int ranks) {
  Chance chance(seed + 99);
  Case c = random_case(seed, ranks);
  c.take({Way::mega, Reduce::rank});
  c.layer.kind = chance.one_of({WeightKind::mxfp4, WeightKind::fp8_block, WeightKind::bf16});
  c.options.activation.reset();  // the kind's own, and the wire that goes with it
  c.options.wire.reset();
  if (c.layer.shared_kind && needs_fp8(*c.layer.shared_kind) && !needs_fp8(c.layer.kind))
    c.layer.shared_kind = chance.one_of({WeightKind::bf16, WeightKind::nvfp4, WeightKind::mxfp8});
  if (chance.one_in(3)) {
    c.options.cap = 70;
    c.tokens = random_split(chance, ranks, c.options.cap);
  }
  c = with_ring(c, chance.one_of({8, 8, 16, 32, 40, 96, 128, 256}), chance.one_of({RingSize::live, RingSize::live, RingSize::full}),
                chance.one_of({1, 2, 64}));
  if (c.layer.shared_intermediate == c.layer.shape.intermediate && chance.one_in(2)) c.options.shared = SharedMode::fused;
  if (chance.one_in(4)) make_tensor_parallel(c);
  return c;
}

/// Fused layers of one case, each with options of its own, and behind them their chain.
class MegaBed {
 public:
  explicit MegaBed(const Case& c, std::chrono::milliseconds deadline = std::chrono::seconds(30),
                   const DeviceLayerOptions& device = {})
      : MegaBed(std::vector<Case>{c}, deadline, device) {}
  explicit MegaBed(const std::vector<Case>& fused, std::chrono::milliseconds deadline = std::chrono::seconds(30),
                   const DeviceLayerOptions& device = {})
      : fused_(fused),
        chain_case_(chain_of(fused.front())),
        layer_(fused.front().layer),
        source_(source_of(layer_, fused.front())),
        bed_(given(), device, deadline) {}

  LayerBed& bed() { return bed_; }
  DeviceWorkspace& workspace() { return bed_.workspace(); }
  const LayerSource& source() const { return source_; }
  std::size_t fused_layers() const { return fused_.size(); }
  std::size_t chain_number() const { return fused_.size(); }

  /// A call by one of the layers, not captured.
  std::vector<bf16> call(std::size_t number, const Case& batch, const Tokens& tokens) {
    bed_.load(batch, tokens);
    return bed_.call(batch, number);
  }
  std::vector<bf16> chain(const Case& batch, const Tokens& tokens) { return call(chain_number(), batch, tokens); }

  /// Every fused layer, twice, against the chain; the chain's outputs.
  std::vector<bf16> expect_equal(const Case& batch, const Tokens& tokens) {
    std::vector<bf16> want = chain(batch, tokens);
    for (std::size_t i = 0; i < fused_.size(); ++i) {
      for (int repeat = 0; repeat < 2; ++repeat) {
        EXPECT_EQ(different_bits(call(i, batch, tokens), want), 0u)
            << "fused layer " << i << (repeat == 0 ? "" : ", called again") << ": " << text_of(of_layer(i, batch));
      }
    }
    return want;
  }
  std::vector<bf16> expect_equal(const Case& batch) { return expect_equal(batch, draw_tokens(batch, batch.seed)); }

  MegaLayout layout(std::size_t number) const {
    LayerWeights weights;
    weights.shape = source_.shape;
    weights.kind = source_.kind;
    weights.placement = fused_[number].placement;
    weights.shared = source_.shared;
    const LayerOptions& options = fused_[number].options;
    return make_mega_layout(exchange_options(weights, options), options.workers, areas_of(bed_.memory(), chain_case_.ranks()));
  }

 private:
  std::vector<LayerBed::Given> given() const {
    std::vector<LayerBed::Given> all;
    for (const Case& c : fused_) all.push_back({&source_, &c});
    all.push_back({&source_, &chain_case_});
    return all;
  }
  Case of_layer(std::size_t number, Case batch) const {
    batch.options = fused_[number].options;
    return batch;
  }

  std::vector<Case> fused_;
  Case chain_case_;
  SyntheticLayer layer_;
  LayerSource source_;
  LayerBed bed_;
};

/// A layer of its own for a case: all its fused calls have the chain's bits.
inline std::vector<bf16> expect_equal_to_the_chain(const Case& c) {
  SCOPED_TRACE(text_of(c));
  MegaBed bed(c);
  return bed.expect_equal(c);
}

}  // namespace heddle::layer_test
