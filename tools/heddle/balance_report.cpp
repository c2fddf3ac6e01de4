// What a run of heddle bench balance says of its calls: phases, entries of the JSON and lines of the table.
#include <fmt/format.h>

#include <algorithm>

#include "balance.hpp"
#include "provenance.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
using Calls = std::span<const BalanceCall>;

std::vector<double> values(Calls calls, double BalanceCall::*which) {
  std::vector<double> all;
  for (const BalanceCall& call : calls) all.push_back(call.*which);
  return all;
}

/// Times of the calls of a phase, and what lay behind `followed` calls.
Json phase(Calls calls, Calls followed) {
  Json json = summary(values(calls, &BalanceCall::call_us));
  json["calls"] = calls.size();
  json["between"] = summary(values(followed, &BalanceCall::between_us));
  return json;
}

Json rows_json(const RankRows& rows) { return {{"busiest", rows.busiest}, {"max_over_mean", rows.over_mean}}; }

/// What lay on the streams behind each call that a switch followed.
std::vector<double> switch_times(Calls calls, const BalancePhases& phases) {
  std::vector<double> times;
  for (std::size_t i = phases.decided + 1; i <= phases.switched; ++i) {
    if (calls[i].switches > calls[i - 1].switches) times.push_back(calls[i].between_us);
  }
  return times;
}

double number(const Json& json, const char* field) { return json.at(field).get<double>(); }

}  // namespace

std::optional<BalancePhases> phases_of(Calls calls) {
  const auto moves = [](const BalanceCall& call) { return call.is_moving; };
  const auto decided = std::ranges::find_if(calls, moves);
  const auto switched = std::ranges::find_if_not(decided, calls.end(), moves);
  if (switched == calls.end() || switched + 1 == calls.end()) return std::nullopt;
  const auto again = std::ranges::find_if(switched, calls.end(), moves);
  const auto number_of = [&](auto at) { return static_cast<std::size_t>(at - calls.begin()); };
  return BalancePhases{number_of(decided), number_of(switched), again == calls.end() ? calls.size() : number_of(again) + 1};
}

Json balance_calls(Calls calls) { return {{"changed", false}, {"before", phase(calls, calls)}}; }

Json balance_entry(Calls calls, const BalancePhases& phases, const BalanceChange& change) {
  const Calls before = calls.first(phases.decided + 1);
  const Calls during = calls.subspan(phases.decided + 1, phases.switched - phases.decided);
  const Calls after = calls.subspan(phases.switched + 1, phases.end - phases.switched - 1);
  // What lay behind the call at which it was decided is the change's, too.
  Json entry{{"changed", true},
             {"before", phase(before, before.first(phases.decided))},
             {"during", phase(during, calls.subspan(phases.decided, during.size() + 1))},
             {"after", phase(after, after)}};
  const std::vector<double> switches = switch_times(calls, phases);
  double bytes = 0, seconds = 0;  // of the GPU whose copies took longest
  for (std::size_t gpu = 0; gpu < change.sent_bytes.size(); ++gpu) {
    if (change.sent_seconds[gpu] < seconds) continue;
    bytes = change.sent_bytes[gpu];
    seconds = change.sent_seconds[gpu];
  }
  entry.update({{"experts", change.experts},
                {"sent_bytes", change.sent_bytes},
                {"sent_seconds", change.sent_seconds},
                {"copy_bytes_per_second", seconds > 0 ? Json(bytes / seconds) : Json()},
                {"decision_host_us", calls[phases.decided].follow_us},
                {"usual_host_us", median(values(before, &BalanceCall::follow_us))},
                {"decision_between_us", calls[phases.decided].between_us},
                {"calls_to_switch", phases.switched - phases.decided},
                {"decision_to_switch_us", change.decision_to_switch_us},
                {"switches", switches.size()},
                {"switch_us", switches.empty() ? Json() : Json(*std::ranges::max_element(switches))},
                {"switches_us", switches},
                {"later_switches", calls.back().switches - calls[phases.switched].switches},
                {"rows_before", rows_json(change.before)},
                {"rows_after", rows_json(change.after)}});
  return entry;
}

std::string balance_title() {
  return fmt::format("{:>6} {:<12} {:>4} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>8} {:>6} {:>9} {:>7} {:>9}  {}", "tokens",
                     "way", "load", "before", "slowest", "during", "slowest", "after", "slowest", "experts", "MB sent", "calls",
                     "us", "GB/s", "switch us", "max/mean");
}

std::string balance_line(const Json& entry) {
  const auto times = [&](const char* part) {
    return fmt::format("{:>9.2f} {:>9.2f}", number(entry[part], "median_us"), number(entry[part], "most_us"));
  };
  const std::string label =
      fmt::format("{:>6} {:<12} {:>4}", entry["tokens"].get<int>(), entry["way"].get<std::string>(), entry["load"].get<int>());
  if (!entry["changed"].get<bool>()) {
    return fmt::format("{} {}  no change: max/mean of rows {:.3f}, and {:.3f} by the best placement found", label, times("before"),
                       number(entry, "imbalance"), number(entry, "expected"));
  }
  double bytes = 0;
  for (const auto& of_gpu : entry["sent_bytes"]) bytes += of_gpu.get<double>();
  const auto or_none = [&](const char* field, double scale) {
    return entry[field].is_null() ? std::string("-") : fmt::format("{:.1f}", number(entry, field) * scale);
  };
  return fmt::format("{} {} {} {} {:>7} {:>8.1f} {:>6} {:>9.1f} {:>7} {:>9}  {:.3f} to {:.3f}", label, times("before"),
                     times("during"), times("after"), entry["experts"].get<std::int64_t>(), bytes / 1e6,
                     entry["calls_to_switch"].get<std::size_t>(), number(entry, "decision_to_switch_us"),
                     or_none("copy_bytes_per_second", 1e-9), or_none("switch_us", 1), number(entry["rows_before"], "max_over_mean"),
                     number(entry["rows_after"], "max_over_mean"));
}

}  // namespace heddle::tool
