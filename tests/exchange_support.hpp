// What the tests of the exchange share: cases, seeded tokens, experts replaced by simple functions of
// (row, expert), and what must come home, so that placement, routing, order and sums are checked apart
// from GEMMs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "exchange/host_exchange.hpp"
#include "formats/rows.hpp"
#include "heddle/exchange.hpp"

namespace heddle {

#ifdef HEDDLE_SANITIZED
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

/// What memory shows that nobody may read: a NaN with a payload of its own.
constexpr bf16 poison{0x7FC1};

constexpr Way all_ways[] = {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided};

struct Case {
  ExchangeOptions options;
  std::vector<int> tokens;  ///< per rank
  double none = 0.1;        ///< share of choices that are -1
  int hot = -1;             ///< a rank that gets every choice, -1: none
  std::uint64_t seed = 1;

  int ranks() const { return options.placement.ranks(); }
  bool tensor_parallel() const { return options.way == Way::gather && options.gather == GatherMode::tensor_parallel; }
  /// Whose tokens a rank brings: its own, or the batch that all ranks have.
  int owner(int rank) const { return tensor_parallel() ? 0 : rank; }
  int tokens_of(int rank) const { return tokens[static_cast<std::size_t>(owner(rank))]; }
  int most_tokens() const { return tensor_parallel() ? tokens[0] : *std::max_element(tokens.begin(), tokens.end()); }
};

/// Options that a test then varies.
inline ExchangeOptions options_for(Way way, int hidden, int experts, int ranks, int topk, int cap) {
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

/// Every way in every mode that has words of its own.
inline std::vector<ExchangeOptions> every_way(int hidden, int experts, int ranks, int topk, int cap) {
  std::vector<ExchangeOptions> all;
  for (const GatherMode mode : {GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled, GatherMode::tensor_parallel}) {
    all.push_back(options_for(Way::gather, hidden, experts, ranks, topk, cap));
    all.back().gather = mode;
  }
  all.push_back(options_for(Way::normal, hidden, experts, ranks, topk, cap));
  all.back().queue_rows = 3;  // smaller than most batches: rows wait for room
  all.back().chunk_rows = 2;
  all.push_back(options_for(Way::low_latency, hidden, experts, ranks, topk, cap));
  for (const Reduce reduce : {Reduce::rank, Reduce::home}) {
    all.push_back(options_for(Way::elastic, hidden, experts, ranks, topk, cap));
    all.back().reduce = reduce;
  }
  all.push_back(options_for(Way::one_sided, hidden, experts, ranks, topk, cap));
  return all;
}

/// A way and what distinguishes its modes, for messages.
inline std::string title(const ExchangeOptions& options) {
  static const char* const modes[] = {"padded", "uneven", "zero_filled", "tensor_parallel"};
  std::string text(name(options.way));
  if (options.way == Way::gather) text += std::string(" ") + modes[static_cast<std::size_t>(options.gather)];
  if (options.way == Way::elastic) text += options.reduce == Reduce::rank ? " reduce=rank" : " reduce=home";
  return text;
}

/// HEDDLE_SEED, or a fresh seed; printed, so that a failure can be repeated.
inline std::uint64_t test_seed() {
  std::random_device device;
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : device();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

inline std::mt19937_64 generator(std::uint64_t seed, int a, int b, int c = 0) {
  std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), static_cast<std::uint32_t>(a),
                         static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(c)};
  return std::mt19937_64(sequence);
}

struct RankData {
  std::vector<bf16> hidden;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<bf16> shared;  ///< what a shared expert would add
  std::vector<std::vector<std::byte>> extra;

  ExchangeInput input(int tokens) const {
    ExchangeInput in{tokens, hidden.data(), ids.data(), weights.data(), {}};
    for (const auto& payload : extra) in.extra.push_back(payload.data());
    return in;
  }
};

/// What a rank brings in a round; any rank can draw what any other brings.
inline RankData draw(const Case& c, int rank, int round) {
  std::mt19937_64 random = generator(c.seed, c.owner(rank), round);
  const auto tokens = static_cast<std::size_t>(c.tokens_of(rank));
  const int k = c.options.topk;
  RankData data;
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  data.hidden.resize(tokens * static_cast<std::size_t>(c.options.hidden));
  for (bf16& value : data.hidden) value = to_bf16(normal(random));
  std::vector<int> experts;
  for (int e = 0; e < c.options.placement.experts(); ++e) {
    if (c.hot < 0 || c.options.placement.rank_of(e) == c.hot) experts.push_back(e);
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (int j = 0; j < k; ++j) {
      const bool none = static_cast<std::size_t>(j) >= experts.size() || uniform(random) < c.none;
      data.ids.push_back(none ? -1 : experts[static_cast<std::size_t>(j)]);
      data.weights.push_back(static_cast<float>(uniform(random)) + 0.01f);
    }
  }
  for (std::size_t i = 0; i < data.hidden.size(); ++i) data.shared.push_back(to_bf16(normal(random)));
  for (const std::size_t bytes : c.options.extra_payloads) {
    data.extra.emplace_back(tokens * bytes);
    for (std::byte& value : data.extra.back()) value = static_cast<std::byte>(random());
  }
  return data;
}

/// The stand-in for an expert: scales a row by a power of two of the expert and adds its id.
inline void stand_in(const float* row, int expert, float weight, int hidden, bf16* out) {
  const float factor = std::ldexp(1.0f, expert % 5 - 2);
  for (int i = 0; i < hidden; ++i) out[i] = to_bf16((row[i] * factor + static_cast<float>(expert % 7)) * weight);
}

/// Rows of the routed layout that are padding by what the ranks bring, not by what the ids say.
inline bool is_padding(const Case& c, const Arrived& arrived, std::size_t row) {
  if (c.options.way != Way::gather) {
    const std::int32_t* ids = arrived.local_ids + row * static_cast<std::size_t>(c.options.topk);
    return std::all_of(ids, ids + c.options.topk, [](std::int32_t id) { return id < 0; });
  }
  if (c.options.gather != GatherMode::padded) return false;
  const auto block = static_cast<std::size_t>(c.most_tokens());
  return row % block >= static_cast<std::size_t>(c.tokens[row / block]);
}

/// Results as a runner leaves them; rows that a runner does not write are poisoned.
inline std::vector<bf16> run_experts(const Case& c, const Arrived& arrived, int rank) {
  const auto& options = c.options;
  const auto local = options.placement.experts_of(rank);
  const auto hidden = static_cast<std::size_t>(options.hidden);
  const RowFormat format = wire_format(options);
  std::vector<float> row(hidden);
  const auto widen = [&](std::size_t i) { widen_row(arrived.rows + i * arrived.row_stride, format, row.data()); };
  const bool at_activation = options.weight_at == WeightAt::activation;
  const auto k = static_cast<std::size_t>(options.topk);
  const auto room = static_cast<std::size_t>(arrived.room);
  std::vector<bf16> results(room * hidden * (arrived.slots_wanted ? k : 1), poison);
  if (arrived.layout != ArrivedLayout::routed) {
    for (std::size_t e = 0; e < local.size(); ++e) {
      for (int i = 0; i < arrived.counts[e]; ++i) {
        const auto r = static_cast<std::size_t>(arrived.begins[e] + i);
        widen(r);
        stand_in(row.data(), local[e], at_activation ? arrived.row_weights[r] : 1.0f, options.hidden, results.data() + r * hidden);
      }
    }
    return results;
  }
  std::vector<bf16> pair(hidden);
  for (std::size_t r = 0; r < room; ++r) {
    std::vector<float> sum(hidden, 0.0f);
    for (std::size_t j = 0; j < k; ++j) {
      const std::int32_t id = arrived.local_ids[r * k + j];
      if (id < 0) continue;
      widen(r);
      const float weight = arrived.weights[r * k + j];
      stand_in(row.data(), local[static_cast<std::size_t>(id)], at_activation ? weight : 1.0f, options.hidden, pair.data());
      if (arrived.slots_wanted)
        std::copy(pair.begin(), pair.end(), results.begin() + static_cast<std::ptrdiff_t>((r * k + j) * hidden));
      for (std::size_t i = 0; i < hidden; ++i) {
        sum[i] = at_activation ? sum[i] + to_float(pair[i]) : std::fma(weight, to_float(pair[i]), sum[i]);
      }
    }
    if (arrived.slots_wanted || is_padding(c, arrived, r)) continue;
    for (std::size_t i = 0; i < hidden; ++i) results[r * hidden + i] = to_bf16(sum[i]);
  }
  return results;
}

inline bool is_live(const std::vector<bool>& live, int rank) { return live.empty() || live[static_cast<std::size_t>(rank)]; }

/// What the round trip must give: the same stand-ins, sums and wires, with nobody travelling. Experts of
/// ranks that are not live contribute nothing; `shared` adds the rows of a shared expert.
inline std::vector<bf16> expected(const Case& c, const RankData& data, const std::vector<bool>& live = {}, bool shared = false) {
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
        if (id < 0 || !is_live(live, options.placement.rank_of(id))) continue;
        if (rank >= 0 && options.placement.rank_of(id) != rank) continue;
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
    for (std::size_t i = 0; i < hidden; ++i)
      out.push_back(to_bf16(shared ? sum[i] + to_float(data.shared[t * hidden + i]) : sum[i]));
  }
  return out;
}

inline int differences(const std::vector<bf16>& want, const bf16* have) {
  int different = 0;
  for (std::size_t i = 0; i < want.size(); ++i) different += have[i].bits != want[i].bits ? 1 : 0;
  return different;
}

}  // namespace heddle
