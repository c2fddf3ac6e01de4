// One workspace for several layers, steps that ranks agree on, caps, refused input, a stalled rank: every error is
// everybody's, and the next call works.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds patience(60000);  ///< a deadline that no test reaches

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// A layer of its own shape and way among others.
struct Member {
  Case c;
  std::unique_ptr<SyntheticLayer> layer;
  LayerSource source;
};

Member member(const Case& c) {
  Member result{c, std::make_unique<SyntheticLayer>(c.layer), {}};
  result.source = source_of(*result.layer, c);
  return result;
}

/// The layers of one context on one rank, in a workspace that is as large as the largest needs.
class Context {
 public:
  Context(Group& group, const std::vector<Member>& members) : members_(members) {
    std::vector<LayerWeights> weights;
    ExchangeMemory memory;
    std::string configuration;
    for (const Member& m : members) {
      weights.push_back(LayerWeights::load(m.source, m.c.placement, group.rank()));
      memory.include(layer_memory(weights.back(), m.c.options));
      configuration += describe(weights.back(), m.c.options);
    }
    workspace_ = std::make_unique<Workspace>(group, memory.heap_bytes(group.ranks()), configuration);
    for (std::size_t i = 0; i < members.size(); ++i)
      layers_.emplace_back(*workspace_, memory, std::move(weights[i]), members[i].c.options);
  }

  std::vector<bf16> call(std::size_t which, const Tokens& tokens) {
    return layer_test::call(members_[which].c, layers_[which], tokens, workspace_->group().rank());
  }
  MoeLayer& layer(std::size_t which) { return layers_[which]; }
  Workspace& workspace() { return *workspace_; }

 private:
  const std::vector<Member>& members_;
  std::unique_ptr<Workspace> workspace_;
  std::vector<MoeLayer> layers_;
};

/// Layers of all ways and any shape, called in any order: each gives what it gives alone.
void expect_layers_do_not_disturb_each_other(std::uint64_t seed, bool tensor_parallel_too) {
  Chance chance(seed);
  const int ranks = chance.one_of({1, 2, 3, 5, 8});
  std::vector<Member> members;
  for (std::size_t i = 0; i < std::size(host_routes) + 1; ++i) {
    Case c = random_case(seed + 10 * i, ranks);
    c.take(host_routes[i % std::size(host_routes)]);
    if (tensor_parallel_too && chance.one_in(3)) make_tensor_parallel(c);
    members.push_back(member(c));
  }
  constexpr std::size_t calls = 30;
  std::vector<std::size_t> order;
  std::vector<std::vector<Tokens>> batches(members.size());
  std::vector<std::vector<std::vector<bf16>>> alone(members.size());
  for (std::size_t m = 0; m < members.size(); ++m) {
    for (std::uint64_t batch = 0; batch < 2; ++batch) {
      batches[m].push_back(draw_tokens(members[m].c, seed + batch));
      alone[m].push_back(run_layer(members[m].source, members[m].c, batches[m].back()).outputs);
    }
  }
  for (std::size_t i = 0; i < calls; ++i) order.push_back(index(chance.between(0, static_cast<int>(members.size()) - 1)));
  std::atomic<bool> is_wrong{false};
  run_ranks(ranks, {patience}, [&](Group& group) {
    Context context(group, members);
    Chance pause(seed + index(group.rank()));
    for (std::size_t i = 0; i < calls; ++i) {
      const std::size_t m = order[i];
      const std::size_t batch = i % 2;
      if (pause.one_in(5)) std::this_thread::sleep_for(std::chrono::microseconds(pause.between(0, 500)));
      const std::vector<bf16> wanted = part_of(members[m].c, alone[m][batch], group.rank());
      if (different_bits(context.call(m, batches[m][batch]), wanted) != 0) {
        is_wrong = true;
        ADD_FAILURE() << "call " << i << " on rank " << group.rank() << ": " << text_of(members[m].c);
      }
    }
    context.workspace().close();
  });
}

// ---- errors ----------------------------------------------------------------------------------------

/// Three ranks with four experts each and shared ones; the way and the seed vary.
Case plain_case(std::uint64_t seed, const Route& route) {
  Case c;
  c.seed = seed;
  c.layer.shape = {128, 64, 12, 3, std::nullopt};
  c.layer.kind = WeightKind::fp8_block;
  c.layer.shared_kind = WeightKind::bf16;
  c.layer.shared_intermediate = 64;
  c.layer.seed = seed;
  c.placement = Placement::contiguous(12, 3);
  c.tokens = {5, 0, 6};
  c.options.cap = 6;
  c.take(route);
  return c;
}

/// Every rank calls `spoilt` on its layer, which must fail on all, then (after a reset, if the failure wants one) the right
/// call, which must give what it gives alone.
void expect_recovery(const Case& c, bool wants_reset, const std::function<void(MoeLayer&, const Tokens&, Group&)>& spoilt) {
  SCOPED_TRACE(text_of(c));
  std::vector<Member> members;
  members.push_back(member(c));
  const Tokens tokens = draw_tokens(c, c.seed);
  const std::vector<bf16> alone = run_layer(members[0].source, c, tokens).outputs;
  run_ranks(c.ranks(), {patience}, [&](Group& group) {
    Context context(group, members);
    EXPECT_EQ(different_bits(context.call(0, tokens), part_of(c, alone, group.rank())), 0u) << "before";
    group.barrier("before the failure");  // or it could end the call before on ranks that are still in it
    spoilt(context.layer(0), tokens, group);
    if (wants_reset) context.workspace().reset();
    EXPECT_EQ(different_bits(context.call(0, tokens), part_of(c, alone, group.rank())), 0u) << "after";
    context.workspace().close();
  });
}

template <class Wanted>
void expect_thrown(const std::function<void()>& call, const std::function<void(const Wanted&)>& check) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Wanted& error) {
    check(error);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
  }
}

bool has(const std::exception& error, const std::string& part) { return std::string(error.what()).find(part) != std::string::npos; }

std::vector<Case> cases_of_all_routes(std::uint64_t seed) {
  std::vector<Case> cases;
  for (const Route& route : host_routes) {
    cases.push_back(plain_case(seed, route));
    cases.push_back(plain_case(seed, route));
    make_tensor_parallel(cases.back());
  }
  return cases;
}

/// What every rank sees alike is thrown alike, and nothing needs a reset.
TEST(LayerWorkspace, StepAboveTheCap) {
  for (const Case& c : cases_of_all_routes(announced_seed())) {
    expect_recovery(c, false, [&](MoeLayer& layer, const Tokens& tokens, Group& group) {
      LayerInput input = input_of(c, tokens, group.rank());
      const int most = c.options.tensor_parallel ? c.options.cap * c.ranks() : c.options.cap;
      const Routing none{most + 1, c.layer.shape.topk, std::vector<std::int32_t>(index((most + 1) * c.layer.shape.topk), -1), {}};
      const std::vector<float> weights(none.ids.size());
      const std::vector<bf16> hidden(index((most + 1) * c.layer.shape.hidden));
      if (c.options.tensor_parallel) input = {most + 1, hidden.data(), none.ids.data(), weights.data()};
      std::vector<bf16> out(index((most + 1) * c.layer.shape.hidden));
      expect_thrown<InputError>(
          [&] {
            layer.forward(input, {most + 1, Phase::decode}, out.data());
          },
          [&](const InputError& error) { EXPECT_TRUE(has(error, std::to_string(c.options.cap))) << error.what(); });
    });
  }
}

/// What one rank alone sees is an InputError there and a FaultError elsewhere, at once.
void expect_refused_on_one(const Case& c, const std::function<void(LayerInput&, std::vector<std::int32_t>&)>& spoil,
                           const std::string& part) {
  constexpr int wrong_rank = 2;
  expect_recovery(c, true, [&](MoeLayer& layer, const Tokens& tokens, Group& group) {
    const int rank = group.rank();
    LayerInput input = input_of(c, tokens, rank);
    std::vector<bf16> out(index((input.tokens + 1) * c.layer.shape.hidden));
    std::vector<std::int32_t> ids(input.ids, input.ids + index(input.tokens * c.layer.shape.topk));
    input.ids = ids.data();
    if (rank == wrong_rank) spoil(input, ids);
    const auto call = [&] { layer.forward(input, step_of(c), out.data()); };
    const auto since = std::chrono::steady_clock::now();
    if (rank == wrong_rank) {
      expect_thrown<InputError>(call, [&](const InputError& error) { EXPECT_TRUE(has(error, part)) << error.what(); });
    } else {
      expect_thrown<FaultError>(call, [&](const FaultError& error) { EXPECT_EQ(error.fault().rank, wrong_rank) << error.what(); });
    }
    EXPECT_LT(std::chrono::steady_clock::now() - since, patience / 2) << "waited for the deadline";
  });
}

TEST(LayerWorkspace, WrongChoicesOnOneRank) {
  const std::uint64_t seed = announced_seed();
  for (const Route& route : host_routes) {
    const Case c = plain_case(seed, route);
    expect_refused_on_one(
        c, [](LayerInput&, std::vector<std::int32_t>& ids) { ids[7] = 12; }, "12");
    expect_refused_on_one(
        c, [](LayerInput&, std::vector<std::int32_t>& ids) { ids[4] = -2; }, "-2");
    expect_refused_on_one(
        c, [](LayerInput&, std::vector<std::int32_t>& ids) { ids[3] = ids[5] = 1; }, "1");
  }
}

TEST(LayerWorkspace, MoreTokensThanTheStepSaysOnOneRank) {
  const std::uint64_t seed = announced_seed();
  for (const Case& c : cases_of_all_routes(seed)) {
    const int said = step_of(c).max_tokens;
    const auto one_more = [](LayerInput& input, std::vector<std::int32_t>&) { ++input.tokens; };
    expect_refused_on_one(c, one_more, std::to_string(said + 1));
    const auto negative = [](LayerInput& input, std::vector<std::int32_t>&) { input.tokens = -1; };
    expect_refused_on_one(c, negative, "-1");
    if (!c.options.tensor_parallel) continue;
    const auto part_of_the_batch = [](LayerInput& input, std::vector<std::int32_t>&) { --input.tokens; };
    expect_refused_on_one(c, part_of_the_batch, "whole batch");
  }
}

TEST(LayerWorkspace, TokensWithoutData) {
  const std::uint64_t seed = announced_seed();
  for (const Case& c : cases_of_all_routes(seed)) {
    expect_refused_on_one(
        c, [](LayerInput& input, std::vector<std::int32_t>&) { input.hidden = nullptr; }, "without hidden states");
    expect_refused_on_one(
        c, [](LayerInput& input, std::vector<std::int32_t>&) { input.weights = nullptr; }, "without hidden states");
  }
}

/// A rank that has nowhere to put the outputs says so before the others wait for it.
TEST(LayerWorkspace, TokensWithoutMemoryForOutputs) {
  const std::uint64_t seed = announced_seed();
  for (const Case& c : cases_of_all_routes(seed)) {
    constexpr int wrong_rank = 2;
    expect_recovery(c, true, [&](MoeLayer& layer, const Tokens& tokens, Group& group) {
      const LayerInput input = input_of(c, tokens, group.rank());
      std::vector<bf16> out(index((input.tokens + 1) * c.layer.shape.hidden));
      const bool wrong = group.rank() == wrong_rank;
      const auto call = [&] { layer.forward(input, step_of(c), wrong ? nullptr : out.data()); };
      const auto since = std::chrono::steady_clock::now();
      if (wrong) {
        expect_thrown<InputError>(
            call, [&](const InputError& error) { EXPECT_TRUE(has(error, "no memory for the outputs")) << error.what(); });
      } else {
        expect_thrown<FaultError>(call,
                                  [&](const FaultError& error) { EXPECT_EQ(error.fault().rank, wrong_rank) << error.what(); });
      }
      EXPECT_LT(std::chrono::steady_clock::now() - since, patience / 2) << "waited for the deadline";
    });
  }
}

/// Without tokens a rank may bring no memory at all, and others may: nothing that all must do alike may depend on it.
TEST(LayerWorkspace, NobodyHasTokensAndSomeHaveMemory) {
  const std::uint64_t seed = announced_seed();
  for (Case c : cases_of_all_routes(seed)) {
    c.tokens = {0, 0, 0};
    SCOPED_TRACE(text_of(c));
    std::vector<Member> members;
    members.push_back(member(c));
    run_ranks(c.ranks(), {patience}, [&](Group& group) {
      Context context(group, members);
      bf16 out = untouched;
      for (int call = 0; call < 3; ++call) context.layer(0).forward({}, step_of(c), group.rank() == call ? &out : nullptr);
      EXPECT_EQ(out.bits, untouched.bits);
      context.workspace().close();
    });
  }
}

/// A rank that does not call in time: the others name it within twice the deadline, and it hears of it when it comes.
TEST(LayerWorkspace, AStalledRankIsNamedAndTheNextCallWorks) {
  const std::uint64_t seed = announced_seed();
  const milliseconds deadline(is_sanitized ? 1500 : 400);
  for (const Case& c : cases_of_all_routes(seed)) {
    if (c.options.tensor_parallel && c.options.way != Way::gather) continue;
    constexpr int stalled = 1;
    std::atomic<int> gave_up{0};
    expect_recovery(c, true, [&](MoeLayer& layer, const Tokens& tokens, Group& group) {
      const LayerInput input = input_of(c, tokens, group.rank());
      std::vector<bf16> out(index((input.tokens + 1) * c.layer.shape.hidden));
      group.set_deadline(deadline);
      while (group.rank() == stalled && gave_up < 2) std::this_thread::sleep_for(milliseconds(1));
      const auto since = std::chrono::steady_clock::now();
      expect_thrown<FaultError>([&] { layer.forward(input, step_of(c), out.data()); },
                                [&](const FaultError& error) { EXPECT_EQ(error.fault().peer, stalled) << error.what(); });
      EXPECT_LT(std::chrono::steady_clock::now() - since, 2 * deadline) << "rank " << group.rank();
      if (group.rank() != stalled) ++gave_up;
      group.set_deadline(patience);
    });
  }
}

TEST(LayerWorkspace, RanksAgreeOnTheStep) {
  for (const int ranks : {1, 3, 8}) {
    run_ranks(ranks, {}, [ranks](Group& group) {
      const Step decode = agree_step(group, group.rank() * 10, Phase::decode);
      EXPECT_EQ(decode.max_tokens, (ranks - 1) * 10);
      EXPECT_EQ(decode.phase, Phase::decode);
      const Step prefill = agree_step(group, 0, group.rank() == ranks - 1 ? Phase::prefill : Phase::decode);
      EXPECT_EQ(prefill.max_tokens, 0);
      EXPECT_EQ(prefill.phase, Phase::prefill);
    });
  }
}

TEST(LayerWorkspace, ManyLayersInAnyOrder) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(24)) && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(::testing::Message() << "HEDDLE_SEED=" << seed + i << " begins with this case");
    expect_layers_do_not_disturb_each_other(seed + i, i % 2 == 1);
  }
}

}  // namespace
}  // namespace heddle::layer_test
