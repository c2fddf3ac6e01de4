// A layer of the host engine that counts loads and changes its placement between calls: its cells, and how experts come to them.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "balancing/balancer.hpp"
#include "balancing/cells.hpp"
#include "balancing/look.hpp"
#include "balancing/migration.hpp"
#include "group/agreement.hpp"
#include "heddle/balancing.hpp"
#include "heddle/error.hpp"
#include "signal/words.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// What is on its way to a rank: staged beside the cells until the switch.
struct Arrivals {
  std::vector<Move> moves;
  std::vector<std::byte> staged;  ///< a cell a move
  CellCopies copies;
};

}  // namespace

struct BalancedLayer::Impl final : BalancingEngine {
  Impl(Workspace& given, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
       const LayerOptions& chosen, const BalancingOptions& balancing)
      : workspace(given), options(chosen), topk(source.shape.topk), rank(given.group().rank()) {
    step_together(given.group(), "the options of a balanced layer", [&] {
      check_balancing(source.shape, first, chosen, balancing, given.group().nodes());
      if (first.ranks() != given.group().ranks())
        throw InputError(fmt::format("a placement on {} ranks in a group of {}", first.ranks(), given.group().ranks()));
      layout.emplace(source.expert(first.experts_of(rank).front()));
    });
    compare_configurations(given.group(), describe_balancing(first, balancing) + fmt::format("cell bytes={}\n", layout->bytes()));
    stride = align_up(layout->bytes(), 128);
    heap = given.group().create_heap(index(first.placement().max_local_experts()) * stride);
    balancer.emplace(given.group(), *this, first, balancing);
    counts.assign(index(first.experts()), 0);
    step_together(given.group(), "the balanced layer", [&] { make_layer(memory, source, first); });
  }

  void make_layer(const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& map) {
    LayerWeights weights = LayerWeights::common(physical_source(source, map), map.placement());
    const auto own = map.experts_of(rank);
    for (int place = 0; place < static_cast<int>(own.size()); ++place) {
      const int expert = own[index(place)];
      layout->store(source.expert(expert), cell(place), fmt::format("expert {}", expert).c_str());
      weights.experts.push_back(layout->view(cell(place)));
    }
    layer.emplace(workspace, memory, std::move(weights), options);
  }

  std::byte* cell(int place) const { return heap.view.mine<std::byte>(index(place) * stride); }

  void forward(const LayerInput& input, const Step& step, bf16* out) {
    const LayerInput chosen = choose(input);
    layer->forward(chosen, step, out);
    balancer->after_call();
  }
  LayerInput choose(const LayerInput& input);

  // A call that has returned has ended.
  std::int64_t ended(std::int64_t call) override { return call; }
  bool has_all_ranks() const override { return std::ranges::count(workspace.live(), false) == 0; }
  int most_arrivals() const override { return balancer->map().placement().max_local_experts(); }
  void put_counts_aside() override {
    aside = counts;
    std::ranges::fill(counts, 0);
  }
  std::vector<std::int64_t> counts_aside() override { return aside; }
  void plan(const ReplicaMap& from, const ReplicaMap& to) override;
  std::uint64_t copy_some(std::size_t bytes) override;
  bool has_copied_all() override { return arrivals->copies.is_complete(); }
  std::int64_t put_in_place(const ReplicaMap& to) override;
  void forget() override {
    arrivals.reset();
    std::ranges::fill(counts, 0);
  }

  Workspace& workspace;
  LayerOptions options;
  int topk, rank;
  std::optional<CellLayout> layout;
  std::size_t stride = 0;  ///< bytes from a cell to the next one
  HeapMapping heap;        ///< of cells, [places] a rank
  std::optional<Balancer> balancer;
  std::optional<MoeLayer> layer;
  std::vector<std::int64_t> counts, aside;  ///< [experts]
  std::vector<std::int32_t> physical;       ///< ids of this call
  std::optional<Arrivals> arrivals;
};

LayerInput BalancedLayer::Impl::choose(const LayerInput& input) {
  if (input.tokens <= 0 || input.ids == nullptr) return input;
  const ReplicaMap& map = balancer->map();
  const std::span ids(input.ids, index(input.tokens) * index(topk));
  try {
    check_choices(ids, input.tokens, topk, map.experts());
  } catch (const InputError&) {
    workspace.refuse(static_cast<std::uint64_t>(map.experts()), 0);  // nobody shall wait for this rank
    throw;
  }
  physical.resize(ids.size());
  choose_copies(map, balancer->options().rule, options.tensor_parallel ? 0 : rank, ids, physical, counts);
  LayerInput chosen = input;
  chosen.ids = physical.data();
  return chosen;
}

void BalancedLayer::Impl::plan(const ReplicaMap& from, const ReplicaMap& to) {
  check_live_copies(from, workspace.live());
  std::vector<Move> moves = moves_of(from, to, rank, balancer->options().nodes, workspace.live());
  const std::size_t bytes = layout->bytes(), number = moves.size();
  arrivals.emplace(Arrivals{std::move(moves), std::vector<std::byte>(number * bytes), CellCopies(number, bytes)});
}

std::uint64_t BalancedLayer::Impl::copy_some(std::size_t most) {
  return arrivals->copies.advance(most, [this](std::size_t i, std::size_t offset, std::size_t bytes) {
    const Move& move = arrivals->moves[i];
    const auto* from = heap.view.at<const std::byte>(move.from_rank, index(move.from_place) * stride);
    std::memcpy(arrivals->staged.data() + i * layout->bytes() + offset, from + offset, bytes);
  });
}

std::int64_t BalancedLayer::Impl::put_in_place(const ReplicaMap&) {
  for (std::size_t i = 0; i < arrivals->moves.size(); ++i) {
    const int place = arrivals->moves[i].place;
    std::memcpy(cell(place), arrivals->staged.data() + i * layout->bytes(), layout->bytes());
    layer->update_expert(place, layout->view(cell(place)));
  }
  const auto came = static_cast<std::int64_t>(arrivals->moves.size());
  arrivals.reset();
  return came;
}

BalancedLayer::BalancedLayer(Workspace& workspace, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
                             const LayerOptions& options, const BalancingOptions& balancing)
    : impl_(std::make_unique<Impl>(workspace, memory, source, first, options, balancing)) {}
BalancedLayer::~BalancedLayer() = default;
BalancedLayer::BalancedLayer(BalancedLayer&&) noexcept = default;
BalancedLayer& BalancedLayer::operator=(BalancedLayer&&) noexcept = default;

void BalancedLayer::forward(const LayerInput& input, const Step& step, bf16* out) { impl_->forward(input, step, out); }
void BalancedLayer::move_to(const ReplicaMap& map) { impl_->balancer->move_to(map); }
bool BalancedLayer::is_moving() const { return impl_->balancer->is_moving(); }
const ReplicaMap& BalancedLayer::map() const { return impl_->balancer->map(); }
const BalancingReport& BalancedLayer::report() const { return impl_->balancer->report(); }
const LayerReport& BalancedLayer::layer_report() const { return impl_->layer->report(); }
std::span<const std::int64_t> BalancedLayer::counts() const { return impl_->counts; }
void BalancedLayer::reset() { impl_->balancer->reset(); }
void BalancedLayer::close() {
  impl_->workspace.group().release_heap(impl_->heap);
  impl_->balancer->close();
}

}  // namespace heddle
