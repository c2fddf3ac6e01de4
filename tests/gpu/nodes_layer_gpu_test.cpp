// A layer of way elastic over virtual nodes on one GPU: the bits of the same ranks on one node, called and captured.
#include "gpu/layer_bed.hpp"
#include "heddle/device_balancing.hpp"
#include "heddle/device_nodes.hpp"

namespace heddle::layer_test {
namespace {

// Before CUDA begins: streams that share a hardware queue would wait for each other, and nodes wait for each other in theirs.
[[maybe_unused]] const int queues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

/// One node's layer, with places for its ranks.
class NodeLayer {
 public:
  NodeLayer(const LayerSource& source, const Case& c, const DeviceNodes& nodes, int sms)
      : memory_(layer_memory(LayerWeights::load(source, c.placement, 0), c.options)),
        workspace_({c.ranks() / nodes.nodes, {0}, std::chrono::seconds(20), nodes}, memory_.heap_bytes(c.ranks())) {
    std::vector<LayerWeights> weights;
    const auto rows = static_cast<std::size_t>(c.options.cap);
    for (int rank = first(); rank < first() + count(); ++rank) {
      weights.push_back(LayerWeights::load(source, c.placement, rank));
      places_.emplace_back(0, rows, static_cast<std::size_t>(source.shape.hidden), static_cast<std::size_t>(source.shape.topk));
    }
    DeviceLayerOptions device;
    device.exchange.sms = sms;
    layer_ = std::make_unique<DeviceLayer>(workspace_, 0, memory_, weights, c.options, device);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~NodeLayer() { cudaStreamDestroy(stream_); }
  NodeLayer(const NodeLayer&) = delete;

  void load(const Case& c, const Tokens& tokens) {
    for (int local = 0; local < count(); ++local) {
      const LayerInput input = input_of(c, tokens, first() + local);
      LayerPlace& to = places_[static_cast<std::size_t>(local)];
      const std::size_t hidden = to.hidden.size() / static_cast<std::size_t>(c.options.cap);
      const std::size_t topk = to.ids.size() / static_cast<std::size_t>(c.options.cap);
      to.load(input, hidden, topk);
      to.out.poison();
    }
  }
  /// Queues a call.
  void call(const Step& step) {
    std::vector<DeviceInput> inputs;
    std::vector<bf16*> outputs;
    for (const LayerPlace& place : places_) {
      inputs.push_back({place.tokens.data(), place.hidden.data(), place.ids.data(), place.weights.data(), {}});
      outputs.push_back(place.out.data());
    }
    layer_->forward(inputs, step, outputs, stream_);
  }
  void wait() {
    wait_for(stream_, "a call of a node's layer", std::chrono::seconds(60));
    layer_->throw_if_failed();
  }
  /// Its ranks' outputs, in the batch's order.
  std::vector<bf16> outputs(const Case& c) const {
    std::vector<bf16> all;
    for (int local = 0; local < count(); ++local) {
      const std::vector<bf16> out = places_[static_cast<std::size_t>(local)].out.read();
      const auto tokens = static_cast<std::size_t>(c.tokens[static_cast<std::size_t>(first() + local)]);
      const std::size_t hidden = out.size() / static_cast<std::size_t>(c.options.cap);
      all.insert(all.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(tokens * hidden));
    }
    return all;
  }
  cudaStream_t stream() const { return stream_; }

 private:
  int first() const { return workspace_.first_rank(0); }
  int count() const { return workspace_.ranks_on(0); }

  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  std::vector<LayerPlace> places_;
  std::unique_ptr<DeviceLayer> layer_;
  cudaStream_t stream_ = nullptr;
};

/// All nodes load, call by `call` and are waited for; the outputs of the whole batch.
template <class Call>
std::vector<bf16> call_all(std::vector<std::unique_ptr<NodeLayer>>& nodes, const Case& c, const Tokens& tokens, Call call) {
  for (auto& node : nodes) node->load(c, tokens);
  check(cudaDeviceSynchronize(), "copies of inputs");
  for (std::size_t i = 0; i < nodes.size(); ++i) call(i);
  std::vector<bf16> all;
  for (auto& node : nodes) node->wait();
  for (auto& node : nodes) {
    const std::vector<bf16> own = node->outputs(c);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

void expect_the_bits_of_one_node(const Case& c, int count) {
  SCOPED_TRACE(text_of(c) + ", " + std::to_string(count) +
               (c.options.mode == NodeMode::hybrid ? " nodes, hybrid" : " nodes, direct"));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, c.seed), others = draw_tokens(c, c.seed + 1);
  std::vector<bf16> want, want_of_others;
  {
    LayerBed bed({{&source, &c}});
    bed.load(c, tokens);
    want = bed.call(c);
    bed.load(c, others);
    want_of_others = bed.call(c);
  }
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "number of SMs");
  const auto links = create_virtual_device_links(count, c.ranks() / count);
  std::vector<std::unique_ptr<NodeLayer>> nodes;
  for (int node = 0; node < count; ++node) {
    const DeviceNodes here{node, count, links[static_cast<std::size_t>(node)]};
    nodes.push_back(std::make_unique<NodeLayer>(source, c, here, (sms - count) / count));
  }
  const auto call = [&](std::size_t i) { nodes[i]->call(step_of(c)); };
  EXPECT_EQ(different_bits(call_all(nodes, c, tokens, call), want), 0u);
  EXPECT_EQ(different_bits(call_all(nodes, c, others, call), want_of_others), 0u) << "the second call";
  LayerGraphs made;
  for (auto& node : nodes) {
    check(cudaStreamBeginCapture(node->stream(), cudaStreamCaptureModeThreadLocal), "capture");
    node->call(step_of(c));
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(node->stream(), &graph), "end of capture");
    check(cudaGraphInstantiate(&made.graphs.emplace_back(), graph, 0), "instantiation");
    check(cudaGraphDestroy(graph), "graph");
    check(cudaGraphUpload(made.graphs.back(), node->stream()), "upload of a graph");
    check(cudaStreamSynchronize(node->stream()), "upload of a graph");
  }
  const auto replay = [&](std::size_t i) { check(cudaGraphLaunch(made.graphs[i], nodes[i]->stream()), "replay"); };
  EXPECT_EQ(different_bits(call_all(nodes, c, tokens, replay), want), 0u) << "a replay";
  EXPECT_EQ(different_bits(call_all(nodes, c, others, replay), want_of_others), 0u) << "a replay with other tokens";
}

TEST(NodesLayerGpu, BitsOfOneNodeOfEveryRunner) {
  SKIP_WITHOUT_GPU();
  for (const NodeMode mode : {NodeMode::direct, NodeMode::hybrid}) {
    for (const RunnerKind runner : {RunnerKind::contiguous, RunnerKind::masked, RunnerKind::routed}) {
      for (const int nodes : {2, 4}) {
        Case c = plain_case(8, WeightKind::mxfp4);
        c.take({Way::elastic, Reduce::rank});
        c.options.runner = runner;
        c.options.mode = mode;
        expect_the_bits_of_one_node(c, nodes);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(NodesLayerGpu, BitsOfOneNodeWithASharedExpert) {
  SKIP_WITHOUT_GPU();
  Case c = with_shared(plain_case(4, WeightKind::fp8_block), WeightKind::bf16, true);
  c.take({Way::elastic, Reduce::rank});
  c.options.mode = NodeMode::hybrid;
  expect_the_bits_of_one_node(c, 2);
}

TEST(NodesLayerGpu, ALayerThatFollowsTheLoadIsRefused) {
  SKIP_WITHOUT_GPU();
  Case c = plain_case(2, WeightKind::bf16);
  c.take({Way::elastic, Reduce::rank});
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const int experts = c.layer.shape.experts;
  const ReplicaMap map = balance_experts(std::vector<double>(static_cast<std::size_t>(experts), 1.0), {2, experts % 2, 1, {}});
  const ExchangeMemory memory = layer_memory(LayerWeights::load(source, c.placement, 0), c.options);
  DeviceWorkspace workspace({1, {0}, std::chrono::seconds(1), {0, 2, create_virtual_device_links(2, 1)[0]}}, memory.heap_bytes(2));
  try {
    const DeviceBalancedLayer balanced(workspace, memory, source, map, c.options);
    ADD_FAILURE() << "accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("knows one node, the group has 2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace heddle::layer_test
