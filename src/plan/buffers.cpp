// Buffers of one rank as the articles describe them; this library's own layouts report for themselves.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "mega/options.hpp"
#include "plan/ways.hpp"

namespace heddle {

std::uint64_t Buffer::bytes() const {
  return std::accumulate(regions.begin(), regions.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Region& region) { return sum + region.bytes; });
}

const Region& Buffer::region(std::string_view name) const {
  const auto found = std::find_if(regions.begin(), regions.end(), [&](const Region& one) { return one.name == name; });
  if (found == regions.end()) {
    throw InputError(fmt::format("this buffer has no region named {}", name));
  }
  return *found;
}

namespace {

Region region(std::string name, std::uint64_t rows, std::uint64_t row_bytes, std::string_view rows_formula) {
  return {std::move(name), rows, rows * row_bytes, fmt::format("{} rows ({}) x {} bytes", rows, rows_formula, row_bytes)};
}

/// The sizes that all ways share.
struct Sizes {
  std::uint64_t ranks, cap, topk, local_experts, group_rows, row, returned_row, routing;

  explicit Sizes(const PlanRequest& request)
      : ranks(static_cast<std::uint64_t>(request.ranks)),
        cap(static_cast<std::uint64_t>(request.cap)),
        topk(static_cast<std::uint64_t>(request.shape.topk)),
        local_experts(static_cast<std::uint64_t>(most_local_experts(request.shape.experts, request.ranks))),
        group_rows(ranks * cap),
        row(wire_row_bytes(request.wire, request.shape.hidden, request.quantisation)),
        returned_row(wire_row_bytes(request.combine_wire, request.shape.hidden, request.quantisation)),
        routing(topk * (sizeof(std::int32_t) + sizeof(float))) {}
};

Buffer normal_buffer(const PlanRequest& request, const Sizes& size) {
  // Exact sizes: what the batch brings, not the cap. The bounded queues are an option, not a size.
  const Traffic arrived = dispatch_traffic(Way::normal, request);
  const auto rows = static_cast<std::uint64_t>(arrived.rows + 0.5);
  const auto regrouped = static_cast<std::uint64_t>(pair_counts(request.shape, request.ranks, request.tokens).per_rank + 0.5);
  return {{region("arrived", rows, size.row + size.routing, "tokens x copies, on average, exact at run time"),
           region("regrouped", regrouped, size.row, "one a pair, on average, without the padding to 128")}};
}

}  // namespace

Buffer article_buffer(Way way, const PlanRequest& request) {
  const Sizes size(request);
  const std::uint64_t room = size.local_experts * size.group_rows;
  switch (way) {
    case Way::gather:
      return {{region("arrived", size.group_rows, size.row + size.routing, "ranks x cap"),
               region("partial_sums", size.group_rows, size.returned_row, "ranks x cap")}};
    case Way::normal:
      return normal_buffer(request, size);
    case Way::low_latency:
      return {{region("arrived", room, size.row, "local experts x ranks x cap"),
               region("packed", room, size.row, "the masked output, as many"),
               region("returned", size.cap * size.topk, size.returned_row, "cap x k")}};
    case Way::elastic: {
      const std::uint64_t pairs_a_token = std::min(size.topk, size.local_experts);
      return {{region("arrived", size.group_rows, size.row + size.routing, "a region a source, ranks x cap"),
               region("by_expert", size.group_rows * pairs_a_token, size.row, "worst case, ranks x cap x min(k, local experts)"),
               region("returned", size.cap * std::min(size.topk, size.ranks), size.returned_row, "cap x min(k, ranks)")}};
    }
    case Way::one_sided:
      return {{region("arrived", size.group_rows, size.row + size.routing, "a block a source, ranks x cap"),
               region("results", size.group_rows, size.returned_row, "the same rows on the way back")}};
    case Way::mega:
    case Way::automatic:  // no way of its own
      break;
  }
  return fused_buffer(request.shape, request.ranks, request.cap, fused_arrived(request.cap), request.shared_experts,
                      request.machine.sms);
}

PaddedTensors padded_tensors(const LayerShape& shape, int ranks, int cap, Activation activation) {
  PaddedTensors tensors;
  const std::uint64_t received = static_cast<std::uint64_t>(shape.hidden) * (activation == Activation::fp8 ? 1 : 2);
  const std::uint64_t gate_up = 2 * static_cast<std::uint64_t>(shape.intermediate) * sizeof(bf16);
  tensors.rows_an_expert = static_cast<std::uint64_t>(ranks) * static_cast<std::uint64_t>(cap);
  tensors.rows = static_cast<std::uint64_t>(most_local_experts(shape.experts, ranks)) * tensors.rows_an_expert;
  tensors.received = tensors.rows * received;
  tensors.gate_up = tensors.rows * gate_up;
  return tensors;
}

namespace {

ExchangeOptions options_of(Way way, const PlanRequest& request) {
  ExchangeOptions options;
  options.way = way;
  options.hidden = request.shape.hidden;
  options.topk = request.shape.topk;
  options.cap = request.cap;
  options.placement = Placement::contiguous(request.shape.experts, request.ranks);
  options.wire = request.wire;
  options.combine_wire = request.combine_wire;
  options.quantisation = request.quantisation;
  options.arrived = default_layout(way);
  return options;
}

MegaLayout mega_layout(const PlanRequest& request, RingSize ring) {
  ExchangeOptions options = options_of(Way::mega, request);
  options.combine = request.combine;
  options.mega.intermediate = request.shape.intermediate;
  options.mega.shared_intermediate = request.shared_experts * request.shape.intermediate;
  options.mega.activation = request.activation();
  options.mega.ring = ring;
  return make_mega_layout(options, request.machine.sms, {});
}

/// Of way auto what all of its candidates need, which share it.
ExchangeMemory workspace_memory(Way way, const PlanRequest& request) {
  ExchangeMemory memory;
  if (way == Way::automatic) {
    for (const Way one : real_ways) memory.include(workspace_memory(one, request));
    return memory;
  }
  if (way != Way::mega) return exchange_memory(options_of(way, request));
  memory = memory_of(mega_layout(request, RingSize::live));
  memory.outputs = exchange_memory(options_of(Way::gather, request)).outputs;  // the same for all ways
  return memory;
}

/// What results come home to.
std::vector<Region> result_regions(const PlanRequest& request, const MegaLayout& layout) {
  const auto cap = static_cast<std::uint64_t>(request.cap);
  const auto topk = static_cast<std::uint64_t>(request.shape.topk);
  const std::string_view shared = request.shared_experts > 0 ? ", and cap bf16 rows of the shared expert" : "";
  if (!layout.adds) {
    return {{"result_slots", cap * topk, layout.combine_bytes(),
             fmt::format("cap x k {} rows{}", plan::wire_name(request.combine_wire), shared)}};
  }
  std::vector<Region> regions{{"sums", cap, layout.sum_bytes(), "cap bf16 rows, which results are added to"}};
  if (request.shared_experts > 0)
    regions.push_back({"result_slots", cap, layout.combine_bytes(), "cap bf16 rows of the shared expert"});
  return regions;
}

}  // namespace

Buffer mega_buffer(const PlanRequest& request, RingSize ring) {
  const MegaLayout layout = mega_layout(request, ring);
  const auto cap = static_cast<std::uint64_t>(request.cap);
  const auto ring_rows = static_cast<std::uint64_t>(layout.ring_rows());
  const auto in_ring = fmt::format("{} row blocks of {} rows", layout.ring_blocks, layout.block_rows);
  const std::size_t tables = layout.index(0, 0, 0);
  const StepRegion middle = layout.intermediate();
  const StepRegion shared = layout.shared_intermediate();
  Buffer buffer;
  buffer.regions = {
      {"input", cap, tables - layout.row(0), "cap rows with their ids and weights"},
      {"tables", 0, layout.arrived(0) - tables, "local experts x ranks x (cap indices and a count), 4 bytes each"},
      {"words", 0, layout.word_bytes(), fmt::format("of {} ring blocks, and the shared expert's", layout.ring_blocks)},
      {"arrived", ring_rows, middle.begin - layout.arrived(0), in_ring + ", each row with its origin and weight"},
      {"intermediate", ring_rows, shared.begin - middle.begin, in_ring},
  };
  for (Region& region : result_regions(request, layout)) buffer.regions.push_back(std::move(region));
  if (request.shared_experts > 0) buffer.regions.push_back({"shared_intermediate", cap, shared.end() - shared.begin, "cap rows"});
  return buffer;
}

const std::map<Way, LayoutBytes>& own_layouts() {
  static const std::map<Way, LayoutBytes> layouts = [] {
    std::map<Way, LayoutBytes> all;
    const auto add = [&all](Way way) {
      all.emplace(way, [way](const PlanRequest& request) { return workspace_memory(way, request).heap_bytes(request.ranks); });
    };
    for (const Way way : real_ways) add(way);
    add(Way::automatic);
    return all;
  }();
  return layouts;
}

}  // namespace heddle
