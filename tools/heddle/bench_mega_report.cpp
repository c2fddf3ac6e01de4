// What a run of `heddle bench mega` says: lines of its table and entries of its JSON.
#include <fmt/format.h>

#include "bench_machine.hpp"
#include "bench_mega_run.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

double number(const Json& entry, const char* field) { return entry.at(field).get<double>(); }

std::string column(const Json& entry, const char* field, int width, int digits) {
  if (entry.count(field) == 0) return fmt::format("{:>{}}", "", width);
  return fmt::format("{:>{}.{}f}", number(entry, field), width, digits);
}

}  // namespace

std::string MegaRun::label_of(const Size& size, const std::string& way) const {
  return fmt::format("{:>6} {:<12}", size.tokens, way);
}

Json MegaRun::entry_of(const Size& size, const std::string& way) const {
  Json entry{{"preset", size.layer.name}};
  entry.update(layer_json(size.source.shape, size.layer.kind));
  entry.update({{"shared", size.layer.shared_kind ? Json(word_of(kinds, *size.layer.shared_kind)) : Json()},
                {"way", way},
                {"shared_place", Json()},
                {"combine", Json()},
                {"tokens", size.tokens},
                {"routing", size.routing},
                {"touched", size.load.touched},
                {"weight_bytes", size.load.weight_bytes},
                {"operations", size.load.operations},
                {"floor_us", size.floor_us}});
  return entry;
}

/// How much slower auto is than the fastest way of this size, whichever it was.
std::string MegaRun::compare_auto(const Size& size, Json& entry, double median_us) const {
  if (size.fastest.empty()) return fmt::format("  {}", entry["chosen"].get<std::string>());
  entry["fastest"] = size.fastest;
  entry["over_fastest"] = median_us / size.fastest_us;
  return fmt::format("  {}: {:.3f} of {}", entry["chosen"].get<std::string>(), median_us / size.fastest_us, size.fastest);
}

/// With what was measured before it: the best chain, and the shared expert inside. What the line says of that.
std::string MegaRun::compare_fused(Size& size, Json& entry, double median_us) const {
  std::string remark;
  if (!size.best_chain.empty()) {
    entry["best_chain"] = size.best_chain;
    entry["best_chain_us"] = size.best_us;
    entry["over_best_chain"] = median_us / size.best_us;
    remark += fmt::format("  {:.3f} of {}", median_us / size.best_us, size.best_chain);
  }
  if (entry["shared_place"] == "inside") {
    size.inside_us = median_us;
  } else if (size.inside_us > 0) {
    entry["over_inside"] = median_us / size.inside_us;
    remark += fmt::format("  {:.3f} of inside", median_us / size.inside_us);
  }
  if (size.expected.empty()) remark += "  not compared with low_latency";
  return remark;
}

void MegaRun::report(Size& size, const std::string& name, Json& entry, const std::vector<double>& samples) {
  const double middle = median(samples);
  entry.update(summary(samples));
  entry["times_floor"] = middle / size.floor_us;
  if (size.stream_us > 0) entry["times_stream"] = middle / size.stream_us;
  std::string remark = entry["weights_hot"].get<bool>() ? "  weights hot" : "";
  if (own_ways.count(name) > 0) {
    if (size.best_chain.empty() || middle < size.best_us) {
      size.best_chain = name;
      size.best_us = middle;
    }
  } else if (entry["way"] == "mega") {
    remark = compare_fused(size, entry, middle) + remark;
  } else if (entry["way"] == "auto") {
    remark = compare_auto(size, entry, middle) + remark;
  }
  const bool is_usual = entry["shared_place"].is_null() || entry["shared_place"] == "inside";
  const bool weighed = own_ways.count(name) > 0 || (entry["way"] == "mega" && is_usual);
  if (weighed && (size.fastest.empty() || middle < size.fastest_us)) {
    size.fastest = name;
    size.fastest_us = middle;
  }
  const std::string share = entry.count("communication_share") == 0
                                ? std::string(6, ' ')
                                : fmt::format("{:>5.0f}%", 100 * number(entry, "communication_share"));
  print_line(fmt::format("{} {:>9.2f} {:>9.2f} {:>9.2f} {} {} {} {} {:>8} {:>9.1f} {:>9.2f} {:>6.2f}{}", label_of(size, name),
                         middle, number(entry, "least_us"), number(entry, "most_us"), column(entry, "dispatch_us", 9, 2),
                         column(entry, "experts_us", 9, 2), column(entry, "combine_us", 9, 2), share, size.load.touched,
                         size.load.weight_bytes / 1e6, size.floor_us, middle / size.floor_us, remark));
  rows_.push_back(entry);
}

/// What was measured beside the line's own times.
void MegaRun::add_lines(const Size& size, const Variant& variant, const Json& entry) const {
  if (entry.count("sustained") > 0) print_line(label_of(size, variant.name) + " " + power_line(entry["sustained"]));
  if (entry.count("two_batches") > 0) print_line(label_of(size, variant.name) + " " + two_line(entry["two_batches"]));
}

Json MegaRun::json() const {
  Json json = result_head("mega", a_.commit, machine_);
  json.update({{"ranks", a_.ranks},
               {"seed", a_.seed},
               {"replays", a_.replays},
               {"stream_bytes_per_second", 1e12 * a_.stream_tbps},
               {"operations_per_second", {{"fp8", tensor_rate(WeightKind::mxfp4)}, {"bf16", tensor_rate(WeightKind::bf16)}}},
               {"rows", rows_}});
  return json;
}

}  // namespace heddle::tool
