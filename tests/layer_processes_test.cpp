// Ranks as processes: the same bits as with threads, a killed rank named by the others, and the layer without it.
#include <sys/mman.h>

#include "layer_support.hpp"
#include "processes.hpp"

namespace heddle::layer_test {
namespace {

using std::chrono::milliseconds;

/// Values that children leave for the test.
class SharedValues {
 public:
  explicit SharedValues(std::size_t size) : size_(size) {
    void* address = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) throw std::runtime_error("mmap");
    values_ = static_cast<bf16*>(address);
  }
  ~SharedValues() { munmap(values_, bytes()); }
  SharedValues(const SharedValues&) = delete;
  SharedValues& operator=(const SharedValues&) = delete;
  bf16* begin() const { return values_; }
  std::vector<bf16> copy() const { return {values_, values_ + size_}; }

 private:
  std::size_t bytes() const { return (size_ + 1) * sizeof(bf16); }
  std::size_t size_;
  bf16* values_ = nullptr;
};

struct OneLayer {
  OneLayer(Group& group, const LayerSource& source, const Case& c) {
    LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    const ExchangeOptions exchange = exchange_options(weights, c.options);
    const ExchangeMemory memory = exchange_memory(exchange);
    workspace = std::make_unique<Workspace>(group, memory.heap_bytes(c.ranks()), describe(exchange));
    layer = std::make_unique<MoeLayer>(*workspace, memory, std::move(weights), c.options);
  }
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<MoeLayer> layer;
};

std::string group_name(const char* what) { return std::string("layer.") + what + "." + std::to_string(getpid()); }

TEST(LayerProcesses, GiveTheBitsOfThreads) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(24)); ++i) {
    Chance chance(seed + i + 1000000007);
    Case c = random_case(seed + i, chance.one_of({1, 2, 3, 8}));
    c.take(host_routes[(seed + i) % std::size(host_routes)]);
    c.options.runner = random_runner(chance, c.options.way);
    if (chance.one_in(4)) make_tensor_parallel(c);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const std::vector<bf16> wanted = run_layer(source, c, tokens).outputs;
    const SharedValues outputs(wanted.size());
    const std::string name = group_name("bits") + "." + std::to_string(i);
    const std::vector<int> statuses = run_processes(c.ranks(), [&](int rank) {
      const auto group = join_process_group(name, rank, c.ranks(), {milliseconds(60000)});
      const OneLayer one(*group, source, c);
      const std::vector<bf16> first = call(c, *one.layer, tokens, rank);
      EXPECT_EQ(different_bits(call(c, *one.layer, tokens, rank), first), 0u) << "the second call";
      if (!c.options.tensor_parallel) {
        std::copy(first.begin(), first.end(), outputs.begin() + c.first(rank) * c.layer.shape.hidden);
      } else if (rank == c.ranks() - 1) {
        std::copy(first.begin(), first.end(), outputs.begin());
      }
      one.workspace->close();
    });
    EXPECT_EQ(statuses, std::vector<int>(statuses.size(), 0));
    EXPECT_EQ(different_bits(outputs.copy(), wanted), 0u);
  }
}

/// The batch without the choices of experts on one rank, and without that rank's tokens.
Tokens without_rank(const Case& c, const Tokens& tokens, int dead) {
  Tokens left = tokens;
  for (std::int32_t& id : left.routing.ids) {
    if (id >= 0 && c.placement.rank_of(id) == dead) id = -1;
  }
  return left;
}

TEST(LayerProcesses, AKilledRankIsNamedAndThenLeftOut) {
  const std::uint64_t seed = announced_seed();
  const milliseconds deadline(is_sanitized ? 3000 : 700);
  for (const Route& route : host_routes) {
    constexpr int killed = 1;
    Case c = random_case(seed, 3);
    c.take(route);
    c.tokens = {4, 0, 3};
    c.options.cap = 4;
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const std::vector<bf16> wanted = run_layer(source, c, tokens).outputs;
    const std::vector<bf16> wanted_without = run_layer(source, c, without_rank(c, tokens, killed)).outputs;
    const SharedValues outputs(wanted.size());
    const std::string name = group_name("killed") + "." + std::to_string(&route - host_routes);
    const std::vector<int> statuses = run_processes(3, [&](int rank) {
      const auto group = join_process_group(name, rank, 3, {milliseconds(60000)});
      const OneLayer one(*group, source, c);
      EXPECT_EQ(different_bits(call(c, *one.layer, tokens, rank), part_of(c, wanted, rank)), 0u) << "before";
      group->barrier("before the kill");
      if (rank == killed) kill(getpid(), SIGKILL);
      group->set_deadline(deadline);
      const auto since = std::chrono::steady_clock::now();
      try {
        call(c, *one.layer, tokens, rank);
        ADD_FAILURE() << "rank " << rank << " saw nothing";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().peer, killed) << error.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - since, 2 * deadline);
      group->set_deadline(milliseconds(60000));
      one.workspace->reset({true, false, true});
      const std::vector<bf16> after = call(c, *one.layer, tokens, rank);
      EXPECT_EQ(different_bits(after, part_of(c, wanted_without, rank)), 0u) << "after";
      EXPECT_EQ(different_bits(call(c, *one.layer, tokens, rank), after), 0u) << "once more";
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, -SIGKILL, 0}));
  }
}

}  // namespace
}  // namespace heddle::layer_test
