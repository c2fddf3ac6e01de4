// The fused layer's buffer: regions and words do not overlap, whatever the shape; sizes grow with what they should.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "exchange_support.hpp"
#include "mega/options.hpp"

namespace heddle {
namespace {

ExchangeOptions mega_options(int hidden, int intermediate, int experts, int ranks, int topk, int cap) {
  ExchangeOptions options = options_for(Way::mega, hidden, experts, ranks, topk, cap);
  options.wire = Wire::fp8;
  options.mega.intermediate = intermediate;
  return options;
}

MegaLayout layout_of(const ExchangeOptions& options) {
  return make_mega_layout(options, options.workers, areas_of(exchange_memory(options), options.placement.ranks()));
}

/// What lies in a part, by byte ranges.
class Map {
 public:
  void add(const std::string& name, std::size_t begin, std::size_t bytes, std::size_t alignment) {
    EXPECT_EQ(begin % alignment, 0u) << name;
    if (bytes > 0) pieces_.push_back({begin, begin + bytes, name});
  }
  void expect_disjoint_up_to(std::size_t end) {
    std::sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const std::size_t next = i + 1 < pieces_.size() ? pieces_[i + 1].begin : end;
      EXPECT_LE(pieces_[i].end, next) << pieces_[i].name << " and " << (i + 1 < pieces_.size() ? pieces_[i + 1].name : "the end");
    }
  }

 private:
  struct Piece {
    std::size_t begin, end;
    std::string name;
  };
  std::vector<Piece> pieces_;
};

void add_words(const MegaLayout& layout, Map& map) {
  for (int rank = 0; rank < layout.shape.ranks; ++rank) {
    map.add("announced", layout.announced_word(rank), sizeof(Word), sizeof(Word));
    map.add("ready", layout.ready_word(rank), sizeof(Word), sizeof(Word));
  }
  map.add("counted", layout.counted_word(), sizeof(Word), 128);
  map.add("claim", layout.claim_word(), sizeof(Word), 128);
  map.add("finished", layout.finished_word(), sizeof(Word), 128);
  for (int block = 0; block < layout.ring_blocks; ++block) {
    map.add("filled", layout.filled_word(block), sizeof(Word), sizeof(Word));
    map.add("freed", layout.freed_word(block), sizeof(Word), sizeof(Word));
    for (int step = 0; step < layout.gemm1_tasks(); ++step)
      map.add(fmt::format("step {} of block {}", step, block), layout.step_word(block, step), sizeof(Word), sizeof(Word));
  }
  for (int block = 0; block < layout.shared_blocks(); ++block) {
    for (int step = 0; step < layout.shared.steps(); ++step)
      map.add("shared step", layout.shared_step_word(block, step), sizeof(Word), sizeof(Word));
  }
}

void add_steps(const std::string& name, const StepRegion& region, Map& map) {
  for (std::size_t row = 0; row < region.rows; ++row) {
    for (int step = 0; step < region.format.steps(); ++step) {
      map.add(fmt::format("{} values {}.{}", name, row, step), region.values(row, step),
              region.format.value_bytes(region.format.columns(step)), 4);
      map.add(fmt::format("{} scales {}.{}", name, row, step), region.scales(row, step), region.format.scale_stride(), 4);
      EXPECT_LE(region.format.scale_bytes(step), region.format.scale_stride());
    }
  }
}

void add_data(const MegaLayout& layout, Map& map) {
  const ExchangeShape& shape = layout.shape;
  for (int pair = 0; !layout.adds && pair < shape.cap * shape.topk; ++pair)
    map.add("slot", layout.slot(pair), layout.returned.row_bytes(), 16);
  for (int token = 0; token < shape.cap; ++token) {
    map.add("input row", layout.row(token), layout.wire.row_bytes(), 16);
    map.add("routing", layout.routing(token), routing_bytes(shape.topk), 16);
    for (int choice = 0; choice < shape.topk; ++choice) {
      EXPECT_EQ(layout.weight(token * shape.topk + choice),
                layout.routing(token) + 4 * static_cast<std::size_t>(shape.topk + choice));
    }
    if (layout.has_shared) map.add("shared slot", layout.shared_slot(token), layout.plain().row_bytes(), 16);
    if (layout.adds) map.add("sum", layout.sum(token), layout.plain().row_bytes(), 16);
  }
  for (int expert = 0; expert < shape.max_local_experts; ++expert) {
    for (int source = 0; source < shape.ranks; ++source) {
      map.add("count", layout.count(expert, source), 4, 4);
      for (int number = 0; number < shape.cap; ++number) map.add("index", layout.index(expert, source, number), 4, 4);
    }
  }
  for (std::size_t row = 0; row < layout.ring_rows(); ++row) {
    map.add("arrived row", layout.arrived(row), layout.wire.row_bytes(), 16);
    map.add("origin", layout.origin(row), sizeof(MegaOrigin), 8);
    map.add("weight", layout.row_weight(row), sizeof(float), 4);
  }
  add_steps("intermediate", layout.intermediate(), map);
  add_steps("shared", layout.shared_intermediate(), map);
}

ExchangeOptions random_options(std::mt19937_64& random) {
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  const int ranks = pick(1, 2, 3, 8, 72);
  const int experts = pick(1, 5, 16, 80);
  ExchangeOptions options = mega_options(64 * pick(1, 3, 5), 64 * pick(1, 2, 3, 7), experts, ranks, pick(1, 2, 3), pick(1, 3, 9));
  options.topk = std::min(options.topk, experts);
  options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
  options.quantisation = {pick(32, 128), pick(ScaleFormat::ue8m0, ScaleFormat::f32)};
  options.combine = pick(Combine::slots, Combine::slots, Combine::add);
  if (options.combine == Combine::slots) options.combine_wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
  options.workers = pick(1, 2, 5);
  options.mega.activation = pick(Activation::fp8, Activation::bf16);
  options.mega.shared_intermediate = 64 * pick(0, 1, 3);
  options.mega.block_rows = pick(8, 16, 128);
  options.mega.ring = pick(RingSize::live, RingSize::full);
  return options;
}

TEST(MegaLayout, NothingOverlapsWhateverTheShape) {
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < 60; ++round) {
    std::mt19937_64 random = generator(seed, round, 0);
    const ExchangeOptions options = random_options(random);
    SCOPED_TRACE(testing::Message() << "round " << round << " of seed " << seed << ": " << describe(options));
    const MegaLayout layout = layout_of(options);
    Map map;
    map.add("header", 0, heap_header_bytes, 128);
    add_words(layout, map);
    add_data(layout, map);
    map.expect_disjoint_up_to(exchange_memory(options).heap_bytes(options.placement.ranks()));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(MegaLayout, RegionsStayInTheirAreas) {
  const ExchangeOptions options = mega_options(256, 320, 16, 4, 3, 24);
  const MegaLayout layout = layout_of(options);
  EXPECT_LE(layout.dispatch_bytes(), layout.areas.combine - layout.areas.dispatch);
  EXPECT_LE(layout.combine_bytes(), layout.areas.outputs - layout.areas.combine);
  EXPECT_LE(layout.word_bytes(), layout.areas.mega_sums - layout.areas.mega_words);
  EXPECT_EQ(layout.gemm1_tasks(), 3);  // 128, 128 and 64 activations
  EXPECT_EQ(layout.activated.columns(2), 64);
  EXPECT_EQ(layout.gemm2_tasks(), 1);
}

// Slots are rows of the wire; the shared expert's results never travel.
TEST(MegaLayout, SlotsTakeWhatTheWireTakes) {
  ExchangeOptions options = mega_options(320, 192, 16, 4, 3, 24);
  options.mega.shared_intermediate = 192;
  const auto memory = [&](Wire wire, Combine combine) {
    options.combine_wire = wire;
    options.combine = combine;
    return exchange_memory(options);
  };
  const std::size_t shared = 24 * 2 * 320;
  EXPECT_EQ(memory(Wire::bf16, Combine::slots).combine, 24u * 3 * 2 * 320 + shared);
  EXPECT_EQ(memory(Wire::fp8, Combine::slots).combine, 24u * 3 * (320 + 16) + shared);    // three scale bytes
  EXPECT_EQ(memory(Wire::nvfp4, Combine::slots).combine, 24u * 3 * (160 + 32) + shared);  // twenty of them
  EXPECT_EQ(memory(Wire::bf16, Combine::slots).mega_sums, 0u);
  EXPECT_EQ(memory(Wire::bf16, Combine::add).combine, shared);
  EXPECT_EQ(memory(Wire::bf16, Combine::add).mega_sums, 24u * 2 * 320);
}

// Kernels have tiles of 32 rows and more, so on GPUs the options' blocks may become several: their words have room, too.
TEST(MegaLayout, BlocksMayBeCutIntoSmallerOnes) {
  for (const int block_rows : {8, 32, 40, 128, 256}) {
    for (const int cap : {1, 24, 70, 1000}) {
      ExchangeOptions options = mega_options(256, 320, 4, 4, 2, cap);
      options.mega.shared_intermediate = 192;
      options.mega.block_rows = block_rows;
      SCOPED_TRACE(testing::Message() << describe(options));
      const ExchangeMemory memory = exchange_memory(options);
      MegaLayout cut = layout_of(options);
      cut.block_rows = std::min(block_rows, 32);
      EXPECT_LE(cut.shared_step_word(parts_of(cap, cut.block_rows), 0) - cut.areas.mega_words, memory.mega_words);
      EXPECT_LE(cut.dispatch_bytes(), memory.dispatch);
      EXPECT_LE(cut.combine_bytes(), memory.combine);
      EXPECT_GE(static_cast<std::size_t>(cut.ring_blocks), std::min<std::size_t>(worst_blocks(cut.shape, cut.block_rows), 2))
          << "GEMM 1 of the second block would wait for GEMM 2 of the first one, which may stand behind it";
    }
  }
}

TEST(MegaLayout, TheRingHoldsLiveBlocksOrAllThatCanCome) {
  ExchangeOptions options = mega_options(256, 256, 16, 4, 3, 1000);
  options.mega.block_rows = 64;
  const MegaLayout live = layout_of(options);
  EXPECT_EQ(live.lag, lag_of(1, 2));
  EXPECT_EQ(live.ring_blocks, live_blocks(live.lag, 4));
  options.mega.ring = RingSize::full;
  const MegaLayout full = layout_of(options);
  EXPECT_EQ(full.ring_blocks, (4 * 1000 * 3 + 4 * 63) / 64);
  EXPECT_EQ(full.combine_bytes(), live.combine_bytes());
  // A small batch never needs more than all of its blocks.
  EXPECT_EQ(layout_of(mega_options(256, 256, 16, 4, 3, 2)).ring_blocks, 4);
}

TEST(MegaLayout, TheLiveRingDoesNotGrowWithTheCap) {
  const auto bytes = [](int cap) {
    const MegaLayout layout = layout_of(mega_options(4096, 2048, 256, 8, 6, cap));
    return layout.ring_rows();
  };
  EXPECT_EQ(bytes(4096), bytes(8192));
}

TEST(MegaLayout, OptionsThatDoNotFitAreRefusedByName) {
  const auto refused = [](auto change, const std::string& part) {
    ExchangeOptions options = mega_options(256, 256, 16, 4, 3, 8);
    ASSERT_NO_THROW(check_options(options));
    change(options);
    try {
      check_options(options);
      ADD_FAILURE() << "not refused: " << part;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused([](ExchangeOptions& o) { o.weight_at = WeightAt::combine; }, "mega: weight_at = combine");
  refused(
      [](ExchangeOptions& o) {
        o.combine = Combine::add;
        o.combine_wire = Wire::fp8;
      },
      "take combine_wire = bf16, or combine = slots");
  refused(
      [](ExchangeOptions& o) {
        o.mega.extra_expert = true;
        o.combine_wire = Wire::nvfp4;
      },
      "take combine_wire = bf16, or shared = fused");
  refused(
      [](ExchangeOptions& o) {
        o.combine = Combine::add;
        o.way = Way::low_latency;
        o.arrived = ArrivedLayout::masked;
      },
      "combine = add is mega's");
  refused([](ExchangeOptions& o) { o.mega.intermediate = 100; }, "intermediate size 100");
  refused([](ExchangeOptions& o) { o.mega.intermediate = 0; }, "intermediate size 0");
  refused([](ExchangeOptions& o) { o.mega.shared_intermediate = 32; }, "intermediate size 32");
  const auto of_group = [](int group) {
    return [group](ExchangeOptions& o) {
      o.wire = Wire::bf16;  // whose rows have no groups, other than the activations'
      o.quantisation.group = group;
    };
  };
  for (const int group : {0, 64, 256}) refused(of_group(group), fmt::format("activations in groups of {}", group));
  refused([](ExchangeOptions& o) { o.mega.block_rows = 12; }, "row blocks of 12 rows");
  refused([](ExchangeOptions& o) { o.mega.block_rows = 264; }, "row blocks of 264 rows");
  refused([](ExchangeOptions& o) { o.arrived = ArrivedLayout::masked; }, "way mega cannot hand over the masked layout");
  refused([](ExchangeOptions& o) { o.reduce = Reduce::home; }, "reduce = home is elastic's");
  refused([](ExchangeOptions& o) { o.cap = 200'000'000; }, "beyond row numbers of 32 bits");
  const auto many_tasks = [](ExchangeOptions& o) {
    o.cap = 20'000'000;
    o.hidden = 65536;
    o.mega.block_rows = 8;
  };
  refused(many_tasks, "mega: up to 30000003 row blocks of 258 tasks each");
}

}  // namespace
}  // namespace heddle
