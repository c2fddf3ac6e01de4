// What must arrive on a rank, told from the ids of all ranks alone: which rows, where, in which order, with
// which routing; and how many rows and bytes must travel.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "exchange_support.hpp"

namespace heddle {

/// A row that arrives: whose token, and for a copy an expert which choice.
struct Landing {
  int source = 0;
  int token = 0;
  int choice = -1;
};

/// One round of a case as every rank can draw it.
class Round {
 public:
  Round(const Case& c, int round) : case_(c) {
    for (int rank = 0; rank < c.ranks(); ++rank) data_.push_back(draw(c, rank, round));
  }

  const Case& the_case() const { return case_; }
  const RankData& of(int rank) const { return data_[static_cast<std::size_t>(rank)]; }
  std::size_t pair(int token, int choice) const { return static_cast<std::size_t>(token * case_.options.topk + choice); }

  /// Tokens of `source` with a choice on `rank` (copies), and such choices (pairs).
  int copies(int source, int rank) const {
    int rows = 0;
    for (int token = 0; token < case_.tokens_of(source); ++token) rows += pairs_of(source, token, rank) > 0 ? 1 : 0;
    return rows;
  }
  int pairs(int source, int rank) const {
    int rows = 0;
    for (int token = 0; token < case_.tokens_of(source); ++token) rows += pairs_of(source, token, rank);
    return rows;
  }
  /// Tokens that arrive on a rank with one copy a rank, in (source, token) order; all of them for gather.
  std::vector<Landing> rows_on(int rank) const {
    std::vector<Landing> rows;
    for (int source = 0; source < (case_.tensor_parallel() ? 1 : case_.ranks()); ++source) {
      for (int token = 0; token < case_.tokens_of(source); ++token) {
        if (case_.options.way == Way::gather || pairs_of(source, token, rank) > 0) rows.push_back({source, token, -1});
      }
    }
    return rows;
  }
  /// Pairs of one expert, in (source, token) order.
  std::vector<Landing> rows_of_expert(int expert) const {
    std::vector<Landing> rows;
    for (int source = 0; source < (case_.tensor_parallel() ? 1 : case_.ranks()); ++source) {
      for (int token = 0; token < case_.tokens_of(source); ++token) {
        for (int choice = 0; choice < case_.options.topk; ++choice) {
          if (of(source).ids[pair(token, choice)] == expert) rows.push_back({source, token, choice});
        }
      }
    }
    return rows;
  }

 private:
  int pairs_of(int source, int token, int rank) const {
    int found = 0;
    for (int choice = 0; choice < case_.options.topk; ++choice) {
      const std::int32_t id = of(source).ids[pair(token, choice)];
      found += id >= 0 && case_.options.placement.rank_of(id) == rank ? 1 : 0;
    }
    return found;
  }

  Case case_;
  std::vector<RankData> data_;
};

/// Bytes of row `at` are those of the landing's token on the wire.
inline bool same_row(const Round& round, const Arrived& arrived, std::size_t at, const Landing& landing) {
  const RowFormat format = wire_format(round.the_case().options);
  std::vector<std::byte> want(format.row_bytes());
  const bf16* hidden =
      round.of(landing.source).hidden.data() + static_cast<std::size_t>(landing.token) * static_cast<std::size_t>(format.hidden);
  quantise_row(hidden, format, want.data());
  return std::memcmp(arrived.rows + at * arrived.row_stride, want.data(), want.size()) == 0;
}

/// Where the routed layout has the i-th arriving row; `earlier` are those of its source before it.
inline std::size_t routed_place(const Case& c, const Landing& landing, std::size_t i, std::size_t earlier) {
  const auto block = static_cast<std::size_t>(c.most_tokens());
  const auto source = static_cast<std::size_t>(landing.source);
  if (c.options.way == Way::one_sided) return source * block + earlier;
  if (c.options.way == Way::gather && c.options.gather == GatherMode::padded) return source * block + earlier;
  return i;
}

/// Rows, routing and payloads of the routed layout; every other row is marked as padding.
inline void check_routed(const Round& round, const Arrived& arrived, int rank) {
  const Case& c = round.the_case();
  const auto k = static_cast<std::size_t>(c.options.topk);
  std::vector<bool> padding(static_cast<std::size_t>(arrived.room), true);
  std::vector<std::size_t> earlier(static_cast<std::size_t>(c.ranks()), 0);
  const std::vector<Landing> rows = round.rows_on(rank);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Landing& row = rows[i];
    const std::size_t at = routed_place(c, row, i, earlier[static_cast<std::size_t>(row.source)]++);
    ASSERT_LT(at, padding.size());
    padding[at] = false;
    EXPECT_TRUE(same_row(round, arrived, at, row)) << "row " << at;
    for (std::size_t choice = 0; choice < k; ++choice) {
      const std::size_t pair = round.pair(row.token, static_cast<int>(choice));
      const std::int32_t id = round.of(row.source).ids[pair];
      const bool here = id >= 0 && c.options.placement.rank_of(id) == rank;
      EXPECT_EQ(arrived.local_ids[at * k + choice], here ? c.options.placement.local_index(id) : -1);
      EXPECT_EQ(arrived.weights[at * k + choice], round.of(row.source).weights[pair]);
    }
    ASSERT_EQ(arrived.extra.size(), c.options.extra_payloads.size());
    for (std::size_t p = 0; p < arrived.extra.size(); ++p) {
      const std::size_t bytes = c.options.extra_payloads[p];
      const std::byte* want = round.of(row.source).extra[p].data() + static_cast<std::size_t>(row.token) * bytes;
      EXPECT_EQ(std::memcmp(arrived.extra[p] + at * bytes, want, bytes), 0) << "payload " << p << " of row " << at;
    }
  }
  for (std::size_t at = 0; at < padding.size(); ++at) {
    for (std::size_t choice = 0; padding[at] && choice < k; ++choice)
      EXPECT_EQ(arrived.local_ids[at * k + choice], -1) << "padding row " << at;
  }
}

/// Rows laid out by expert: counts, places, order, weights.
inline void check_by_expert(const Round& round, const Arrived& arrived, int rank) {
  const Case& c = round.the_case();
  const auto experts = c.options.placement.experts_of(rank);
  int next = 0;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const std::vector<Landing> rows = round.rows_of_expert(experts[e]);
    ASSERT_EQ(arrived.counts[e], static_cast<int>(rows.size())) << "expert " << e;
    const bool masked = arrived.layout == ArrivedLayout::masked;
    EXPECT_EQ(arrived.begins[e], masked ? static_cast<int>(e) * arrived.block_rows : next);
    next += (arrived.counts[e] + 127) / 128 * 128;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(arrived.begins[e]) + i;
      ASSERT_LT(at, static_cast<std::size_t>(arrived.room));
      EXPECT_TRUE(same_row(round, arrived, at, rows[i])) << "row " << i << " of expert " << e;
      EXPECT_EQ(arrived.row_weights[at], round.of(rows[i].source).weights[round.pair(rows[i].token, rows[i].choice)]);
    }
  }
}

/// The numbers that describe what arrived.
inline void check_sizes(const Round& round, const Arrived& arrived, int rank) {
  const Case& c = round.the_case();
  const ExchangeOptions& options = c.options;
  const int all = c.ranks() * options.cap;
  const auto experts = static_cast<int>(options.placement.experts_of(rank).size());
  int pairs = 0;
  for (int source = 0; source < (c.tensor_parallel() ? 1 : c.ranks()); ++source) pairs += round.pairs(source, rank);
  const auto rows = static_cast<int>(round.rows_on(rank).size());
  EXPECT_EQ(arrived.wire, options.wire);
  EXPECT_EQ(arrived.layout, options.arrived);
  EXPECT_EQ(arrived.real, pairs);
  EXPECT_EQ(arrived.received, options.way == Way::low_latency ? pairs : rows);
  EXPECT_EQ(arrived.host_waited, options.way == Way::normal || (options.way == Way::elastic && options.cpu_sync));
  EXPECT_EQ(arrived.slots_wanted,
            options.way == Way::elastic && options.reduce == Reduce::home && options.arrived == ArrivedLayout::routed);
  const bool exact = options.way == Way::normal || (options.way == Way::elastic && options.cpu_sync);
  int room = exact ? rows : all;
  if (options.way == Way::one_sided || (options.way == Way::gather && options.gather == GatherMode::padded))
    room = c.ranks() * c.most_tokens();
  if (options.way == Way::gather && options.gather != GatherMode::padded) room = rows;
  if (options.arrived == ArrivedLayout::masked) {
    EXPECT_EQ(arrived.block_rows, all);
    room = experts * all;
  }
  if (options.arrived == ArrivedLayout::contiguous)
    room = (room * std::min(options.topk, experts) + experts * 127 + 127) / 128 * 128;
  EXPECT_EQ(arrived.room, room);
}

inline void check_arrived(const Round& round, const Arrived& arrived, int rank) {
  check_sizes(round, arrived, rank);
  if (arrived.layout == ArrivedLayout::routed) {
    check_routed(round, arrived, rank);
  } else {
    check_by_expert(round, arrived, rank);
  }
}

/// Rows between this rank and another (or itself) in one phase, by who moves them.
struct Moved {
  std::vector<std::int64_t> rows;  ///< a peer
  std::size_t bytes_a_row = 0;
};

inline ExchangeTraffic sum_of(const std::vector<Moved>& all, int rank) {
  ExchangeTraffic traffic;
  for (const Moved& moved : all) {
    for (std::size_t peer = 0; peer < moved.rows.size(); ++peer) {
      const auto rows = static_cast<std::uint64_t>(moved.rows[peer]);
      const bool local = static_cast<int>(peer) == rank;
      (local ? traffic.local_rows : traffic.remote_rows) += rows;
      (local ? traffic.local_bytes : traffic.remote_bytes) += rows * moved.bytes_a_row;
    }
  }
  return traffic;
}

inline std::vector<std::int64_t> for_each_rank(int ranks, const std::function<std::int64_t(int)>& count) {
  std::vector<std::int64_t> counts;
  for (int peer = 0; peer < ranks; ++peer) counts.push_back(count(peer));
  return counts;
}

/// Rows of `all` that rank number `rank` takes when they are dealt out one by one.
inline std::int64_t dealt(int all, int ranks, int rank) { return all / ranks + (rank < all % ranks ? 1 : 0); }

/// Dispatch: rows that this rank pushes (and, for an all-reduce, pulls and pushes).
inline Moved dispatched(const Round& round, int rank) {
  const Case& c = round.the_case();
  const std::size_t bytes = wire_format(c.options).reported_bytes();
  const auto count = [&](int peer) -> std::int64_t {
    if (c.options.way == Way::low_latency) return round.pairs(rank, peer);
    if (c.options.way != Way::gather) return round.copies(rank, peer);
    if (c.tensor_parallel()) return 0;
    if (c.options.gather != GatherMode::zero_filled) return c.tokens_of(rank);
    int all = 0;
    for (int r = 0; r < c.ranks(); ++r) all += c.tokens_of(r);
    return 2 * dealt(all, c.ranks(), rank);
  };
  return {for_each_rank(c.ranks(), count), bytes};
}

/// Combine: rows that this rank pushes home, or pulls.
inline Moved combined(const Round& round, int rank) {
  const Case& c = round.the_case();
  const bool a_row_a_choice = c.options.way == Way::low_latency || c.options.reduce == Reduce::home;
  const auto count = [&](int peer) -> std::int64_t {
    if (c.options.way == Way::gather) {
      if (!c.tensor_parallel()) return c.tokens_of(rank);
      return c.tokens_of(0) * (rank + 1) / c.ranks() - c.tokens_of(0) * rank / c.ranks();
    }
    if (c.options.way == Way::one_sided) return round.copies(rank, peer);  // pulled by their home
    return a_row_a_choice ? round.pairs(peer, rank) : round.copies(peer, rank);
  };
  return {for_each_rank(c.ranks(), count), returned_format(c.options).reported_bytes()};
}

inline void expect_traffic(const ExchangeTraffic& have, const std::vector<Moved>& moved, int rank) {
  const ExchangeTraffic want = sum_of(moved, rank);
  EXPECT_EQ(have.remote_rows, want.remote_rows);
  EXPECT_EQ(have.local_rows, want.local_rows);
  EXPECT_EQ(have.remote_bytes, want.remote_bytes);
  EXPECT_EQ(have.local_bytes, want.local_bytes);
}

}  // namespace heddle
