// Time stamps of kernels (preset trace): a traced call has the untraced bits, spans nest, every task is there once in every role.
// On one GPU, with two virtual ranks where there is one GPU alone: a trace's memory is a GPU's.
#include <map>
#include <set>
#include <tuple>

#include "gpu/mega_bed.hpp"
#include "mega/schedule.hpp"
#include "trace/cuda_arena.hpp"
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

#define SKIP_WITHOUT_STAMPS() \
  SKIP_WITHOUT_GPU();         \
  if constexpr (!trace::kernels_record) GTEST_SKIP() << "this build's kernels take no time stamps; build with the preset trace"

int ranks_here() { return gpus_here() == 1 ? 2 : 1; }

struct Traced {
  std::vector<bf16> outputs;
  Trace lanes;
};

/// A call of layer `number`, recorded.
Traced traced_call(MegaBed& bed, std::size_t number, const Case& c, const Tokens& tokens) {
  trace::Arena arena(bed.workspace().device(0));
  Traced traced;
  {
    const trace::Recording recording(&arena);
    traced.outputs = bed.call(number, c, tokens);
  }
  trace::Recorder recorder;
  arena.collect(recorder);
  traced.lanes = recorder.take();
  return traced;
}

void expect_whole(const Trace& lanes) {
  for (const Lane& lane : lanes) {
    EXPECT_EQ(lane.lost, 0) << lane.kernel << " " << trace::text_of(lane.name);
    for (const Span& span : lane.spans) {
      EXPECT_GE(span.begin, lane.begin);
      EXPECT_LE(span.end, lane.end);
    }
    constexpr std::int64_t rounding = 4;
    for (const std::int64_t time : trace::own_times(lane)) EXPECT_GE(time, -rounding);  // throws where spans overlap in part
  }
}

using Task = std::tuple<Product, int, int>;  // product, block, part

/// How often each task of a rank has a span of this kind in this role; of several warpgroups the first one's count.
std::map<Task, int> tasks_of(const Trace& lanes, const std::string& kernel, int rank, Role role, Kind kind) {
  std::map<Task, int> tasks;
  for (const Lane& lane : lanes) {
    if (lane.kernel != kernel || lane.name.rank != rank || lane.name.role != role || lane.name.number != 0) continue;
    for (const Span& span : lane.spans) {
      if (span.kind == kind) ++tasks[{span.task.product, span.task.block, span.task.part}];
    }
  }
  return tasks;
}

std::map<int, int> rows_of_experts(const Case& c, const Tokens& tokens, int rank) {
  std::map<int, int> rows;
  for (const std::int32_t id : tokens.routing.ids) {
    if (id >= 0 && c.placement.rank_of(id) == rank) ++rows[id];
  }
  return rows;
}

std::map<Task, int> wanted_tasks(const Case& c, const Tokens& tokens, int rank) {
  int blocks = 0;
  for (const auto& [expert, rows] : rows_of_experts(c, tokens, rank)) blocks += parts_of(rows, c.options.block_rows);
  const int shared_blocks = c.layer.shared_kind ? parts_of(c.tokens[static_cast<std::size_t>(rank)], c.options.block_rows) : 0;
  const int columns = parts_of(c.layer.shape.hidden, task_columns);
  std::map<Task, int> wanted;
  const auto add = [&](Product product, int number, int parts) {
    for (int task = 0; task < number * parts; ++task) wanted[{product, task / parts, task % parts}] = 1;
  };
  add(Product::gemm1, blocks, parts_of(c.layer.shape.intermediate, step_columns));
  add(Product::gemm2, blocks, columns);
  add(Product::shared_gemm1, shared_blocks, parts_of(c.layer.shared_intermediate, step_columns));
  add(Product::shared_gemm2, shared_blocks, columns);
  return wanted;
}

void expect_fused_trace(const Case& c, DeviceRowBlocks blocks) {
  SCOPED_TRACE(text_of(c));
  DeviceLayerOptions device;
  device.row_blocks = blocks;
  MegaBed bed(c, std::chrono::seconds(30), device);
  const Tokens tokens = draw_tokens(c, 1);
  const std::vector<bf16> plain = bed.call(0, c, tokens);
  const Traced traced = traced_call(bed, 0, c, tokens);
  EXPECT_EQ(different_bits(traced.outputs, plain), 0u);
  EXPECT_EQ(different_bits(bed.call(0, c, tokens), plain), 0u) << "no longer recorded";
  expect_whole(traced.lanes);
  std::set<std::string> kernels;
  for (const Lane& lane : traced.lanes) kernels.insert(lane.kernel);
  EXPECT_EQ(kernels, (std::set<std::string>{"announce", "fused kernel", "sum"}));
  for (int rank = 0; rank < c.ranks(); ++rank) {
    const std::map<Task, int> wanted = wanted_tasks(c, tokens, rank);
    const auto of = [&](Role role, Kind kind) { return tasks_of(traced.lanes, "fused kernel", rank, role, kind); };
    EXPECT_EQ(of(Role::claim, Kind::claim), wanted);
    EXPECT_EQ(of(Role::claim, Kind::weights), wanted);
    EXPECT_EQ(of(Role::rows, Kind::rows), wanted);
    EXPECT_EQ(of(Role::math, Kind::products), wanted);
    EXPECT_EQ(of(Role::math, Kind::epilogue), wanted);
    EXPECT_EQ(of(Role::scales, Kind::scales), needs_fp8(c.layer.kind) ? wanted : (std::map<Task, int>{}));
  }
}

Case traced_case(WeightKind kind, int block_rows, int cap) {
  Case c = with_ring(fused_case(ranks_here(), kind), block_rows, RingSize::live);
  c.options.cap = cap;
  for (int& tokens : c.tokens) tokens = cap;
  c.missing = 0.0;
  return c;
}

TEST(TraceGpu, FusedKernelHasEveryTaskOnceInEveryRole) {
  SKIP_WITHOUT_STAMPS();
  for (const WeightKind kind : fused_kinds) {
    expect_fused_trace(traced_case(kind, 16, 24), DeviceRowBlocks::small);
    expect_fused_trace(traced_case(kind, 64, 300), DeviceRowBlocks::large);  // the ring wraps
    if (HasFailure()) return;
  }
}

TEST(TraceGpu, SharedExpertsTasksToo) {
  SKIP_WITHOUT_STAMPS();
  for (const DeviceRowBlocks blocks : {DeviceRowBlocks::small, DeviceRowBlocks::medium, DeviceRowBlocks::large}) {
    const bool is_small = blocks == DeviceRowBlocks::small;
    expect_fused_trace(with_shared(traced_case(WeightKind::mxfp4, is_small ? 32 : 64, 100), WeightKind::fp8_block, false), blocks);
  }
}

TEST(TraceGpu, AChainsKernelsAndTheirTasks) {
  SKIP_WITHOUT_STAMPS();
  for (const int cap : {24, 300}) {
    const Case c = chain_of(traced_case(WeightKind::mxfp4, 64, cap));
    MegaBed bed(traced_case(WeightKind::mxfp4, 64, cap));
    const Tokens tokens = draw_tokens(c, 1);
    const std::vector<bf16> plain = bed.chain(c, tokens);
    const Traced traced = traced_call(bed, bed.chain_number(), c, tokens);
    EXPECT_EQ(different_bits(traced.outputs, plain), 0u);
    expect_whole(traced.lanes);
    std::map<std::string, int> waits;
    std::set<std::string> kernels;
    for (const Lane& lane : traced.lanes) {
      kernels.insert(lane.kernel);
      for (const Span& span : lane.spans) waits[lane.kernel] += span.kind == Kind::wait ? 1 : 0;
    }
    EXPECT_EQ(kernels, (std::set<std::string>{"combine", "dispatch", "gemm1", "gemm2"}));
    EXPECT_GT(waits["dispatch"], 0);
    EXPECT_GT(waits["combine"], 0);
    for (int rank = 0; rank < c.ranks(); ++rank) {
      for (const char* kernel : {"gemm1", "gemm2"}) {
        const auto products = tasks_of(traced.lanes, kernel, rank, Role::math, Kind::products);
        EXPECT_EQ(products, tasks_of(traced.lanes, kernel, rank, Role::claim, Kind::weights));
        EXPECT_FALSE(products.empty());
        for (const auto& [task, count] : products) EXPECT_EQ(count, 1) << std::get<1>(task) << " " << std::get<2>(task);
      }
    }
  }
}

TEST(TraceGpu, WhatFindsNoRoomRunsAndIsTold) {
  SKIP_WITHOUT_STAMPS();
  const Case c = traced_case(WeightKind::mxfp4, 16, 24);
  MegaBed bed(c);
  const Tokens tokens = draw_tokens(c, 1);
  const std::vector<bf16> plain = bed.call(0, c, tokens);
  trace::Arena arena(bed.workspace().device(0), 4096);
  const trace::Recording recording(&arena);
  EXPECT_EQ(different_bits(bed.call(0, c, tokens), plain), 0u);
  trace::Recorder recorder;
  EXPECT_THROW(arena.collect(recorder), InputError);
}

}  // namespace
}  // namespace heddle::layer_test
