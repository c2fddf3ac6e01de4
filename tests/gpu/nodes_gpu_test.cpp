// elastic on GPUs over several nodes: virtual nodes on one GPU against one node and the host engine, bit for bit, in both modes;
// graphs; a node that does not come, and input that one node refuses, end the others by name. NCCL between nodes of a GPU each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "gpu/communicators.hpp"
#include "gpu/process_run.hpp"
#include "heddle/device_nodes.hpp"
#include "random_nodes.hpp"

namespace heddle {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Before CUDA begins: streams that share a hardware queue would wait for each other, and nodes wait for each other in theirs.
[[maybe_unused]] const int queues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

constexpr NodeMode modes[] = {NodeMode::direct, NodeMode::hybrid};

/// All nodes of a case, driven by one thread: on one GPU with a share of its SMs each, or on a GPU each.
class Nodes {
 public:
  Nodes(const Case& c, const std::vector<std::shared_ptr<DeviceNodeLink>>& links, bool gpu_each,
        milliseconds deadline = milliseconds(20000)) {
    const int nodes = static_cast<int>(links.size());
    int sms = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "number of SMs");
    DeviceExchangeOptions device;
    if (!gpu_each) device.sms = (sms - nodes) / nodes;  // one SM a node is left to the kernels of the link
    for (int node = 0; node < nodes; ++node) {
      groups_.push_back(std::move(create_thread_group(1, {deadline}).front()));
      const DeviceGroupOptions mine{c.ranks() / nodes, {gpu_each ? node : 0}, deadline, {node, nodes, links[index(node)]}};
      runs_.push_back(std::make_unique<ProcessRun>(c, *groups_.back(), mine, device));
    }
  }
  ProcessRun& of(int node) { return *runs_[index(node)]; }
  std::vector<std::unique_ptr<ProcessRun>>& all() { return runs_; }

  void dispatch(int round) {
    for (auto& run : runs_) run->load_round(round);
    for (auto& run : runs_) run->dispatch();
    for (auto& run : runs_) run->wait();
  }
  void finish(int round, const std::vector<HostArrived>* host) {
    for (auto& run : runs_) run->run_own_experts(host);
    if (testing::Test::HasFatalFailure()) return;
    for (auto& run : runs_) run->combine();
    for (auto& run : runs_) run->wait();
    for (auto& run : runs_) run->expect_own_outputs(round, {});
  }
  void round_trip(const Case& c, int round, bool against_host) {
    dispatch(round);
    std::vector<HostArrived> host;
    if (against_host) host = host_arrivals(c, round);
    finish(round, against_host ? &host : nullptr);
  }

 private:
  static std::size_t index(int node) { return static_cast<std::size_t>(node); }
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<ProcessRun>> runs_;
};

Case case_of(int ranks, NodeMode mode, int cap = 17) {
  Case c;
  c.options = options_for(Way::elastic, 320, 19, ranks, 4, cap);
  c.options.mode = mode;
  for (int r = 0; r < ranks; ++r) c.tokens.push_back(r % 3 == 1 ? 0 : cap - r % 5);
  return c;
}

std::string title(const Case& c, int nodes) {
  return describe(c.options) + "nodes=" + std::to_string(nodes) + " ranks=" + std::to_string(c.ranks()) +
         " seed=" + std::to_string(c.seed);
}

/// Bytes that tell whose they are and where.
std::vector<std::uint32_t> pattern(std::size_t words, std::uint32_t whose) {
  std::vector<std::uint32_t> values(words);
  for (std::size_t i = 0; i < words; ++i) values[i] = whose * 0x1000000u + static_cast<std::uint32_t>(i);
  return values;
}

/// A stream that goes with the test.
struct Stream {
  Stream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(stream); }
  Stream(const Stream&) = delete;
  cudaStream_t stream = nullptr;
};

// The link alone: two swaps of a pair, in turns, queued on one node ahead of the other; then a peer that does not come.
TEST(NodesGpu, VirtualLinksSwap) {
  SKIP_WITHOUT_GPU();
  const auto links = create_virtual_device_links(2, 1);
  const Stream streams[2];
  for (const std::size_t words : {4u, 1000u, 300000u}) {
    std::vector<Buffer<std::uint32_t>> from, to;
    for (std::uint32_t i = 0; i < 4; ++i) {  // number `i % 2` of node `i / 2`
      from.emplace_back(0, pattern(words, i));
      to.emplace_back(0, words);
    }
    check(cudaDeviceSynchronize(), "copies of inputs");
    for (const std::size_t node : {0u, 1u}) {
      std::vector<DeviceSwap> swaps;
      const int rank = static_cast<int>(node);
      for (const std::size_t i : {2 * node, 2 * node + 1})
        swaps.push_back({rank, 1 - rank, from[i].data(), to[i].data(), words * 4});
      links[node]->swap(swaps, streams[node].stream);
    }
    for (const Stream& stream : streams) check(cudaStreamSynchronize(stream.stream), "swaps");
    for (std::uint32_t i = 0; i < 4; ++i) {
      ASSERT_EQ(to[i].read(), pattern(words, (i + 2) % 4)) << words << " words, array " << i;
      to[i].expect_guards("an array");
    }
  }
  const Buffer<std::uint32_t> from(0, pattern(4, 0)), to(0, 4);
  const DeviceSwap swap{0, 1, from.data(), to.data(), 16};
  links[0]->swap({&swap, 1}, streams[0].stream);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(cudaStreamQuery(streams[0].stream), cudaErrorNotReady) << "node 0 did not wait";
  links[0]->abort();
  EXPECT_EQ(cudaStreamSynchronize(streams[0].stream), cudaSuccess);
  EXPECT_THROW(links[0]->swap({&swap, 1}, streams[0].stream), Error);
}

TEST(NodesGpu, VirtualNodesComeHomeAsOneNode) {
  SKIP_WITHOUT_GPU();
  for (const NodeMode mode : modes) {
    for (const auto& [nodes, inside] : {std::pair{2, 1}, std::pair{2, 2}, std::pair{4, 1}, std::pair{4, 2}, std::pair{2, 4}}) {
      for (const int cap : {17, 150}) {
        const Case c = case_of(nodes * inside, mode, cap);
        SCOPED_TRACE(title(c, nodes));
        Nodes run(c, create_virtual_device_links(nodes, inside), false);
        for (int round = 0; round < 4; ++round) {
          run.round_trip(c, round, round < 2);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(NodesGpu, RandomShapes) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < longer(30); ++i) {
    const auto [nodes, c] = random_nodes_case(random, {{1, 2, 3}, {1, 3, 8, 16, 40}, {1, 5, 33, 70}, {64, 320, 640, 2304, 7168}});
    SCOPED_TRACE(testing::Message() << i << ": " << title(c, nodes));
    Nodes run(c, create_virtual_device_links(nodes, c.ranks() / nodes), false);
    for (int round = 0; round < 2; ++round) {
      run.round_trip(c, round, round == 0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(NodesGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPU();
  const auto seed = static_cast<std::uint32_t>(test_seed());
  for (const NodeMode mode : modes) {
    const Case c = case_of(4, mode, 9);
    SCOPED_TRACE(title(c, 2));
    Nodes run(c, create_virtual_device_links(2, 2), false);
    for (int round = 0; round < longer(10); ++round) {
      for (auto& node : run.all())
        node->workspace().set_delays(std::chrono::microseconds(20), seed + static_cast<std::uint32_t>(round));
      run.round_trip(c, round, false);
      if (HasFatalFailure()) return;
    }
  }
}

// A dispatch a node is captured once; tokens, routing and numbers of tokens change between replays.
TEST(NodesGpu, GraphsReplayWithOtherTokens) {
  SKIP_WITHOUT_GPU();
  constexpr int nodes = 2;
  for (const NodeMode mode : modes) {
    Case c = case_of(4, mode, 24);
    c.tokens.assign(4, 24);
    SCOPED_TRACE(title(c, nodes));
    Nodes run(c, create_virtual_device_links(nodes, 2), false);
    run.round_trip(c, 0, false);
    if (HasFatalFailure()) return;
    std::vector<cudaGraphExec_t> graphs;
    for (auto& node : run.all()) {
      check(cudaStreamBeginCapture(node->stream(), cudaStreamCaptureModeRelaxed), "capture");
      node->dispatch();
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(node->stream(), &graph), "end of capture");
      check(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0), "instantiation");
      check(cudaGraphDestroy(graph), "graph");
      check(cudaGraphUpload(graphs.back(), node->stream()), "upload of a graph");
      check(cudaStreamSynchronize(node->stream()), "upload of a graph");
    }
    for (int round = 1; round < 8; ++round) {
      Case now = c;
      for (std::size_t r = 0; r < now.tokens.size(); ++r) now.tokens[r] = (round * 7 + static_cast<int>(r) * 5) % 25;
      now.tokens[0] = 24;  // the step's largest batch was fixed at capture
      for (auto& node : run.all()) {
        node->bring(now.tokens);
        node->load_round(round);
      }
      for (int node = 0; node < nodes; ++node)
        check(cudaGraphLaunch(graphs[static_cast<std::size_t>(node)], run.of(node).stream()), "replay");
      for (auto& node : run.all()) node->wait();
      const std::vector<HostArrived> host = host_arrivals(now, round);
      run.finish(round, &host);
      if (HasFatalFailure()) return;
    }
    for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph), "graph");
  }
}

// Nodes 0 and 2 call, node 1 does not: theirs is the first message that is missing.
TEST(NodesGpu, ANodeThatDoesNotComeIsNamed) {
  SKIP_WITHOUT_GPU();
  const milliseconds deadline(400);
  for (const NodeMode mode : modes) {
    for (const bool in_dispatch : {true, false}) {
      const Case c = case_of(6, mode, 9);
      SCOPED_TRACE(title(c, 3) + (in_dispatch ? ", silent in dispatch" : ", silent in combine"));
      Nodes run(c, create_virtual_device_links(3, 2), false, deadline);
      run.round_trip(c, 0, false);
      if (HasFatalFailure()) return;
      if (in_dispatch) {
        for (auto& node : run.all()) node->load_round(1);
      } else {
        run.dispatch(1);
        for (auto& node : run.all()) node->run_own_experts(nullptr);
      }
      const auto since = std::chrono::steady_clock::now();
      for (const int node : {0, 2}) in_dispatch ? run.of(node).dispatch() : run.of(node).combine();
      for (const int node : {0, 2}) {
        try {
          run.of(node).wait();
          ADD_FAILURE() << "node " << node << " did not miss node 1";
        } catch (const FaultError& error) {
          EXPECT_THAT(error.what(), HasSubstr(in_dispatch ? "elastic dispatch" : "elastic combine"));
          EXPECT_THAT(error.what(), HasSubstr("message of node 1 from rank "));
          EXPECT_TRUE(error.fault().peer == 2 || error.fault().peer == 3) << error.what();
          EXPECT_TRUE(error.fault().rank / 2 == node) << error.what();
        }
      }
      EXPECT_LT(std::chrono::steady_clock::now() - since, 2 * deadline + std::chrono::seconds(2));
      EXPECT_THROW(run.of(0).dispatch(), FaultError) << "the fault stands";
      EXPECT_THROW(run.of(0).workspace().reset(), InputError);
    }
  }
}

TEST(NodesGpu, BadIdsOnOneNodeEndTheOthers) {
  SKIP_WITHOUT_GPU();
  for (const NodeMode mode : modes) {
    Case c = case_of(4, mode, 9);
    c.tokens = {4, 4, 4, 4};
    c.none = 0;
    SCOPED_TRACE(title(c, 2));
    Nodes run(c, create_virtual_device_links(2, 2), false);
    run.round_trip(c, 0, false);
    if (HasFatalFailure()) return;
    for (auto& node : run.all()) node->load_round(1);
    RankData bad = draw(c, 3, 1);
    bad.ids[5] = 19;
    run.of(1).load(3, bad);
    for (auto& node : run.all()) node->dispatch();
    for (auto& node : run.all()) {
      try {
        node->wait();
        ADD_FAILURE() << "id 19 of 19 experts was accepted";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().rank, 3) << error.what();
        EXPECT_EQ(error.fault().seen, 19u) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("input check"));
      }
    }
  }
}

void expect_refused(const std::string& part, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "accepted; should say: " << part;
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(NodesGpu, WhatIsNotThereIsRefusedByName) {
  SKIP_WITHOUT_GPU();
  const auto links = create_virtual_device_links(2, 2);
  const auto make = [&](const ExchangeOptions& options, const DeviceExchangeOptions& device = {}) {
    const ExchangeMemory memory = exchange_memory(options);
    DeviceWorkspace workspace({2, {0}, milliseconds(1000), {0, 2, links[0]}}, memory.heap_bytes(4));
    create_device_exchange(workspace, 0, options, memory, device);
  };
  const ExchangeOptions good = options_for(Way::elastic, 128, 8, 4, 2, 4);
  make(good);
  ExchangeOptions other = good;
  other.reduce = Reduce::home;
  expect_refused("take reduce = rank", [&] { make(other); });
  other = good;
  other.cpu_sync = true;
  expect_refused("leave cpu_sync out", [&] { make(other); });
  DeviceExchangeOptions bulk;
  bulk.bulk_bytes = 1024;
  expect_refused("leave DeviceExchangeOptions::bulk_bytes out", [&] { make(good, bulk); });
  for (const Way way : {Way::gather, Way::normal, Way::low_latency, Way::one_sided})
    expect_refused("knows one node, the group has 2", [&] { make(options_for(way, 128, 8, 4, 2, 4)); });
  expect_refused("the link between nodes is for 4 ranks", [&] {
    DeviceWorkspace({1, {0}, milliseconds(1000), {0, 2, links[0]}}, 4096);
  });
  expect_refused("node 2 of 2", [&] { DeviceWorkspace({2, {0}, milliseconds(1000), {2, 2, links[0]}}, 4096); });
  expect_refused("has no DeviceNodeLink", [&] { DeviceWorkspace({2, {0}, milliseconds(1000), {0, 2, nullptr}}, 4096); });
}

// --- NCCL ---------------------------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<DeviceNodeLink>> nccl_links(const std::shared_ptr<NcclCommunicators>& nccl) {
  return std::vector(static_cast<std::size_t>(nccl->ranks()), create_nccl_link(nccl));
}

// A rank may swap with itself: what one GPU can show of NCCL's sends and receives.
TEST(NodesGpu, NcclSwapsOfOneGpuWithItself) {
  COMMUNICATORS_OR_SKIP(nccl, 1);
  const auto link = create_nccl_link(nccl);
  EXPECT_EQ(link->ranks(), 1);
  const Stream stream;
  constexpr std::size_t words = 100000;
  const Buffer<std::uint32_t> from(0, pattern(words, 7)), to(0, words);
  check(cudaDeviceSynchronize(), "copies of inputs");
  const DeviceSwap swap{0, 0, from.data(), to.data(), words * 4};
  link->swap({&swap, 1}, stream.stream);
  check(cudaStreamSynchronize(stream.stream), "swaps");
  EXPECT_EQ(to.read(), pattern(words, 7));
  const DeviceSwap elsewhere{0, 1, from.data(), to.data(), 16};
  EXPECT_THROW(link->swap({&elsewhere, 1}, stream.stream), InputError);
  link->abort();
  EXPECT_THROW(link->swap({&swap, 1}, stream.stream), Error);
}

TEST(NodesGpu, NcclBetweenNodesOfAGpuEach) {
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed: NCCL refuses two ranks on one";
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  const auto links = nccl_links(nccl);
  for (const NodeMode mode : modes) {
    for (const Wire wire : {Wire::bf16, Wire::fp8}) {
      Case c = case_of(gpus_here(), mode, 33);
      c.options.wire = wire;
      SCOPED_TRACE(title(c, gpus_here()));
      Nodes run(c, links, true);
      for (int round = 0; round < 4; ++round) {
        run.round_trip(c, round, round < 2);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Last, since the communicators do not survive it.
TEST(NodesGpu, NcclANodeThatDoesNotComeIsNamed) {
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed: NCCL refuses two ranks on one";
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  const milliseconds deadline(500);
  const Case c = case_of(gpus_here(), NodeMode::hybrid, 9);
  Nodes run(c, nccl_links(nccl), true, deadline);
  run.round_trip(c, 0, false);
  if (HasFatalFailure()) return;
  for (auto& node : run.all()) node->load_round(1);
  run.of(0).dispatch();
  try {
    run.of(0).wait();
    ADD_FAILURE() << "node 0 did not miss the others";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().rank, 0);
    EXPECT_THAT(error.what(), HasSubstr("elastic dispatch"));
    EXPECT_THAT(error.what(), HasSubstr("message of node 1 from rank 1"));
  }
}

}  // namespace
}  // namespace heddle
