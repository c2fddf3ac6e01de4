// Every way against what must arrive and what must come home, with experts replaced by simple
// functions of (row, expert), so that placement, routing, order and sums are checked apart from GEMMs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "exchange/host_exchange.hpp"
#include "formats/rows.hpp"
#include "heddle/exchange.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

struct Case {
  ExchangeOptions options;
  std::vector<int> tokens;  ///< per rank
  double none = 0.1;        ///< share of choices that are -1
  int hot = -1;             ///< a rank that gets every choice, -1: none
  std::uint64_t seed = 1;
};

struct RankData {
  std::vector<bf16> hidden;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

RankData draw(const Case& c, int rank, int round) {
  std::mt19937_64 random(c.seed * 1000 + static_cast<std::uint64_t>(rank) * 10 + static_cast<std::uint64_t>(round));
  const int tokens = c.tokens[static_cast<std::size_t>(rank)];
  const int k = c.options.topk;
  RankData data;
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  data.hidden.resize(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(c.options.hidden));
  for (bf16& value : data.hidden) value = to_bf16(normal(random));
  std::vector<int> experts;
  for (int e = 0; e < c.options.placement.experts(); ++e) {
    if (c.hot < 0 || c.options.placement.rank_of(e) == c.hot) experts.push_back(e);
  }
  for (int t = 0; t < tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (int j = 0; j < k; ++j) {
      const bool none = static_cast<std::size_t>(j) >= experts.size() || uniform(random) < c.none;
      data.ids.push_back(none ? -1 : experts[static_cast<std::size_t>(j)]);
      data.weights.push_back(static_cast<float>(uniform(random)) + 0.01f);
    }
  }
  return data;
}

/// The stand-in for an expert: scales a row by a power of two of the expert and adds its id.
void stand_in(const float* row, int expert, float weight, int hidden, bf16* out) {
  const float factor = std::ldexp(1.0f, expert % 5 - 2);
  for (int i = 0; i < hidden; ++i) out[i] = to_bf16((row[i] * factor + static_cast<float>(expert % 7)) * weight);
}

std::vector<bf16> run_experts(const Case& c, const Arrived& arrived, int rank) {
  const auto& options = c.options;
  const auto local = options.placement.experts_of(rank);
  const auto hidden = static_cast<std::size_t>(options.hidden);
  const RowFormat format = wire_format(options);
  std::vector<float> row(hidden);
  const auto widen = [&](std::size_t i) { widen_row(arrived.rows + i * arrived.row_stride, format, row.data()); };
  const bool at_activation = options.weight_at == WeightAt::activation;
  const auto k = static_cast<std::size_t>(options.topk);
  if (arrived.layout != ArrivedLayout::routed) {
    std::vector<bf16> results(static_cast<std::size_t>(arrived.room) * hidden);  // padding is left poisoned by zeros: never read
    for (std::size_t e = 0; e < local.size(); ++e) {
      for (int i = 0; i < arrived.counts[e]; ++i) {
        const auto r = static_cast<std::size_t>(arrived.begins[e] + i);
        widen(r);
        stand_in(row.data(), local[e], at_activation ? arrived.row_weights[r] : 1.0f, options.hidden, results.data() + r * hidden);
      }
    }
    return results;
  }
  std::vector<bf16> results(static_cast<std::size_t>(arrived.room) * hidden * (arrived.slots_wanted ? k : 1));
  std::vector<bf16> pair(hidden);
  for (std::size_t r = 0; r < static_cast<std::size_t>(arrived.room); ++r) {
    std::vector<float> sum(hidden, 0.0f);
    for (std::size_t j = 0; j < k; ++j) {
      const std::int32_t id = arrived.local_ids[r * k + j];
      if (id < 0) continue;
      widen(r);
      const float weight = arrived.weights[r * k + j];
      stand_in(row.data(), local[static_cast<std::size_t>(id)], at_activation ? weight : 1.0f, options.hidden, pair.data());
      if (arrived.slots_wanted) std::copy(pair.begin(), pair.end(), results.begin() + static_cast<std::ptrdiff_t>((r * k + j) * hidden));
      for (std::size_t i = 0; i < hidden; ++i) {
        sum[i] = at_activation ? sum[i] + to_float(pair[i]) : std::fma(weight, to_float(pair[i]), sum[i]);
      }
    }
    if (arrived.slots_wanted) continue;
    for (std::size_t i = 0; i < hidden; ++i) results[r * hidden + i] = to_bf16(sum[i]);
  }
  return results;
}

/// What the round trip must give: the same stand-ins, sums and wires, with nobody travelling.
std::vector<bf16> expected(const Case& c, const RankData& data) {
  const auto& options = c.options;
  const auto hidden = static_cast<std::size_t>(options.hidden);
  const auto k = static_cast<std::size_t>(options.topk);
  const bool slots = options.way == Way::low_latency || options.reduce == Reduce::home;
  const bool at_activation = options.weight_at == WeightAt::activation;
  const RowFormat wire = wire_format(options);
  const RowFormat back = returned_format(options);
  std::vector<std::byte> bytes(std::max(wire.row_bytes(), back.row_bytes()));
  std::vector<float> row(hidden), widened(hidden);
  std::vector<bf16> pair(hidden), out;
  const auto travel = [&](const std::vector<bf16>& in) {
    quantise_row(in.data(), back, bytes.data());
    widen_row(bytes.data(), back, widened.data());
  };
  for (std::size_t t = 0; t * k < data.ids.size(); ++t) {
    quantise_row(data.hidden.data() + t * hidden, wire, bytes.data());
    widen_row(bytes.data(), wire, row.data());
    std::vector<float> sum(hidden, 0.0f);
    const auto add_pairs = [&](int rank, std::vector<float>& to, bool travels) {
      bool any = false;
      for (std::size_t j = 0; j < k; ++j) {
        const std::int32_t id = data.ids[t * k + j];
        if (id < 0 || (rank >= 0 && options.placement.rank_of(id) != rank)) continue;
        any = true;
        const float weight = data.weights[t * k + j];
        stand_in(row.data(), id, at_activation ? weight : 1.0f, options.hidden, pair.data());
        if (travels) travel(pair);
        for (std::size_t i = 0; i < hidden; ++i) {
          const float y = travels ? widened[i] : to_float(pair[i]);
          to[i] = at_activation ? to[i] + y : std::fma(weight, y, to[i]);
        }
      }
      return any;
    };
    if (slots) {
      add_pairs(-1, sum, true);
    } else {
      for (int rank = 0; rank < options.placement.ranks(); ++rank) {
        std::vector<float> part(hidden, 0.0f);
        if (!add_pairs(rank, part, false)) continue;
        for (std::size_t i = 0; i < hidden; ++i) pair[i] = to_bf16(part[i]);
        travel(pair);
        for (std::size_t i = 0; i < hidden; ++i) sum[i] += widened[i];
      }
    }
    for (std::size_t i = 0; i < hidden; ++i) out.push_back(to_bf16(sum[i]));
  }
  return out;
}

void check(const Case& c, int rounds = 2) {
  const auto& options = c.options;
  const int ranks = options.placement.ranks();
  const bool tensor_parallel = options.way == Way::gather && options.gather == GatherMode::tensor_parallel;
  SCOPED_TRACE(testing::Message() << describe(options) << "ranks=" << ranks << " seed=" << c.seed);
  run_ranks(ranks, {}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(options);
    Workspace workspace(group, memory.heap_bytes(ranks), describe(options));
    const auto exchange = create_exchange(workspace, options, memory);
    Case mine = c;
    if (tensor_parallel) mine.tokens.assign(c.tokens.size(), c.tokens[0]);
    for (int round = 0; round < rounds; ++round) {
      const RankData data = draw(mine, tensor_parallel ? 0 : group.rank(), round);
      const int tokens = mine.tokens[static_cast<std::size_t>(tensor_parallel ? 0 : group.rank())];
      const int most = *std::max_element(mine.tokens.begin(), mine.tokens.end());
      const Arrived arrived = exchange->dispatch({tokens, data.hidden.data(), data.ids.data(), data.weights.data(), {}}, {most, Phase::decode});
      ASSERT_EQ(arrived.layout, options.arrived);
      const std::vector<bf16> results = run_experts(c, arrived, group.rank());
      const std::vector<bf16> want = expected(c, data);
      std::vector<bf16> out(want.size() + 1, bf16{0x7FC1});  // poisoned
      CombineOutput output;
      (tensor_parallel ? output.all_out : output.out) = out.data();
      output.all_tokens = tokens;
      exchange->combine(results.data(), output);
      int different = 0;
      for (std::size_t i = 0; i < want.size(); ++i) different += out[i].bits != want[i].bits ? 1 : 0;
      ASSERT_EQ(different, 0) << "rank " << group.rank() << " round " << round;
      ASSERT_EQ(out.back().bits, 0x7FC1);
    }
    workspace.close();
  });
}

ExchangeOptions options_for(Way way, int hidden, int experts, int ranks, int topk, int cap) {
  ExchangeOptions options;
  options.way = way;
  options.hidden = hidden;
  options.topk = topk;
  options.cap = cap;
  options.placement = Placement::contiguous(experts, ranks);
  options.arrived = default_layout(way);
  options.wire = Wire::bf16;
  return options;
}

constexpr Way all_ways[] = {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided};

TEST(Ways, RandomShapes) {
  std::random_device device;
  const std::uint64_t base = std::getenv("HEDDLE_SEED") != nullptr ? std::stoull(std::getenv("HEDDLE_SEED")) : device();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(base));
  std::mt19937_64 random(base);
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  for (int i = 0; i < 120; ++i) {
    const Way way = all_ways[i % 5];
    const int ranks = pick(1, 2, 3, 5, 8);
    const int experts = pick(1, 3, 7, 8, 16, 40);
    const int cap = pick(1, 5, 16, 33);
    Case c;
    c.options = options_for(way, pick(64, 128, 192, 320), experts, ranks, static_cast<int>(1 + random() % static_cast<std::uint64_t>(std::min(experts, 16))), cap);
    if (pick(0, 1) == 1) {
      std::vector<int> map;
      for (int e = 0; e < experts; ++e) map.push_back(static_cast<int>(random() % static_cast<std::uint64_t>(ranks)));
      c.options.placement = Placement::from_map(map, ranks);
    }
    c.options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.combine_wire = pick(Wire::bf16, Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.quantisation = {pick(128, 32), pick(ScaleFormat::ue8m0, ScaleFormat::f32)};
    c.options.weight_at = pick(WeightAt::activation, WeightAt::combine);
    c.options.workers = pick(1, 1, 2, 3);
    if (way == Way::elastic) {
      c.options.reduce = pick(Reduce::rank, Reduce::home);
      c.options.cpu_sync = pick(0, 1) == 1;
    }
    if (way == Way::gather) c.options.gather = pick(GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled, GatherMode::tensor_parallel);
    if (way == Way::normal || way == Way::elastic) c.options.arrived = pick(ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed);
    c.options.queue_rows = pick(1, 4, 64);
    c.options.chunk_rows = std::min(c.options.queue_rows, pick(1, 3));
    c.none = pick(0.0, 0.1, 0.6);
    c.hot = pick(0, 0, 0, 1) == 1 ? static_cast<int>(random() % static_cast<std::uint64_t>(ranks)) : -1;
    for (int r = 0; r < ranks; ++r) c.tokens.push_back(pick(0, 1) == 1 ? cap : static_cast<int>(random() % static_cast<std::uint64_t>(cap + 1)));
    c.seed = random() % 100000;
    check(c, 3);
    if (testing::Test::HasFatalFailure() || testing::Test::HasFailure()) return;
  }
}

TEST(Ways, ManyRanks) {
  for (const int ranks : {64, 72}) {
    for (const Way way : all_ways) {
      Case c;
      c.options = options_for(way, 64, 72, ranks, 6, 3);
      c.options.queue_rows = 2;
      c.options.chunk_rows = 2;
      for (int r = 0; r < ranks; ++r) c.tokens.push_back(r % 4);
      c.seed = static_cast<std::uint64_t>(ranks);
      check(c);
    }
  }
}

TEST(Ways, EveryTokenToOneRankAndNobodyHasTokens) {
  for (const Way way : all_ways) {
    Case c;
    c.options = options_for(way, 128, 12, 4, 3, 9);
    c.tokens = {9, 9, 0, 9};
    c.hot = 2;
    check(c);
    c.tokens = {0, 0, 0, 0};
    check(c);
  }
}

}  // namespace
}  // namespace heddle
