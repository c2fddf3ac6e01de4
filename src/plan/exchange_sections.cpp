// What travels and where it lies: rows, copies, bytes, buffers.
#include <fmt/format.h>

#include <utility>

#include "plan/sections.hpp"
#include "plan/ways.hpp"

namespace heddle::plan {

namespace {

Section load_section(const PlanRequest& request) {
  const LayerShape& shape = request.shape;
  const PairCounts counts = pair_counts(shape, request.ranks, request.tokens);
  const int local = most_local_experts(shape.experts, request.ranks);
  const auto tokens = static_cast<std::uint64_t>(request.tokens) * static_cast<std::uint64_t>(request.ranks);
  Section section{"load", "Pairs and rows", {}};
  const Adder count(section, Unit::count), rows(section, Unit::rows);
  count("local_experts", "experts of a rank, at most", local, fmt::format("{} / {}, rounded up", shape.experts, request.ranks),
        "contiguous placement");
  count("pairs", "(token, expert) pairs of a layer", double(counts.pairs),
        fmt::format("{} tokens x {} ranks x {} experts", request.tokens, request.ranks, shape.topk), fused_article("1.2"));
  rows("rows_an_expert", "rows of an expert, on average", counts.per_expert,
       fmt::format("{} / {} experts", counts.pairs, shape.experts), fused_article("1.2"));
  rows("rows_a_rank", "rows of a rank, one a pair, on average", counts.per_rank,
       fmt::format("{} / {} ranks", counts.pairs, request.ranks), fused_article("3.4"));
  count("touched_experts", "local experts with rows, on average",
        expected_touched_experts(local, shape.experts, shape.topk, tokens),
        fmt::format("{} x (1 - (1 - {}/{})^{})", local, shape.topk, shape.experts, tokens),
        "uniform routing; " + fused_article("3.4"));
  return section;
}

Section copies_section(const PlanRequest& request) {
  const int ranks = request.ranks, experts = request.shape.experts, topk = request.shape.topk;
  const double needed = expected_copies(experts, topk, ranks);
  const double replaced = expected_copies_with_replacement(experts, topk, ranks);
  const bool even = experts % ranks == 0;
  const std::string hypergeometric =
      even ? fmt::format("{0} x (1 - C({1} - {2}, {3}) / C({1}, {3}))", ranks, experts, experts / ranks, topk)
           : fmt::format("sum over ranks of 1 - C({0} - e, {1}) / C({0}, {1}), e experts there", experts, topk);
  const std::string powers = even ? fmt::format("{} x (1 - (1 - {}/{})^{})", ranks, experts / ranks, experts, topk)
                                  : fmt::format("sum over ranks of 1 - (1 - e/{})^{}", experts, topk);
  Section section{"copies", "Copies of a token (the one that stays at home counted)", {}};
  const Adder copies(section, Unit::copies), ratio(section, Unit::ratio);
  copies("every_rank", "to every rank (gather)", ranks, "one a rank", exchange_article("1.3"));
  copies("every_choice", "one an expert (low_latency, mega)", topk, "k", exchange_article("1.3"));
  copies("needed_ranks", "to the ranks that need it (normal, elastic, one_sided)", needed, hypergeometric, exchange_article("1.3"));
  copies("needed_ranks_with_replacement", "the same, experts drawn with replacement", replaced, powers, fused_article("3.2"));
  ratio("every_rank_over_needed", "gather over what is needed", ranks / needed, fmt::format("{} / {:.4f}", ranks, needed),
        exchange_article("2.3"));
  ratio("every_choice_over_needed", "low_latency, mega over what is needed", topk / needed,
        fmt::format("{} / {:.4f}", topk, needed), exchange_article("4.1"));
  return section;
}

std::string row_formula(Wire wire, const Quantisation& quantisation) {
  switch (wire) {
    case Wire::bf16:
      return "2 bytes a value";
    case Wire::fp8:
      return fmt::format("1 byte a value, a {} for {}", quantisation.scale == ScaleFormat::f32 ? "4-byte scale" : "scale byte",
                         quantisation.group);
    case Wire::nvfp4:
      break;
  }
  return "4 bits a value, a scale byte for 16";
}

Section row_section(const PlanRequest& request) {
  Section section{"row", "Bytes of a row", {}};
  const Adder bytes(section, Unit::bytes);
  for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
    bytes(std::string(wire_name(wire)), fmt::format("{} wire", wire_name(wire)),
          double(wire_row_bytes(wire, request.shape.hidden, request.quantisation)), row_formula(wire, request.quantisation),
          exchange_article("7.2"));
  }
  const PairBytes pair = fused_pair_bytes(request.shape.hidden);
  bytes("fused_out", "a pair of the fused kernel, out", double(pair.out), "fp8, a scale byte for 32, a 4-byte weight",
        fused_article("1.2"));
  bytes("fused_round_trip", "the same, out and back", double(pair.out + pair.back), "and a bf16 row back", fused_article("5.4"));
  return section;
}

Section traffic_section(const PlanRequest& request) {
  Section section{
      "traffic",
      fmt::format("Bytes that arrive at a rank ({} out, {} back)", wire_name(request.wire), wire_name(request.combine_wire)),
      {}};
  const Adder bytes(section, Unit::bytes);
  const std::string remote = fmt::format("x (1 - 1/{}): without the rank's own", request.ranks);
  for (const WayTraits& way : ways) {
    const auto add = [&](std::string_view direction, const Traffic& traffic, const std::string& source) {
      bytes(fmt::format("{}.{}", way.name, direction), fmt::format("{}, {}", way.name, direction), traffic.bytes,
            fmt::format("{:.1f} rows x {} bytes", traffic.rows, traffic.row_bytes), source);
      bytes(fmt::format("{}.{}_remote", way.name, direction), fmt::format("{}, {}, remote", way.name, direction),
            traffic.remote_bytes, remote, exchange_article("1.3"));
    };
    add("dispatch", dispatch_traffic(way.way, request), std::string(way.source));
    add("combine", combine_traffic(way.way, request), exchange_article("7.1"));
  }
  return section;
}

}  // namespace

Section buffer_section(const PlanRequest& request) {
  Section section{"article_buffers", fmt::format("Buffers of a rank as the articles account for them (cap {})", request.cap), {}};
  const Adder bytes(section, Unit::bytes);
  for (const WayTraits& way : ways) {
    const Buffer buffer = article_buffer(way.way, request);
    for (const Region& region : buffer.regions) {
      bytes(fmt::format("{}.{}", way.name, region.name), fmt::format("{}, {}", way.name, region.name), double(region.bytes),
            region.formula, std::string(way.buffer_source));
    }
    std::string sum = "sum";
    if (way.way == Way::mega) {
      const bool ring = fused_arrived(request.cap) == ArrivedRegion::ring;
      sum = fmt::format("sum; cap rounded up to {}, arrived rows {}", fused_cap(request.cap),
                        ring ? "in a ring" : "for the worst case");
    }
    bytes(fmt::format("{}.total", way.name), fmt::format("{}, total", way.name), double(buffer.bytes()), sum,
          std::string(way.buffer_source));
  }
  return section;
}

Section mega_section(const PlanRequest& request) {
  Section section{
      "mega_buffer",
      fmt::format("The fused layer's buffer of a rank, with a ring of live row blocks and of all (cap {})", request.cap),
      {}};
  const Adder bytes(section, Unit::bytes);
  const std::string source = "this library's layout";
  for (const auto& [name, ring] : {std::pair{"live", RingSize::live}, std::pair{"full", RingSize::full}}) {
    const Buffer buffer = mega_buffer(request, ring);
    for (const Region& region : buffer.regions)
      bytes(fmt::format("{}.{}", name, region.name), fmt::format("{} ring, {}", name, region.name), double(region.bytes),
            region.formula, source);
    bytes(fmt::format("{}.total", name), fmt::format("{} ring, total", name), double(buffer.bytes()), "sum", source);
  }
  return section;
}

Section layouts_section(std::string name, const PlanRequest& request, const std::map<Way, LayoutBytes>& layouts) {
  Section section{std::move(name), fmt::format("Workspaces of a rank as this library lays them out (cap {})", request.cap), {}};
  for (const auto& [way, bytes_of] : layouts) {
    Adder(section, Unit::bytes)(std::string(heddle::name(way)), std::string(heddle::name(way)), double(bytes_of(request)),
                                "reported by the way's own layout", "this library");
  }
  return section;
}

std::vector<Section> all_sections(const PlanRequest& request, const std::map<Way, LayoutBytes>& layouts) {
  std::vector<Section> sections{load_section(request),
                                copies_section(request),
                                row_section(request),
                                traffic_section(request),
                                buffer_section(request),
                                mega_section(request),
                                layouts_section("own_layouts", request, layouts)};
  sections.push_back(nodes_section(request));
  for (Section& section : compute_sections(request)) {
    sections.push_back(std::move(section));
  }
  return sections;
}

}  // namespace heddle::plan
