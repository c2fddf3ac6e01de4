// elastic over virtual nodes, in both modes: what comes home is what the same ranks on one node get, bit for bit, over random
// shapes; rows at each level are those that the choices ask for; a node that is gone, and a message that is wrong, are named.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "group/era_link.hpp"
#include "group/memory_link.hpp"
#include "heddle/node_plan.hpp"
#include "heddle/nodes.hpp"
#include "layer/row_counts.hpp"
#include "random_nodes.hpp"

namespace heddle {
namespace {

/// Runs on every rank; what each ended with, "" for well.
std::vector<std::string> run_nodes(int nodes, int inside, const GroupOptions& options, const std::function<void(Group&)>& body) {
  auto group = create_virtual_nodes(nodes, inside, options);
  std::vector<std::string> errors(group.size());
  std::vector<std::jthread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*group[rank]);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

struct Levels {
  std::uint64_t own = 0, inside = 0, between = 0;
  bool operator==(const Levels&) const = default;
};

/// What the choices of all ranks ask for in one direction, over all ranks.
Levels rows_out(const Case& c, int nodes, int round) {
  const int inside = c.ranks() / nodes;
  Levels rows;
  for (int home = 0; home < c.ranks(); ++home) {
    const RankData data = draw(c, home, round);
    for (int token = 0; token < c.tokens_of(home); ++token) {
      std::set<int> ranks, elsewhere;
      for (int j = 0; j < c.options.topk; ++j) {
        const std::int32_t id = data.ids[static_cast<std::size_t>(token * c.options.topk + j)];
        if (id >= 0) ranks.insert(c.options.placement.rank_of(id));
      }
      for (const int d : ranks) {
        const bool far = d / inside != home / inside;
        const bool hybrid = c.options.mode == NodeMode::hybrid;
        if (far) elsewhere.insert(hybrid ? d / inside : d);
        if (!far || hybrid) ++(d % inside == home % inside ? rows.own : rows.inside);
      }
      rows.between += elsewhere.size();
    }
  }
  return rows;
}

/// Back: a row a rank by way of the same places, or a row a choice straight home.
Levels rows_back(const Case& c, int nodes, int round) {
  const int inside = c.ranks() / nodes;
  const bool by_choice = c.options.reduce == Reduce::home;
  Levels rows;
  for (int home = 0; home < c.ranks(); ++home) {
    const RankData data = draw(c, home, round);
    for (int token = 0; token < c.tokens_of(home); ++token) {
      std::multiset<int> ranks;
      for (int j = 0; j < c.options.topk; ++j) {
        const std::int32_t id = data.ids[static_cast<std::size_t>(token * c.options.topk + j)];
        const int d = id >= 0 ? c.options.placement.rank_of(id) : -1;
        if (d >= 0 && (by_choice || ranks.count(d) == 0)) ranks.insert(d);
      }
      for (const int d : ranks) {
        const bool far = d / inside != home / inside;
        rows.between += far ? 1 : 0;
        if (!far || (c.options.mode == NodeMode::hybrid && !by_choice)) ++(d % inside == home % inside ? rows.own : rows.inside);
      }
    }
  }
  return rows;
}

Levels operator+(const Levels& a, const Levels& b) { return {a.own + b.own, a.inside + b.inside, a.between + b.between}; }

Levels levels_of(const std::vector<ExchangeTraffic>& traffic) {
  Levels all;
  for (const ExchangeTraffic& one : traffic)
    all = all + Levels{one.local_rows, one.remote_rows - one.between_rows, one.between_rows};
  return all;
}

/// What ranks count is what their ids tell, rank by rank, as it is reported where counts stay on a GPU.
void expect_counted_traffic(const Case& c, int nodes, int rounds, const std::vector<ExchangeTraffic>& traffic) {
  std::vector<ExchangeTraffic> want(traffic.size());
  for (int round = 0; round < rounds; ++round) {
    RowCounts counts(c.options, nodes);
    for (int rank = 0; rank < c.ranks(); ++rank) counts.count(rank, draw(c, rank, round).input(c.tokens_of(rank)));
    for (int rank = 0; rank < c.ranks(); ++rank) {
      ExchangeTraffic& sum = want[static_cast<std::size_t>(rank)];
      for (const ExchangeTraffic& half : {counts.dispatched(rank, {}), counts.combined(rank, {}, false)}) {
        sum.local_rows += half.local_rows;
        sum.remote_rows += half.remote_rows;
        sum.between_rows += half.between_rows;
        sum.local_bytes += half.local_bytes;
        sum.remote_bytes += half.remote_bytes;
        sum.between_bytes += half.between_bytes;
      }
    }
  }
  for (std::size_t rank = 0; rank < want.size(); ++rank) {
    EXPECT_EQ(traffic[rank].local_rows, want[rank].local_rows) << "rank " << rank;
    EXPECT_EQ(traffic[rank].remote_rows, want[rank].remote_rows) << "rank " << rank;
    EXPECT_EQ(traffic[rank].between_rows, want[rank].between_rows) << "rank " << rank;
    EXPECT_EQ(traffic[rank].local_bytes, want[rank].local_bytes) << "rank " << rank;
    EXPECT_EQ(traffic[rank].remote_bytes, want[rank].remote_bytes) << "rank " << rank;
    EXPECT_EQ(traffic[rank].between_bytes, want[rank].between_bytes) << "rank " << rank;
  }
}

void check(const Case& c, int nodes, int rounds) {
  SCOPED_TRACE(testing::Message() << describe(c.options) << "ranks=" << c.ranks() << " nodes=" << nodes << " seed=" << c.seed);
  std::vector<ExchangeTraffic> traffic(static_cast<std::size_t>(c.ranks()));
  const auto errors = run_nodes(nodes, c.ranks() / nodes, {}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    poison_heap(workspace, memory);
    const auto exchange = create_exchange(workspace, c.options, memory);
    for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
      TripOptions trip;
      trip.shared = round % 2 == 1 ? Shared::rows : Shared::none;
      round_trip(*exchange, c, group.rank(), round, trip);
    }
    traffic[static_cast<std::size_t>(group.rank())] = exchange->take_traffic();
    workspace.close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  if (testing::Test::HasFailure()) return;
  if (c.options.reduce == Reduce::rank) expect_counted_traffic(c, nodes, rounds, traffic);
  Levels want;
  for (int round = 0; round < rounds; ++round) want = want + rows_out(c, nodes, round) + rows_back(c, nodes, round);
  const Levels have = levels_of(traffic);
  EXPECT_EQ(want.own, have.own);
  EXPECT_EQ(want.inside, have.inside);
  EXPECT_EQ(want.between, have.between);
}

TEST(Nodes, RandomShapesComeHomeAsOnOneNode) {
  std::mt19937_64 random(test_seed());
  Picks pick(random);
  for (int i = 0; i < (sanitized ? 30 : 100); ++i) {
    auto [nodes, c] = random_nodes_case(random, {{1, 2, 3, 4}, {1, 3, 7, 8, 16, 40}, {1, 5, 16, 33}, {64, 128, 192, 320}});
    c.options.reduce = pick(Reduce::rank, Reduce::home);
    c.options.workers = pick(1, 1, 2, 3);
    c.options.cpu_sync = pick(0, 1) == 1;
    check(c, nodes, 3);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Nodes, BytesAreThoseOfThePlan) {
  const std::uint64_t seed = test_seed();
  for (const NodeMode mode : {NodeMode::direct, NodeMode::hybrid}) {
    const int nodes = 4, inside = 2;
    PlanRequest request;
    request.shape = {64, 64, 32, 6, {}};
    request.ranks = nodes * inside;
    request.nodes = nodes;
    request.tokens = request.cap = 300;
    request.wire = Wire::fp8;
    request.machine = find_machine("h200");
    Case c;
    c.options = options_for(Way::elastic, 64, 32, request.ranks, 6, request.cap);
    c.options.mode = mode;
    c.options.wire = Wire::fp8;
    c.tokens.assign(static_cast<std::size_t>(request.ranks), request.tokens);
    c.none = 0;
    c.seed = seed;
    std::vector<ExchangeTraffic> traffic(c.tokens.size());
    run_nodes(nodes, inside, {}, [&](Group& group) {
      const ExchangeMemory memory = exchange_memory(c.options);
      Workspace workspace(group, memory.heap_bytes(c.ranks()), "");
      const auto exchange = create_exchange(workspace, c.options, memory);
      round_trip(*exchange, c, group.rank(), 0);
      traffic[static_cast<std::size_t>(group.rank())] = exchange->take_traffic();
    });
    double inside_bytes = 0, between_bytes = 0;
    for (const ExchangeTraffic& one : traffic) {
      between_bytes += static_cast<double>(one.between_bytes) / request.ranks;
      inside_bytes += static_cast<double>(one.remote_bytes - one.between_bytes) / request.ranks;
    }
    const NodeTraffic out = node_dispatch_traffic(Way::elastic, mode, request);
    const NodeTraffic back = node_combine_traffic(Way::elastic, mode, NodeSums::rank, request);
    // 2,400 tokens: the mean number of copies deviates by about a percent.
    EXPECT_NEAR(1, between_bytes / (out.between.bytes + back.between.bytes), 0.05);
    EXPECT_NEAR(1, inside_bytes / (out.inside.bytes + back.inside.bytes), 0.05);
  }
}

TEST(Nodes, OtherWaysAreRefused) {
  for (const Way way : {Way::gather, Way::normal, Way::low_latency, Way::one_sided}) {
    const ExchangeOptions options = options_for(way, 64, 8, 4, 2, 4);
    const auto errors = run_nodes(2, 2, {}, [&](Group& group) {
      const ExchangeMemory memory = exchange_memory(options);
      Workspace workspace(group, memory.heap_bytes(4), "");
      create_exchange(workspace, options, memory);
    });
    for (const std::string& error : errors) EXPECT_NE(error.find("knows one node, the group has 2"), std::string::npos) << error;
  }
  ExchangeOptions hybrid = options_for(Way::normal, 64, 8, 4, 2, 4);
  hybrid.mode = NodeMode::hybrid;
  EXPECT_THROW(check_options(hybrid), InputError);
  EXPECT_THROW(create_virtual_nodes(0, 2), InputError);
}

TEST(Nodes, DifferentConfigurationsAreNamedAcrossNodes) {
  const auto errors = run_nodes(2, 2, {}, [](Group& group) { Workspace(group, 4096, group.rank() == 3 ? "cap=2\n" : "cap=1\n"); });
  for (const std::string& error : errors) EXPECT_NE(error.find("rank 3 was created with cap=2"), std::string::npos) << error;
}

TEST(Nodes, ARefusalOnOneNodeEndsTheOthers) {
  Case c;
  c.options = options_for(Way::elastic, 64, 8, 4, 2, 4);
  c.options.mode = NodeMode::hybrid;
  c.tokens = {4, 4, 4, 4};
  const auto errors = run_nodes(2, 2, {std::chrono::seconds(20)}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(4), "");
    const auto exchange = create_exchange(workspace, c.options, memory);
    RankData data = draw(c, group.rank(), 0);
    if (group.rank() == 2) data.ids[1] = 8;
    exchange->dispatch(data.input(4), {4, Phase::decode});
  });
  EXPECT_NE(errors[2].find("8"), std::string::npos) << errors[2];
  for (const std::size_t rank : {0u, 1u, 3u})
    EXPECT_NE(errors[rank].find("rank 2 gave up in input check"), std::string::npos) << errors[rank];
}

/// A node that falls silent before a half of a call; where that is, and how the other nodes call it.
struct Silence {
  int half;
  const char* phase;
};

TEST(Nodes, ANodeThatIsGoneIsNamed) {
  for (const NodeMode mode : {NodeMode::direct, NodeMode::hybrid}) {
    for (const Silence& silence : {Silence{0, "elastic dispatch"}, Silence{2, "elastic combine"}}) {
      Case c;
      c.options = options_for(Way::elastic, 64, 8, 4, 3, 4);
      c.options.mode = mode;
      c.tokens = {4, 3, 4, 4};
      const auto errors = run_nodes(2, 2, {std::chrono::milliseconds(400)}, [&](Group& group) {
        const ExchangeMemory memory = exchange_memory(c.options);
        Workspace workspace(group, memory.heap_bytes(4), "");
        const auto exchange = create_exchange(workspace, c.options, memory);
        round_trip(*exchange, c, group.rank(), 0);
        const RankData data = draw(c, group.rank(), 1);
        const bool gone = group.rank() >= 2;
        if (gone && silence.half == 0) return;
        const Arrived arrived = exchange->dispatch(data.input(c.tokens_of(group.rank())), {4, Phase::decode});
        if (gone) return;
        std::vector<bf16> out(data.hidden.size() + 1);
        exchange->combine(run_experts(c, arrived, group.rank()).data(), {out.data()});
        ADD_FAILURE() << "rank " << group.rank() << " came home without node 1";
      });
      for (const std::size_t rank : {0u, 1u}) {
        EXPECT_NE(errors[rank].find(silence.phase), std::string::npos) << errors[rank];
        EXPECT_NE(errors[rank].find("message of node 1 from rank "), std::string::npos) << errors[rank];
      }
      EXPECT_EQ(errors[2], "");
    }
  }
}

TEST(Nodes, ACutLinkEndsOnBothSides) {
  Case c;
  c.options = options_for(Way::elastic, 64, 8, 4, 3, 4);
  c.options.mode = NodeMode::hybrid;
  c.tokens = {4, 3, 0, 4};
  const auto errors = run_nodes(2, 2, {std::chrono::milliseconds(400)}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(4), "");
    const auto exchange = create_exchange(workspace, c.options, memory);
    round_trip(*exchange, c, group.rank(), 0);
    group.barrier("before the cut");
    dynamic_cast<MemoryLink&>(dynamic_cast<EraLink&>(*group.link()).inner()).queues().cut(2, 2);
    round_trip(*exchange, c, group.rank(), 1);
  });
  for (const std::size_t rank : {0u, 1u}) EXPECT_NE(errors[rank].find("message of node 1"), std::string::npos) << errors[rank];
  for (const std::size_t rank : {2u, 3u}) EXPECT_NE(errors[rank].find("message of node 0"), std::string::npos) << errors[rank];
}

TEST(Nodes, AMessageOfAnotherCallIsRefused) {
  Case c;
  c.options = options_for(Way::elastic, 64, 8, 2, 3, 4);
  c.tokens = {4, 4};
  const auto errors = run_nodes(2, 1, {std::chrono::milliseconds(400)}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(2), "");
    const auto exchange = create_exchange(workspace, c.options, memory);
    if (group.rank() == 1) group.link()->post(0, node_rows, NodeMessage(16));
    round_trip(*exchange, c, group.rank(), 0);
  });
  EXPECT_NE(errors[0].find("message of node 1 from rank 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 0 gave up"), std::string::npos) << errors[1];
}

}  // namespace
}  // namespace heddle
