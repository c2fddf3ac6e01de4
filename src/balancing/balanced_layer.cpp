// A layer that counts loads and changes its placement between calls (docs/balancing.md has the argument why this is safe).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

#include "balancing/cells.hpp"
#include "balancing/migration.hpp"
#include "group/agreement.hpp"
#include "heddle/balancing.hpp"
#include "heddle/error.hpp"
#include "signal/words.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Where things lie in a rank's part of the heap of weights. Words and counts are there twice: who has gone on to the next change
/// or look may write while another still reads those of the one before, but not those of the one after.
struct BalancingArea {
  std::size_t counts = 0, cells = 0, cell_bytes = 0, end = 0;
  std::size_t counts_stride = 0;

  BalancingArea(int experts, int places, std::size_t cell) {
    counts = align_up(2 * sizeof(Word), 128);
    counts_stride = align_up(index(experts) * sizeof(std::int64_t), 128);
    cells = counts + 2 * counts_stride;
    cell_bytes = align_up(cell, 128);
    end = cells + index(places) * cell_bytes;
  }
  std::size_t ready_at(std::int64_t change) const { return static_cast<std::size_t>(change % 2) * sizeof(Word); }
  std::size_t counts_at(std::int64_t look) const { return counts + static_cast<std::size_t>(look % 2) * counts_stride; }
  std::size_t cell_at(int place) const { return cells + index(place) * cell_bytes; }
};

void check(const LayerSource& source, const ReplicaMap& map, const LayerOptions& options, const BalancingOptions& balancing) {
  if (options.expert_slices)
    throw InputError("slices of experts are on every rank: there is nothing to balance; leave expert_slices");
  if (map.experts() != source.shape.experts)
    throw InputError(fmt::format("a placement of {} experts for a layer of {}", map.experts(), source.shape.experts));
  if (!map.is_even()) {
    throw InputError(
        fmt::format("a placement of {} copies on {} ranks of up to {} each; a layer that changes places needs as many on "
                    "every rank",
                    map.physical(), map.ranks(), map.placement().max_local_experts()));
  }
  if (balancing.every && *balancing.every < 1)
    throw InputError(fmt::format("a look at the loads every {} calls", *balancing.every));
  if (balancing.nodes < 1 || map.ranks() % balancing.nodes != 0)
    throw InputError(fmt::format("{} ranks of {} nodes: every node has as many", map.ranks(), balancing.nodes));
  if (balancing.copy_bytes == 0) throw InputError("copies of 0 bytes a call never end");
}

std::string describe(const ReplicaMap& map, const BalancingOptions& o, std::size_t cell_bytes) {
  std::string text =
      fmt::format("copy rule={}\nnodes={}\ngroups={}\nlooks every={}\nworth={}\ncell bytes={}\n", static_cast<int>(o.rule), o.nodes,
                  o.groups.value_or(map.experts()), o.every.value_or(0), o.worth, cell_bytes);
  for (int rank = 0; rank < map.ranks(); ++rank)
    text += fmt::format("experts of rank {}={}\n", rank, fmt::join(map.experts_of(rank), ","));
  return text;
}

/// Max/mean of rows by rank, if one source brought all.
double imbalance_of(const ReplicaMap& map, CopyRule rule, std::span<const std::int64_t> counts) {
  std::vector<int> rows;
  for (const std::int64_t count : counts)
    rows.push_back(static_cast<int>(std::min<std::int64_t>(count, std::numeric_limits<int>::max() / map.experts())));
  const std::vector<int> shares = share_rows(map, rule, 0, rows);
  std::vector<double> sums(index(map.ranks()), 0.0);
  for (int copy = 0; copy < map.physical(); ++copy) sums[index(map.placement().rank_of(copy))] += shares[index(copy)];
  return max_over_mean(sums);
}

}  // namespace

struct BalancedLayer::Impl {
  Impl(Workspace& given, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
       const LayerOptions& chosen, const BalancingOptions& how)
      : workspace(given), options(chosen), balancing(how), map(first), topk(source.shape.topk), rank(given.group().rank()) {
    step_together(given.group(), "the options of a balanced layer", [&] {
      check(source, first, chosen, how);
      if (first.ranks() != given.group().ranks())
        throw InputError(fmt::format("a placement on {} ranks in a group of {}", first.ranks(), given.group().ranks()));
      layout.emplace(source.expert(first.experts_of(rank).front()));
    });
    compare_configurations(given.group(), describe(first, how, layout->bytes()));
    area.emplace(first.experts(), first.placement().max_local_experts(), layout->bytes());
    heap = given.group().create_heap(area->end);
    counts.assign(index(first.experts()), 0);
    step_together(given.group(), "the balanced layer", [&] { make_layer(memory, source); });
  }

  void make_layer(const ExchangeMemory& memory, const LayerSource& source) {
    LayerWeights weights = LayerWeights::common(physical_source(source, map), map.placement());
    const auto own = map.experts_of(rank);
    for (int place = 0; place < static_cast<int>(own.size()); ++place) {
      const int expert = own[index(place)];
      layout->store(source.expert(expert), cell(place), fmt::format("expert {}", expert).c_str());
      weights.experts.push_back(layout->view(cell(place)));
    }
    layer.emplace(workspace, memory, std::move(weights), options);
  }

  std::byte* cell(int place) const { return heap.view.mine<std::byte>(area->cell_at(place)); }
  Word& ready(int of_rank) const { return *heap.view.at<Word>(of_rank, area->ready_at(report.switches)); }
  bool is_live(int of_rank) const { return workspace.live()[index(of_rank)]; }

  void forward(const LayerInput& input, const Step& step, bf16* out);
  LayerInput choose(const LayerInput& input);
  void say_ready();
  bool all_ready() const;
  void switch_over();
  bool looks_now() const {
    return balancing.every && report.calls % *balancing.every == 0 && !migration &&
           std::ranges::count(workspace.live(), false) == 0;
  }
  void tell_counts();
  void look();
  void begin(const ReplicaMap& to);
  void copy_some();
  void reset();

  Workspace& workspace;
  LayerOptions options;
  BalancingOptions balancing;
  ReplicaMap map;
  int topk, rank;
  std::optional<CellLayout> layout;
  std::optional<BalancingArea> area;
  HeapMapping heap;
  std::optional<MoeLayer> layer;
  std::vector<std::int64_t> counts;    ///< [experts], since the last look
  std::vector<std::int32_t> physical;  ///< ids of this call
  std::optional<Migration> migration;
  std::int64_t began = 0;  ///< calls before the change that is under way
  bool said_ready = false;
  BalancingReport report;
};

LayerInput BalancedLayer::Impl::choose(const LayerInput& input) {
  if (input.tokens <= 0 || input.ids == nullptr) return input;
  const std::span ids(input.ids, index(input.tokens) * index(topk));
  try {
    check_choices(ids, input.tokens, topk, map.experts());
  } catch (const InputError&) {
    workspace.refuse(static_cast<std::uint64_t>(map.experts()), 0);  // nobody shall wait for this rank
    throw;
  }
  physical.resize(ids.size());
  choose_copies(map, balancing.rule, options.tensor_parallel ? 0 : rank, ids, physical, counts);
  LayerInput chosen = input;
  chosen.ids = physical.data();
  return chosen;
}

void BalancedLayer::Impl::forward(const LayerInput& input, const Step& step, bf16* out) {
  const LayerInput chosen = choose(input);
  ++report.calls;
  const bool looks = looks_now();
  if (looks) tell_counts();
  if (migration && migration->is_complete() && !said_ready) say_ready();
  layer->forward(chosen, step, out);
  // Whatever any rank wrote before this call can be read from here on.
  if (migration && all_ready()) switch_over();
  if (looks) look();
  if (migration) copy_some();
}

void BalancedLayer::Impl::say_ready() {
  std::atomic_ref<Word>(ready(rank)).store(static_cast<Word>(report.calls), std::memory_order_release);
  said_ready = true;
}

/// Did every rank say so before this call? Of words that were written since, some ranks see the new one and some the old one;
/// neither is a call in (began, calls], so all ranks come to the same answer.
bool BalancedLayer::Impl::all_ready() const {
  for (int peer = 0; peer < map.ranks(); ++peer) {
    if (!is_live(peer)) continue;
    const auto said = static_cast<std::int64_t>(std::atomic_ref<Word>(ready(peer)).load(std::memory_order_acquire));
    if (said <= began || said > report.calls) return false;
  }
  return true;
}

void BalancedLayer::Impl::switch_over() {
  const auto since = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < migration->moves().size(); ++i) {
    const int place = migration->moves()[i].place;
    std::memcpy(cell(place), migration->fetched(i), layout->bytes());
    layer->update_expert(place, layout->view(cell(place)));
  }
  report.moved += static_cast<std::int64_t>(migration->moves().size());
  map = migration->to();
  migration.reset();
  ++report.switches;
  report.switch_seconds += seconds_since(since);
}

void BalancedLayer::Impl::tell_counts() {
  std::memcpy(heap.view.mine<std::byte>(area->counts_at(report.looks)), counts.data(), counts.size() * sizeof(std::int64_t));
}

void BalancedLayer::Impl::look() {
  std::vector<std::int64_t> all(counts.size(), 0);
  for (int peer = 0; peer < map.ranks(); ++peer) {
    const auto* theirs = heap.view.at<const std::int64_t>(peer, area->counts_at(report.looks));
    for (std::size_t expert = 0; expert < all.size(); ++expert) all[expert] += theirs[expert];
  }
  ++report.looks;
  std::ranges::fill(counts, 0);
  const std::vector<double> loads(all.begin(), all.end());
  const ReplicaMap wanted =
      settle(balance_experts(loads, {map.ranks(), map.physical() - map.experts(), balancing.nodes, balancing.groups}), map,
             balancing.nodes);
  report.imbalance = imbalance_of(map, balancing.rule, all);
  report.expected = imbalance_of(wanted, balancing.rule, all);
  if (report.expected < report.imbalance * (1 - balancing.worth)) begin(wanted);
}

void BalancedLayer::Impl::begin(const ReplicaMap& to) {
  for (int expert = 0; expert < map.experts(); ++expert) {
    if (std::ranges::none_of(map.copies_of(expert), [&](int copy) { return is_live(map.placement().rank_of(copy)); }))
      throw InputError(fmt::format("expert {} has no copy on a live rank", expert));
  }
  const auto read = [this](const Move& move, std::size_t offset, std::size_t bytes, std::byte* into) {
    std::memcpy(into, heap.view.at<const std::byte>(move.from_rank, area->cell_at(move.from_place) + offset), bytes);
  };
  migration.emplace(to, moves_of(map, to, rank, balancing.nodes, workspace.live()), layout->bytes(), read);
  began = report.calls;
  said_ready = false;
}

/// A change never begins and copies in the call of the last switch, so every rank has put the weights of that one in place.
void BalancedLayer::Impl::copy_some() {
  const auto since = std::chrono::steady_clock::now();
  report.copied_bytes += migration->advance(balancing.copy_bytes);
  report.copy_seconds += seconds_since(since);
}

void BalancedLayer::Impl::reset() {
  std::int64_t switches = 0, looks = 0, calls = 0;
  const std::string mine = fmt::format("{} {} {}", report.switches, report.looks, report.calls);
  for (const std::string& text : workspace.group().exchange(mine, "placements after a fault")) {
    std::istringstream numbers(text);  // empty for a dead rank
    for (std::int64_t* most : {&switches, &looks, &calls}) {
      std::int64_t number = 0;
      if (numbers >> number) *most = std::max(*most, number);
    }
  }
  // Nobody has switched unless all had said that they have everything.
  if (report.switches < switches) switch_over();
  migration.reset();
  report.looks = looks;
  report.calls = calls;
  std::ranges::fill(counts, 0);
  workspace.group().barrier("placements after a fault");  // no cell is read before it is in place
}

BalancedLayer::BalancedLayer(Workspace& workspace, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
                             const LayerOptions& options, const BalancingOptions& balancing)
    : impl_(std::make_unique<Impl>(workspace, memory, source, first, options, balancing)) {}
BalancedLayer::~BalancedLayer() = default;
BalancedLayer::BalancedLayer(BalancedLayer&&) noexcept = default;
BalancedLayer& BalancedLayer::operator=(BalancedLayer&&) noexcept = default;

void BalancedLayer::forward(const LayerInput& input, const Step& step, bf16* out) { impl_->forward(input, step, out); }
void BalancedLayer::move_to(const ReplicaMap& map) {
  if (impl_->migration) throw InputError("a change of placement is under way; the next one begins when it is done (is_moving)");
  if (!map.is_even() || map.physical() != impl_->map.physical() || map.ranks() != impl_->map.ranks() ||
      map.experts() != impl_->map.experts()) {
    throw InputError(fmt::format("a placement of {} copies of {} experts on {} ranks for a layer of {} of {} on {}", map.physical(),
                                 map.experts(), map.ranks(), impl_->map.physical(), impl_->map.experts(), impl_->map.ranks()));
  }
  impl_->begin(map);
}
bool BalancedLayer::is_moving() const { return impl_->migration.has_value(); }
const ReplicaMap& BalancedLayer::map() const { return impl_->map; }
const BalancingReport& BalancedLayer::report() const { return impl_->report; }
const LayerReport& BalancedLayer::layer_report() const { return impl_->layer->report(); }
std::span<const std::int64_t> BalancedLayer::counts() const { return impl_->counts; }
void BalancedLayer::reset() { impl_->reset(); }
void BalancedLayer::close() { impl_->workspace.group().release_heap(impl_->heap); }

}  // namespace heddle
