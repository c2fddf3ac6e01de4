// One traced call of every way as the report's timelines need it: rows of cells, strips, and what was waited for.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "heddle/version.hpp"
#include "provenance.hpp"
#include "suite.hpp"
#include "suite_flags.hpp"
#include "trace/cells.hpp"
#include "trace_report.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

constexpr int cells = 800;
constexpr int ctas = 2;  ///< of a rank that are kept

struct TraceWords {
  LayerArguments layer;
  std::vector<std::string> ways{"mega", "low_latency"};
};

/// Neighbours that are alike become [first cell, behind the last one, what].
Json runs_of(const trace::CellRow& row) {
  Json runs = Json::array();
  for (int begin = 0, end = 0; begin < cells; begin = end) {
    const trace::Paint paint = row.paint(begin);
    for (end = begin + 1; end < cells && row.paint(end) == paint; ++end) {
    }
    if (paint != trace::Paint::idle) runs.push_back({begin, end, trace::pens[static_cast<std::size_t>(paint)].text});
  }
  return runs;
}

/// Thousandths are enough for a picture.
Json rounded(std::vector<double> values) {
  Json all = Json::array();
  for (const double value : values) all.push_back(std::round(1000 * value) / 1000);
  return all;
}

}  // namespace

Measured measure_trace(const std::string& typed, const std::string& commit) {
  TraceWords a;
  read_flags(typed, a, [](CLI::App& app, TraceWords& words) {
    add_layer_arguments(app, words.layer);
    app.add_option("--way", words.ways)->delimiter(',');
  });
  check_stamps(a.layer);
  const Inputs inputs = load_inputs(a.layer);
  std::vector<TracedWay> ways;
  std::int64_t all = 0;
  for (const std::string& way : a.ways) {
    ways.push_back(traced(inputs, options_of_way(way, a.layer, inputs), 2));
    print_line(fmt::format("{}: {:.1f} us", ways.back().call.title, static_cast<double>(ways.back().totals.nanoseconds) / 1e3));
    for (const trace::Lane& lane : ways.back().call.lanes) all = std::max(all, lane.end);
  }
  Json json = Json::array();
  for (const TracedWay& way : ways) {
    Json one = json_of(inputs, way);
    for (const trace::NamedRow& row : trace::rows_of(way.call, cells, all, ctas))
      one["rows"].push_back({{"label", row.label}, {"runs", runs_of(row.row)}});
    one["products"] = rounded(trace::busy_products(way.call, cells, all));
    one["movers"] = rounded(trace::busy_movers(way.call, cells, all));
    json.push_back(one);
  }
  return {{{"heddle", version},
           {"benchmark", "trace"},
           {"date", now_in_utc()},
           {"commit", commit},
           {"ranks", inputs.ranks},
           {"tokens", inputs.tokens()},
           {"cells", cells},
           {"all_us", static_cast<double>(all) / 1e3},
           {"ways", json}},
          ""};
}

}  // namespace heddle::tool
