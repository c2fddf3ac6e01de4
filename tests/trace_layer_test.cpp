// Traces of calls on the host engine: spans nest, every task is there once, the table adds up to the spans, and recording changes
// no bit. Run under the thread sanitizer, too.
#include <gmock/gmock.h>

#include <map>
#include <set>
#include <tuple>

#include "layer_support.hpp"
#include "mega/schedule.hpp"
#include "signal/host_worker.hpp"
#include "trace/recorder.hpp"
#include "trace/segments.hpp"
#include "trace/totals.hpp"

namespace heddle::layer_test {
namespace {

using trace::Kind;
using trace::Lane;
using trace::Product;
using trace::Role;
using trace::Span;
using trace::Trace;

constexpr int block_rows = 8;

Case layer_of(int ranks, int workers, Way way = Way::mega) {
  Case c;
  c.layer.shape = {320, 192, 2 * ranks + 1, 3, std::nullopt};  // GEMM 1: 128 and 64 activations; GEMM 2: 256 and 64 columns
  c.layer.kind = WeightKind::mxfp4;
  c.layer.shared_kind = WeightKind::fp8_block;
  c.layer.shared_intermediate = 192;
  c.layer.seed = 3;
  c.placement = Placement::contiguous(c.layer.shape.experts, ranks);
  c.options.way = way;
  c.options.cap = 20;
  c.options.block_rows = block_rows;
  c.options.workers = workers;
  for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(20 - 2 * rank);
  return c;
}

struct Traced {
  std::vector<bf16> outputs;
  Trace lanes;
};

/// The second call of a layer on all ranks, recorded or not.
Traced run_traced(const LayerSource& source, const Case& c, const Tokens& tokens, bool recorded) {
  Traced traced;
  trace::Recorder recorder;
  std::vector<std::vector<bf16>> outs(static_cast<std::size_t>(c.ranks()));
  run_ranks(c.ranks(), {}, [&](Group& group) {
    LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    const ExchangeOptions exchange = exchange_options(weights, c.options);
    const ExchangeMemory memory = exchange_memory(exchange);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(exchange));
    MoeLayer layer(workspace, memory, std::move(weights), c.options);
    call(c, layer, tokens, group.rank());
    std::optional<trace::Attached> lane;
    if (recorded) lane.emplace(recorder, trace::LaneName{group.rank(), Role::rank});
    outs[static_cast<std::size_t>(group.rank())] = call(c, layer, tokens, group.rank());
    lane.reset();
    workspace.close();
  });
  for (const auto& out : outs) traced.outputs.insert(traced.outputs.end(), out.begin(), out.end());
  traced.lanes = recorder.take();
  return traced;
}

Traced run_traced(const Case& c, bool recorded = true) {
  SyntheticLayer layer(c.layer);
  return run_traced(source_of(layer, c), c, draw_tokens(c, 1), recorded);
}

/// Row blocks of a rank's experts.
int blocks_of(const Case& c, int rank) {
  std::map<int, int> rows;
  for (const std::int32_t id : draw_tokens(c, 1).routing.ids) {
    if (id >= 0 && c.placement.rank_of(id) == rank) ++rows[id];
  }
  int blocks = 0;
  for (const auto& [expert, count] : rows) blocks += parts_of(count, block_rows);
  return blocks;
}

void expect_whole(const Trace& lanes) {
  for (const Lane& lane : lanes) {
    EXPECT_LE(lane.begin, lane.end);
    EXPECT_EQ(lane.lost, 0);
    for (const Span& span : lane.spans) {
      EXPECT_LE(span.begin, span.end);
      EXPECT_GE(span.begin, lane.begin);
      EXPECT_LE(span.end, lane.end);
    }
    std::int64_t at = lane.begin;  // segments: one after the other, and all of what is covered
    std::int64_t covered = 0;
    for (const trace::Segment& segment : trace::segments_of(lane)) {
      EXPECT_GE(segment.begin, at);
      at = segment.end;
      covered += segment.end - segment.begin;
    }
    std::int64_t own = 0;
    for (const std::int64_t time : trace::own_times(lane)) {  // throws where spans overlap in part
      EXPECT_GE(time, 0);
      own += time;
    }
    EXPECT_EQ(covered, own);
  }
}

using Task = std::tuple<Product, int, int>;  // product, block, part

/// How often each task of a rank has a span of this kind.
std::map<Task, int> tasks_of(const Trace& lanes, int rank, Kind kind) {
  std::map<Task, int> tasks;
  for (const Lane& lane : lanes) {
    if (lane.name.rank != rank || lane.name.role != Role::tasks) continue;
    for (const Span& span : lane.spans) {
      if (span.kind == kind) ++tasks[{span.task.product, span.task.block, span.task.part}];
    }
  }
  return tasks;
}

void expect_each_task_once(const Case& c, const Trace& lanes, int rank) {
  const int steps = parts_of(c.layer.shape.intermediate, step_columns);
  const int shared_steps = parts_of(c.layer.shared_intermediate, step_columns);
  const int columns = parts_of(c.layer.shape.hidden, task_columns);
  const int shared_blocks = parts_of(c.tokens[static_cast<std::size_t>(rank)], block_rows);
  std::map<Task, int> wanted;
  const auto add = [&](Product product, int blocks, int parts) {
    for (int task = 0; task < blocks * parts; ++task) wanted[{product, task / parts, task % parts}] = 1;
  };
  add(Product::gemm1, blocks_of(c, rank), steps);
  add(Product::gemm2, blocks_of(c, rank), columns);
  add(Product::shared_gemm1, shared_blocks, shared_steps);
  add(Product::shared_gemm2, shared_blocks, columns);
  EXPECT_EQ(tasks_of(lanes, rank, Kind::products), wanted) << "rank " << rank;
  EXPECT_EQ(tasks_of(lanes, rank, Kind::epilogue), wanted) << "rank " << rank;
  std::erase_if(wanted, [](const auto& task) { return std::get<0>(task.first) == Product::shared_gemm1; });  // reads the input
  EXPECT_EQ(tasks_of(lanes, rank, Kind::rows), wanted) << "rank " << rank;
}

class TraceOnRanks : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(TraceOnRanks, FusedLayerHasEveryTaskOnceInSpansThatNest) {
  const auto [ranks, workers] = GetParam();
  const Case c = layer_of(ranks, workers);
  const Traced traced = run_traced(c);
  expect_whole(traced.lanes);
  std::map<std::pair<int, Role>, int> lanes;
  for (const Lane& lane : traced.lanes) ++lanes[{lane.name.rank, lane.name.role}];
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ((lanes[{rank, Role::dispatch}]), workers);
    EXPECT_EQ((lanes[{rank, Role::tasks}]), workers);
    expect_each_task_once(c, traced.lanes, rank);
  }
}

TEST_P(TraceOnRanks, LinesOfARoleAddUpToItsLanes) {
  const auto [ranks, workers] = GetParam();
  for (const Way way : {Way::mega, Way::low_latency, Way::normal}) {
    const Traced traced = run_traced(layer_of(ranks, workers, way));
    const trace::Totals totals = trace::totals_of(traced.lanes);
    std::int64_t spans = 0;
    std::map<Role, std::int64_t> there;
    for (const Lane& lane : traced.lanes) {
      spans += static_cast<std::int64_t>(lane.spans.size());
      there[lane.name.role] += lane.end - lane.begin;
    }
    EXPECT_EQ(totals.spans, spans);
    std::int64_t counted = 0;
    for (const trace::RoleTotals& role : totals.roles) {
      std::int64_t sum = role.idle;
      for (const trace::Line& line : role.lines) {
        sum += line.nanoseconds;
        counted += line.count;
      }
      EXPECT_GE(role.idle, 0);
      EXPECT_EQ(sum, role.nanoseconds);
      EXPECT_EQ(role.nanoseconds, there[role.role]);
    }
    EXPECT_EQ(counted, spans) << "on the host no waits are summed up";
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, TraceOnRanks,
                         testing::Values(std::tuple(1, 1), std::tuple(2, 1), std::tuple(2, 3), std::tuple(8, 2)));

TEST(TraceLayer, RecordingChangesNoBit) {
  for (const Route& route : host_routes) {
    Case c = layer_of(3, 2);
    c.take(route);
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, 1);
    const Traced off = run_traced(source, c, tokens, false);
    EXPECT_EQ(off.lanes.size(), 0u);
    EXPECT_EQ(different_bits(run_traced(source, c, tokens, true).outputs, off.outputs), 0u) << static_cast<int>(c.options.way);
  }
}

TEST(TraceLayer, AChainHasItsStepsAndTheWaitsInsideOfThem) {
  for (const Route& route : all_routes) {
    Case c = layer_of(2, 2);
    c.take(route);
    const Trace lanes = run_traced(c).lanes;
    expect_whole(lanes);
    for (int rank = 0; rank < 2; ++rank) {
      std::map<Kind, int> steps;
      std::set<int> experts;
      for (const Lane& lane : lanes) {
        if (lane.name != trace::LaneName{rank, Role::rank}) continue;
        for (const Span& span : lane.spans) {
          ++steps[span.kind];
          if (span.kind == Kind::products && span.task.product == Product::gemm1) experts.insert(span.task.expert);
        }
      }
      EXPECT_EQ(steps[Kind::dispatch], 1);
      EXPECT_EQ(steps[Kind::combine], 1);
      EXPECT_EQ(steps[Kind::shared], 1);
      EXPECT_GE(steps[Kind::regroup], 1);
      EXPECT_EQ(experts.size(), c.placement.experts_of(rank).size());
    }
    for (const Lane& lane : lanes) {
      if (lane.name.role != Role::worker) continue;
      const std::vector<int> parents = trace::parents_of(lane);
      for (std::size_t i = 0; i < parents.size(); ++i) {
        if (lane.spans[i].kind != Kind::wait) continue;
        ASSERT_GE(parents[i], 0);
        EXPECT_EQ(lane.spans[static_cast<std::size_t>(parents[i])].kind, Kind::move);
        EXPECT_NE(lane.spans[i].word.kind, WordKind::none);
      }
    }
  }
}

/// Nobody writes the word: the wait ends at the deadline, and has its name.
TEST(TraceLayer, AWaitTellsItsWord) {
  constexpr std::size_t part_bytes = 4096;
  std::vector<Word> heap(2 * part_bytes / sizeof(Word) + 32, 0);
  const auto unaligned = reinterpret_cast<std::uintptr_t>(heap.data());
  const HeapView view{reinterpret_cast<std::byte*>(align_up(unaligned, 128)), part_bytes, 0, 2};
  HostTeam team;
  team.heap = view;
  team.deadline = std::chrono::milliseconds(5);
  HostWorker worker(team, 0);
  worker.start(CallPart::dispatch_send);
  trace::Recorder recorder;
  {
    const trace::Attached lane(recorder, {0, Role::worker});
    std::uint32_t value = 0;
    EXPECT_FALSE(worker.acquire(view.mine<Word>(heap_header_bytes), {WordKind::low_latency_arrived, 1, 4}, value));
  }
  const Trace lanes = recorder.take();
  ASSERT_EQ(lanes.size(), 1u);
  ASSERT_EQ(lanes[0].spans.size(), 1u);
  EXPECT_EQ(lanes[0].spans[0].kind, Kind::wait);
  EXPECT_EQ(lanes[0].spans[0].word.kind, WordKind::low_latency_arrived);
  EXPECT_EQ(lanes[0].spans[0].word.peer, 1);
  EXPECT_EQ(lanes[0].spans[0].word.index, 4);
}

}  // namespace
}  // namespace heddle::layer_test
