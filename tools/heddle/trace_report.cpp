#include "trace_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "report.hpp"
#include "trace/device.hpp"
#include "trace/words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
using trace::Line;
using trace::RoleTotals;

double share_of(std::int64_t part, std::int64_t all) {
  return all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 0.0;
}

std::string title_of(const RoleTotals& role) {
  const std::string lanes = role.lanes == 1 ? "1 lane" : fmt::format("{} lanes", role.lanes);
  const std::string kernel = role.kernel.empty() ? "" : role.kernel + ": ";
  return fmt::format("{}{}, {}, from {:.1f} to {:.1f} us", kernel, trace::name(role.role), lanes,
                     static_cast<double>(role.begin) / 1e3, static_cast<double>(role.end) / 1e3);
}

void print_line(const std::string& what, std::int64_t count, std::int64_t nanoseconds, std::int64_t all) {
  fmt::print("    {:<72} {:>8} {:>12.1f} us {:>6.1f}%\n", what, count, static_cast<double>(nanoseconds) / 1e3,
             100 * share_of(nanoseconds, all));
}

std::string text_of(const Line& line) {
  if (!line.is_wait) return line.during.empty() ? line.what : fmt::format("{} ({})", line.what, line.during);
  return fmt::format("waits for {}{}", line.what, line.during.empty() ? "" : ", in " + line.during);
}

/// Nanoseconds that lanes of two GPUs may be off each other; of the one GPU and the host, if there is only one.
std::int64_t uncertainty_of(const std::map<int, std::int64_t>& clocks) {
  std::int64_t most = 0, second = 0;
  for (const auto& [device, uncertainty] : clocks) {
    second = std::max(second, std::min(most, uncertainty));
    most = std::max(most, uncertainty);
  }
  return most + second;
}

Json json_of(const RoleTotals& role) {
  Json lines = Json::array();
  for (const Line& line : role.lines) {
    lines.push_back({{"what", line.what},
                     {"wait", line.is_wait},
                     {"during", line.during.empty() ? Json(nullptr) : Json(line.during)},
                     {"count", line.count},
                     {"seconds", static_cast<double>(line.nanoseconds) / 1e9}});
  }
  return {{"role", trace::name(role.role)},
          {"kernel", role.kernel.empty() ? Json(nullptr) : Json(role.kernel)},
          {"lanes", role.lanes},
          {"begin_seconds", static_cast<double>(role.begin) / 1e9},
          {"end_seconds", static_cast<double>(role.end) / 1e9},
          {"seconds", static_cast<double>(role.nanoseconds) / 1e9},
          {"idle_seconds", static_cast<double>(role.idle) / 1e9},
          {"lines", lines}};
}

}  // namespace

void check_stamps(const LayerArguments& arguments) {
  if (arguments.engine == "cuda" && arguments.experts_engine != "host" && !trace::kernels_record) {
    throw InputError(
        "--engine cuda: the kernels of this build take no time stamps; build with the preset trace (HEDDLE_TRACE=ON), or take "
        "--engine host");
  }
}

TracedWay traced(const Inputs& inputs, const LayerOptions& options, int warm_calls) {
  TracedWay way;
  way.options = options;
  trace::Recorder recorder;
  way.result = run_job(inputs, options, {&recorder, warm_calls});
  way.call = {title_of(options), inputs.ranks, recorder.take()};
  way.clocks = recorder.clocks();
  way.totals = trace::totals_of(way.call.lanes);
  return way;
}

void print_totals(const TracedWay& way) {
  fmt::print("\n{}: {:.1f} us, {} spans in {} lanes\n", way.call.title, static_cast<double>(way.totals.nanoseconds) / 1e3,
             way.totals.spans, way.call.lanes.size());
  if (way.clocks.size() > 1) {
    fmt::print("  clocks of {} GPUs aligned within {:.1f} us\n", way.clocks.size(),
               static_cast<double>(uncertainty_of(way.clocks)) / 1e3);
  }
  for (const RoleTotals& role : way.totals.roles) {
    if (role.lines.empty()) continue;
    fmt::print("  {}\n", title_of(role));
    for (const Line& line : role.lines) print_line(text_of(line), line.count, line.nanoseconds, role.nanoseconds);
    print_line("nothing that is recorded", 0, role.idle, role.nanoseconds);
  }
  if (way.totals.lost > 0) fmt::print("  {} spans found no room: times above are too small\n", way.totals.lost);
}

Json json_of_clocks(const TracedWay& way) {
  if (way.clocks.empty()) return nullptr;
  return {{"gpus", way.clocks.size()}, {"uncertainty_seconds", static_cast<double>(uncertainty_of(way.clocks)) / 1e9}};
}

Json json_of(const Inputs& inputs, const TracedWay& way) {
  Json roles = Json::array();
  for (const RoleTotals& role : way.totals.roles) roles.push_back(json_of(role));
  return {{"title", way.call.title},
          {"configuration", configuration_of(inputs, way.options, way.result)},
          {"seconds", static_cast<double>(way.totals.nanoseconds) / 1e9},
          {"spans", way.totals.spans},
          {"lost_spans", way.totals.lost},
          {"clocks", json_of_clocks(way)},
          {"roles", roles}};
}

}  // namespace heddle::tool
