// The router on a GPU: ids and weights of the host's, bit for bit; captured; inside a layer.
#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>

#include "gpu/layer_bed.hpp"
#include "heddle/device_router.hpp"

namespace heddle::layer_test {
namespace {

struct RouterCase {
  int experts = 0, hidden = 0, most_tokens = 0;
  bool wide = false;  ///< weights that are no bf16 values
  bool biased = false;
  RouterOptions options;
};

std::string text_of(const RouterCase& c) {
  return std::to_string(c.experts) + " experts, hidden size " + std::to_string(c.hidden) + ", up to " +
         std::to_string(c.most_tokens) + " tokens, score " + std::to_string(static_cast<int>(c.options.score)) + ", top-" +
         std::to_string(c.options.topk) + ", " + std::to_string(c.options.topk_groups) + " of " + std::to_string(c.options.groups) +
         " groups" + (c.wide ? ", f32 weights" : "") + (c.biased ? ", biased" : "");
}

RouterCase random_router(Chance& chance) {
  RouterCase c;
  c.experts = chance.one_in(2) ? chance.one_of({8, 64, 128, 256, 384, 512, 1024}) : chance.between(1, 300);
  c.hidden = chance.one_in(8) ? 7168 : 64 * chance.between(1, 40);
  c.most_tokens = chance.one_of({1, 3, 4, 5, 16, 17, 64, 65, 200});
  c.wide = chance.one_in(2);
  c.biased = chance.one_in(2);
  c.options.score = chance.one_of({Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::softmax_topk});
  const bool may_group = c.options.score == Score::sigmoid || c.options.score == Score::sqrtsoftplus;
  for (const int groups : {2, 4, 8}) {
    if (may_group && c.experts % groups == 0 && chance.one_in(2)) c.options.groups = groups;
  }
  c.options.topk_groups = chance.between(1, c.options.groups);
  const int reachable = c.experts / c.options.groups * c.options.topk_groups;
  c.options.topk = chance.between(1, chance.one_in(6) ? reachable : std::min(reachable, 10));
  c.options.renormalise = chance.one_in(2);
  c.options.scale = chance.one_in(2) ? 2.5f : 1.0f;
  return c;
}

bool same_weight(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

/// A router and its calls on GPU 0.
class RouterBed {
 public:
  RouterBed(const RouterCase& c, std::uint64_t seed)
      : c_(c),
        random_(seed),
        weights_(drawn(static_cast<std::size_t>(c.experts) * static_cast<std::size_t>(c.hidden), c.wide,
                       2.0f / std::sqrt(static_cast<float>(c.hidden)))),
        bias_(c.biased ? drawn(static_cast<std::size_t>(c.experts), true, 0.1f) : std::vector<float>()),
        router_(0, weights_, bias_, c.experts, c.hidden, c.options, c.most_tokens),
        tokens_(0, 1),
        hidden_(0, rows() * static_cast<std::size_t>(c.hidden)),
        ids_(0, rows() * static_cast<std::size_t>(c.options.topk)),
        chosen_weights_(0, ids_.size()) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~RouterBed() { cudaStreamDestroy(stream_); }
  RouterBed(const RouterBed&) = delete;

  const DeviceRouter& router() const { return router_; }
  cudaStream_t stream() const { return stream_; }
  void queue() { router_.route(input(), c_.most_tokens, ids_.data(), chosen_weights_.data(), stream_); }
  DeviceInput input() const { return {tokens_.data(), hidden_.data(), nullptr, nullptr, {}}; }

  /// Other tokens, then what `call` queues, against the host.
  void expect_the_hosts(int tokens, const std::function<void()>& call) {
    SCOPED_TRACE(text_of(c_) + ", of which there are " + std::to_string(tokens));
    std::vector<bf16> hidden;
    for (const float value : drawn(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(c_.hidden), false, 1.0f))
      hidden.push_back(to_bf16(value));
    hidden_.poison();
    if (!hidden.empty()) hidden_.write(hidden);
    tokens_.write({tokens});
    ids_.poison();
    chosen_weights_.poison();
    call();
    wait_for(stream_, "a router");
    const auto logits = router_logits(hidden, weights_, tokens, c_.hidden, c_.experts);
    const Routing wanted = route(logits, bias_, tokens, c_.experts, c_.options);
    const auto ids = ids_.read();
    const auto weights = chosen_weights_.read();
    for (std::size_t i = 0; i < wanted.ids.size(); ++i) {
      ASSERT_EQ(ids[i], wanted.ids[i]) << "choice " << i;
      ASSERT_TRUE(same_weight(weights[i], wanted.weights[i])) << "weight " << i << ": " << weights[i] << ", " << wanted.weights[i];
    }
    constexpr std::int32_t poison = 0x7F7F7F7F;
    for (std::size_t i = wanted.ids.size(); i < ids.size(); ++i) {
      ASSERT_EQ(ids[i], poison) << "behind the tokens";
      ASSERT_EQ(std::bit_cast<std::int32_t>(weights[i]), poison) << "behind the tokens";
    }
    ids_.expect_guards("ids");
    chosen_weights_.expect_guards("weights");
    hidden_.expect_guards("hidden states");
  }

 private:
  std::size_t rows() const { return static_cast<std::size_t>(c_.most_tokens); }
  std::vector<float> drawn(std::size_t count, bool wide, float spread) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> values(count);
    for (float& value : values) value = wide ? normal(random_) : to_float(to_bf16(normal(random_)));
    return values;
  }

  RouterCase c_;
  std::mt19937_64 random_;
  std::vector<float> weights_, bias_;
  DeviceRouter router_;
  Buffer<int> tokens_;
  Buffer<bf16> hidden_;
  Buffer<std::int32_t> ids_;
  Buffer<float> chosen_weights_;
  cudaStream_t stream_ = nullptr;
};

TEST(RouterGpu, RandomRoutersHaveTheHostsBits) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(longer(60)) && !HasFatalFailure(); ++i) {
    Chance chance(seed + i);
    const RouterCase c = random_router(chance);
    RouterBed bed(c, seed + i);
    EXPECT_EQ(bed.router().keeps_bf16(), !c.wide);
    bed.expect_the_hosts(c.most_tokens, [&] { bed.queue(); });
    bed.expect_the_hosts(chance.between(0, c.most_tokens), [&] { bed.queue(); });
  }
}

TEST(RouterGpu, AGraphFollowsTheNumberOfTokens) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (const int most : {4, 16, 64, 130}) {
    RouterCase c;
    c.experts = 256;
    c.hidden = 2048;
    c.most_tokens = most;
    c.biased = true;
    c.options = {Score::sigmoid, 8, 8, 4, true, 2.5f};
    RouterBed bed(c, seed);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamBeginCapture(bed.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    bed.queue();
    check(cudaStreamEndCapture(bed.stream(), &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    for (const int tokens : {most, 0, 1, most / 2, most})
      bed.expect_the_hosts(tokens, [&] { check(cudaGraphLaunch(ready, bed.stream()), "cudaGraphLaunch"); });
    check(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    if (HasFatalFailure()) return;
  }
}

std::string refusal_in(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(RouterGpu, RefusedByName) {
  SKIP_WITHOUT_GPU();
  const auto expect_part = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" should say \"" << part << "\"";
  };
  const auto make = [](int experts, int hidden, std::size_t weights, const RouterOptions& options) {
    return [=] { DeviceRouter(0, std::vector<float>(weights), {}, experts, hidden, options, 4); };
  };
  expect_part(refusal_in(make(1025, 64, 1025 * 64, {})), "1025 experts");
  expect_part(refusal_in(make(8, 72, 8 * 72, {})), "hidden size of 72");
  expect_part(refusal_in(make(8, 64, 100, {})), "100 weights");
  expect_part(refusal_in(make(8, 64, 8 * 64, {Score::softmax, 9, 1, 1, true, 1.0f})), "top-k is 9");
  const DeviceRouter router(0, std::vector<float>(512), {}, 8, 64, {}, 4);
  Buffer<int> tokens(0, 1);
  Buffer<bf16> hidden(0, 4 * 64 + 1);
  Buffer<std::int32_t> ids(0, 4);
  Buffer<float> weights(0, 4);
  const DeviceInput input{tokens.data(), hidden.data(), nullptr, nullptr, {}};
  expect_part(refusal_in([&] { router.route(input, 5, ids.data(), weights.data(), nullptr); }), "5 tokens");
  expect_part(refusal_in([&] { router.route(input, 4, nullptr, weights.data(), nullptr); }), "null");
  const DeviceInput crooked{tokens.data(), hidden.data() + 1, nullptr, nullptr, {}};
  expect_part(refusal_in([&] { router.route(crooked, 4, ids.data(), weights.data(), nullptr); }), "16 bytes");
}

/// Layers whose weights have a router, a GPU each, in the bed's workspace.
std::vector<DeviceLayer> layers_with_router(LayerBed& bed, const Case& c, const LayerSource& source, const LayerRouter& router) {
  std::vector<DeviceLayer> layers;
  for (std::size_t gpu = 0; gpu < bed.workspace().gpus(); ++gpu) {
    std::vector<LayerWeights> weights;
    for (int local = 0; local < bed.workspace().ranks_on(gpu); ++local) {
      weights.push_back(LayerWeights::load(source, c.placement, bed.workspace().first_rank(gpu) + local));
      weights.back().router = router;
    }
    layers.emplace_back(bed.workspace(), gpu, bed.memory(), weights, c.options);
  }
  return layers;
}

std::vector<DeviceInput> without_ids(std::vector<DeviceInput> inputs) {
  for (DeviceInput& input : inputs) input.ids = nullptr, input.weights = nullptr;
  return inputs;
}

/// The layer's own choices against the host's choices brought along; called and, where no host waits, captured.
void expect_choices_inside(Case c, bool captured) {
  SCOPED_TRACE(text_of(c));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  LayerRouter router{layer.router_weights(), layer.router_bias(), {}};
  router.options = {Score::sqrtsoftplus, c.layer.shape.topk, 1, 1, true, 1.5f};
  Tokens tokens = draw_tokens(c, c.seed);
  const auto logits = router_logits(tokens.hidden, router.weights, c.all_tokens(), c.layer.shape.hidden, c.layer.shape.experts);
  tokens.routing = route(logits, router.bias, c.all_tokens(), c.layer.shape.experts, router.options);
  LayerBed bed({{&source, &c}});
  std::vector<DeviceLayer> routed = layers_with_router(bed, c, source, router);
  bed.load(c, tokens);
  const std::vector<bf16> wanted = bed.call(c);
  const auto forward = [&](std::size_t gpu) {
    routed[gpu].forward(without_ids(bed.inputs(gpu)), step_of(c), bed.outputs(gpu), bed.streams()[gpu]);
  };
  const auto outputs = [&] {
    for (cudaStream_t stream : bed.streams()) wait_for(stream, "a layer with a router", std::chrono::seconds(90));
    for (DeviceLayer& one : routed) one.throw_if_failed();
    return bed.fetch(c);
  };
  bed.load(c, tokens);
  for (std::size_t gpu = 0; gpu < routed.size(); ++gpu)
    routed[gpu].begin(without_ids(bed.inputs(gpu)), step_of(c), bed.streams()[gpu]);
  for (std::size_t gpu = 0; gpu < routed.size(); ++gpu) routed[gpu].end(bed.outputs(gpu), bed.streams()[gpu]);
  EXPECT_EQ(different_bits(outputs(), wanted), 0u) << "called";
  if (!captured) return;
  const LayerGraphs graphs = bed.capture_calls(forward);
  for (int replay = 0; replay < 2; ++replay) {
    bed.load(c, tokens);
    bed.launch(graphs);
    EXPECT_EQ(different_bits(outputs(), wanted), 0u) << "captured";
  }
}

TEST(RouterGpu, InsideALayerByEveryWay) {
  SKIP_WITHOUT_GPU();
  for (const Route& route : all_routes) {
    for (const bool tensor_parallel : {false, true}) {
      Case c = with_shared(plain_case(4, WeightKind::mxfp4), WeightKind::mxfp4, false);
      c.take(route);
      c.layer.selection_bias = true;
      if (tensor_parallel) make_tensor_parallel(c);
      expect_choices_inside(c, route.way != Way::normal);
      if (HasFailure()) return;
    }
  }
  Case mega = plain_case(2, WeightKind::mxfp4);
  mega.take({Way::mega, Reduce::rank});
  expect_choices_inside(mega, true);
}

TEST(RouterGpu, InsideALayerWhoseCallsAreSplit) {
  SKIP_WITHOUT_GPU();
  Case c = plain_case(2, WeightKind::bf16);
  c.take({Way::low_latency, Reduce::rank});
  c.options.overflow = Overflow::split;
  c.options.cap = 10;  // passes of 10, 10 and 4
  expect_choices_inside(c, true);
}

TEST(RouterGpu, ALayerWithoutARouterSaysSo) {
  SKIP_WITHOUT_GPU();
  const Case c = plain_case(2, WeightKind::bf16);
  const std::string text = refusal_of(c, [](LayerBed& bed) {
    bed.layer(0, 0).begin(without_ids(bed.inputs(0)), {8, Phase::decode}, bed.streams()[0]);
  });
  EXPECT_NE(text.find("LayerWeights::router"), std::string::npos) << text;
}

}  // namespace
}  // namespace heddle::layer_test
