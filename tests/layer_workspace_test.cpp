// One workspace for several layers, steps that ranks agree on, caps, refused input, a stalled rank: every error is
// everybody's, and the next call works.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

using std::chrono::milliseconds;

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
      const ExchangeOptions exchange = exchange_options(weights.back(), m.c.options);
      memory.include(exchange_memory(exchange));
      configuration += describe(exchange);
    }
    workspace_ = std::make_unique<Workspace>(group, memory.heap_bytes(group.ranks()), configuration);
    for (std::size_t i = 0; i < members.size(); ++i) layers_.emplace_back(*workspace_, memory, std::move(weights[i]), members[i].c.options);
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
  for (std::size_t i = 0; i < std::size(all_routes) + 1; ++i) {
    Case c = random_case(seed + 10 * i, ranks);
    c.take(all_routes[i % std::size(all_routes)]);
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
  run_ranks(ranks, {milliseconds(20000)}, [&](Group& group) {
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

TEST(LayerWorkspace, ManyLayersInAnyOrder) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(24)) && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(::testing::Message() << "HEDDLE_SEED=" << seed + i << " begins with this case");
    expect_layers_do_not_disturb_each_other(seed + i, i % 2 == 1);
  }
}

}  // namespace
}  // namespace heddle::layer_test
