// Options of an exchange: names, what fits together, memory, and the text that ranks compare.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "exchange/elastic/layout.hpp"
#include "exchange/gather/tagged.hpp"
#include "exchange/host_exchange.hpp"
#include "exchange/low_latency/layout.hpp"
#include "exchange/normal/layout.hpp"
#include "exchange/one_sided/layout.hpp"
#include "group/fingerprint.hpp"
#include "heddle/exchange.hpp"
#include "mega/options.hpp"

namespace heddle {

std::string_view name(Way way) {
  switch (way) {
    case Way::gather:
      return "gather";
    case Way::normal:
      return "normal";
    case Way::low_latency:
      return "low_latency";
    case Way::elastic:
      return "elastic";
    case Way::one_sided:
      return "one_sided";
    case Way::mega:
      return "mega";
    case Way::automatic:
      return "auto";
  }
  return "unknown";
}

std::optional<Way> find_way(std::string_view wanted) {
  for (const Way way : real_ways) {
    if (name(way) == wanted) return way;
  }
  return wanted == name(Way::automatic) ? std::optional(Way::automatic) : std::nullopt;
}

std::string_view name(ArrivedLayout layout) {
  switch (layout) {
    case ArrivedLayout::contiguous:
      return "contiguous";
    case ArrivedLayout::masked:
      return "masked";
    case ArrivedLayout::routed:
      return "routed";
  }
  return "unknown";
}

ArrivedLayout default_layout(Way way) {
  switch (way) {
    case Way::normal:
    case Way::elastic:
    case Way::mega:
      return ArrivedLayout::contiguous;
    case Way::low_latency:
      return ArrivedLayout::masked;
    case Way::gather:
    case Way::one_sided:
    case Way::automatic:
      return ArrivedLayout::routed;
  }
  return ArrivedLayout::routed;
}

bool allows_layout(Way way, ArrivedLayout layout) {
  switch (way) {
    case Way::normal:
    case Way::elastic:
      return true;
    default:
      return layout == default_layout(way);
  }
}

ExchangeShape shape_of(const ExchangeOptions& options) {
  return {options.placement.ranks(), options.placement.experts(), options.placement.max_local_experts(), options.topk, options.cap};
}

RowFormat wire_format(const ExchangeOptions& options) { return {options.wire, options.hidden, options.quantisation, 1.0f}; }

// The e4m3 combine wire has groups of 128 whatever the dispatch wire has (docs/numerics.md).
RowFormat returned_format(const ExchangeOptions& options) {
  return {options.combine_wire, options.hidden, {128, options.quantisation.scale}, 1.0f};
}

Areas areas_of(const ExchangeMemory& memory, int ranks) {
  Areas areas = place_areas(ranks, memory.dispatch, memory.combine, memory.outputs);
  areas.mega_sums += align_up(memory.mega_words, 128);
  areas.end = areas.mega_sums + align_up(memory.mega_sums, 128) + align_up(memory.tagged_dispatch, 128) +
              align_up(memory.tagged_combine, 128);
  return areas;
}

GatherTagged tagged_of(const ExchangeOptions& options, const ExchangeMemory& memory, int ranks) {
  GatherTagged tagged;
  tagged.combine = areas_of(memory, ranks).end - align_up(memory.tagged_combine, 128);
  tagged.dispatch = tagged.combine - align_up(memory.tagged_dispatch, 128);
  tagged.tokens = options.tagged_tokens;
  return tagged;
}

namespace {
/// Rows that arrive, and pairs of a row and a choice or an expert, are numbered with 32 bits.
void check_numbers(const ExchangeOptions& options) {
  const long long local = options.placement.max_local_experts();
  const long long rows_a_token = std::max<long long>(options.topk, options.arrived == ArrivedLayout::masked ? local : 1);
  const long long padding = 128 * (local + 1);  // of the contiguous layout
  const long long most = (std::numeric_limits<std::int32_t>::max() - padding) / (rows_a_token * options.placement.ranks());
  if (options.cap <= most) return;
  throw InputError(
      fmt::format("a cap of {} rows on {} ranks, up to {} rows each, is beyond row numbers of 32 bits; {} rows are possible",
                  options.cap, options.placement.ranks(), rows_a_token, most));
}
}  // namespace

void check_options(const ExchangeOptions& options) {
  const auto refuse = [](const std::string& text) { throw InputError(text); };
  if (options.way == Way::automatic)
    refuse("way auto is no exchange: a layer chooses one call by call; take gather, normal, low_latency, elastic or one_sided");
  if (options.hidden < 64 || options.hidden % 64 != 0)
    refuse(fmt::format("hidden size {} is not a positive multiple of 64", options.hidden));
  if (options.topk < 1) refuse(fmt::format("top-k is {}, at least 1 is needed", options.topk));
  if (options.cap < 1) refuse(fmt::format("the cap is {} rows, at least 1 is needed", options.cap));
  if (options.placement.ranks() < 1 || options.placement.experts() < 1) refuse("the placement names no ranks or no experts");
  if (options.placement.is_everywhere() && options.way != Way::gather) {
    refuse(fmt::format("every rank holds (a slice of) every expert: way {} sends tokens to the rank of an expert; take gather",
                       name(options.way)));
  }
  if (options.workers < 1 || options.workers > 64) refuse(fmt::format("{} workers a rank; 1 to 64 are possible", options.workers));
  if (!allows_layout(options.way, options.arrived)) {
    refuse(fmt::format("way {} cannot hand over the {} layout; it hands over {}", name(options.way), name(options.arrived),
                       name(default_layout(options.way))));
  }
  if (options.way == Way::normal && (options.queue_rows < 1 || options.chunk_rows < 1 || options.chunk_rows > options.queue_rows)) {
    refuse(fmt::format("normal: chunks of {} rows do not fit queues of {} rows", options.chunk_rows, options.queue_rows));
  }
  if (options.reduce == Reduce::home && options.way != Way::elastic) {
    refuse(fmt::format("reduce = home is elastic's; way {} has its own order of sums", name(options.way)));
  }
  if (options.mode == NodeMode::hybrid && options.way != Way::elastic)
    refuse(fmt::format("mode hybrid is elastic's; way {} sends no row by way of another rank", name(options.way)));
  if (options.combine == Combine::add && options.way != Way::mega) {
    refuse(fmt::format("combine = add is mega's, whose results are added where they arrive; way {} has its own order of sums",
                       name(options.way)));
  }
  if (options.tagged_tokens != 0) {
    if (options.way != Way::gather || options.gather != GatherMode::padded)
      refuse("tagged_tokens is for gather with blocks of one size (GatherMode::padded); leave it 0 elsewhere");
    if (options.wire != Wire::bf16 || options.combine_wire != Wire::bf16)
      refuse("tagged_tokens is for bf16 wires in both directions; leave it 0, or take Wire::bf16");
    if (options.tagged_tokens < 0 || options.tagged_tokens > options.cap)
      refuse(fmt::format("tagged_tokens is {}; 0 to the cap, {}, is possible", options.tagged_tokens, options.cap));
  }
  if (!options.extra_payloads.empty()) {
    if (options.way != Way::one_sided)
      refuse(fmt::format("extra payloads travel with one_sided only, not with {}", name(options.way)));
    if (options.extra_payloads.size() > OneSidedLayout::max_extra_payloads) {
      refuse(fmt::format("{} extra payloads; one_sided takes {} beside row, ids and weights", options.extra_payloads.size(),
                         OneSidedLayout::max_extra_payloads));
    }
    for (const std::size_t bytes : options.extra_payloads) {
      if (bytes == 0 || bytes % 16 != 0)
        refuse(fmt::format("an extra payload of {} bytes a row; multiples of 16 are possible", bytes));
    }
  }
  check_numbers(options);
  if (options.way == Way::mega) check_mega(options);
  check_row_format(wire_format(options));
  check_row_format(returned_format(options));
}

namespace {
template <class Layout>
ExchangeMemory memory_of(const Layout& layout) {
  ExchangeMemory memory;
  memory.dispatch = layout.dispatch_bytes();
  memory.combine = layout.combine_bytes();
  return memory;
}
}  // namespace

ExchangeMemory exchange_memory(const ExchangeOptions& options) {
  check_options(options);
  ExchangeMemory memory;
  switch (options.way) {
    case Way::gather: {
      const auto layout = make_layout<GatherLayout>(options, {});
      const GatherTagged tagged{0, 0, options.tagged_tokens};
      memory = memory_of(layout);
      memory.tagged_dispatch = tagged.dispatch_bytes(layout);
      memory.tagged_combine = tagged.combine_bytes(layout);
      break;
    }
    case Way::low_latency:
      memory = memory_of(make_layout<LowLatencyLayout>(options, {}));
      break;
    case Way::normal: {
      auto layout = make_layout<NormalLayout>(options, {});
      layout.queue_rows = options.queue_rows;
      memory = memory_of(layout);
      break;
    }
    case Way::elastic: {
      auto layout = make_layout<ElasticLayout>(options, {});
      layout.reduce = options.reduce;
      memory = memory_of(layout);
      break;
    }
    case Way::one_sided: {
      auto layout = make_layout<OneSidedLayout>(options, {});
      for (const std::size_t bytes : options.extra_payloads) layout.extra_bytes[layout.extra_payloads++] = bytes;
      memory = memory_of(layout);
      break;
    }
    case Way::mega:
      memory = memory_of(make_mega_layout(options, options.workers, {}));
      break;
    case Way::automatic:  // check_options has refused it
      break;
  }
  AllGatherLayout all_gather;
  all_gather.shape = shape_of(options);
  all_gather.hidden = options.hidden;
  memory.outputs = all_gather.output_bytes();
  return memory;
}

void ExchangeMemory::include(const ExchangeMemory& other) {
  dispatch = std::max(dispatch, other.dispatch);
  combine = std::max(combine, other.combine);
  outputs = std::max(outputs, other.outputs);
  mega_words = std::max(mega_words, other.mega_words);
  mega_sums = std::max(mega_sums, other.mega_sums);
  tagged_dispatch = std::max(tagged_dispatch, other.tagged_dispatch);
  tagged_combine = std::max(tagged_combine, other.tagged_combine);
}

std::size_t ExchangeMemory::heap_bytes(int ranks) const { return areas_of(*this, ranks).end; }

std::string describe(const ExchangeOptions& options) {
  std::string text;
  const auto line = [&text](std::string_view key, auto value) { text += fmt::format("{}={}\n", key, value); };
  line("way", name(options.way));
  line("hidden", options.hidden);
  line("topk", options.topk);
  line("cap", options.cap);
  line("experts", options.placement.experts());
  line("placement", fingerprint<int>(options.placement.rank_map()));
  line("wire", static_cast<int>(options.wire));
  line("combine_wire", static_cast<int>(options.combine_wire));
  line("group", options.quantisation.group);
  line("scale", static_cast<int>(options.quantisation.scale));
  line("arrived", name(options.arrived));
  line("weight_at", static_cast<int>(options.weight_at));
  line("reduce", static_cast<int>(options.reduce));
  line("mode", options.mode == NodeMode::hybrid ? "hybrid" : "direct");
  line("cpu_sync", options.cpu_sync);
  line("gather", static_cast<int>(options.gather));
  line("workers", options.workers);
  line("queue_rows", options.queue_rows);
  line("chunk_rows", options.chunk_rows);
  line("tagged_tokens", options.tagged_tokens);
  for (const std::size_t bytes : options.extra_payloads) line("extra_payload", bytes);
  if (options.way != Way::mega) return text;
  line("intermediate", options.mega.intermediate);
  line("shared_intermediate", options.mega.shared_intermediate);
  line("extra_expert", options.mega.extra_expert);
  line("activation", static_cast<int>(options.mega.activation));
  line("block_rows", options.mega.block_rows);
  line("combine", options.combine == Combine::add ? "add" : "slots");
  line("ring", options.mega.ring == RingSize::full ? "full" : "live");
  return text;
}

std::unique_ptr<Exchange> create_exchange(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory) {
  check_options(options);
  switch (options.way) {
    case Way::gather:
      return create_gather(workspace, options, memory);
    case Way::normal:
      return create_normal(workspace, options, memory);
    case Way::low_latency:
      return create_low_latency(workspace, options, memory);
    case Way::elastic:
      return create_elastic(workspace, options, memory);
    case Way::one_sided:
      return create_one_sided(workspace, options, memory);
    case Way::mega:
    case Way::automatic:
      break;
  }
  throw InputError("mega is a whole layer in one, not an exchange whose rows somebody else computes; create a MoeLayer");
}

}  // namespace heddle
