// Copies by ranks, with what recordings say beside the formula, and buffers by cap: what needs no layer.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "heddle/plan.hpp"
#include "heddle/routing.hpp"
#include "heddle/version.hpp"
#include "plan/articles.hpp"
#include "provenance.hpp"
#include "suite.hpp"
#include "suite_flags.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

struct PlannedArguments {
  std::string preset = "deepseek-v4.1-flash", recordings;
  std::vector<int> ranks, caps;
};

void add_flags(CLI::App& app, PlannedArguments& a) {
  app.add_option("--preset", a.preset);
  app.add_option("--recordings", a.recordings);
  app.add_option("--ranks", a.ranks)->delimiter(',');
  app.add_option("--caps", a.caps)->delimiter(',');
}

Json copies_of(const LayerShape& shape, int ranks) {
  return {{"ranks", ranks},
          {"every_rank", copies_of_a_token(Way::gather, shape, ranks)},
          {"every_choice", copies_of_a_token(Way::low_latency, shape, ranks)},
          {"needed_ranks", copies_of_a_token(Way::one_sided, shape, ranks)}};
}

/// The experts of a model that a recording names: a power of two, as routers have them.
int experts_of(const Recording& recording) {
  int experts = 1;
  while (experts < recording.least_experts()) experts *= 2;
  return experts;
}

/// Over all layers of a recording: copies, and the fullest rank's rows over the mean.
Json recorded_point(const Recording& recording, int experts, int ranks) {
  const Placement placement = Placement::contiguous(experts, ranks);
  double copies = 0, busiest = 0, worst = 0;
  for (int layer = 0; layer < recording.layers(); ++layer) {
    const RoutingLoad load = measure_load(recording.take(layer, 0, recording.tokens()), placement);
    copies += load.copies_a_token / recording.layers();
    busiest += load.copies_max_over_mean / recording.layers();
    worst = std::max(worst, load.copies_max_over_mean);
  }
  return {{"ranks", ranks},
          {"copies", copies},
          {"formula", expected_copies(experts, recording.topk(), ranks)},
          {"busiest_over_mean", busiest},
          {"busiest_over_mean_worst_layer", worst}};
}

Json recordings_of(const PlannedArguments& a) {
  Json all = Json::array();
  if (!fs::is_directory(a.recordings))
    throw InputError(
        fmt::format("--recordings {}: no such folder; the recordings are in tests/data/routing of the sources", a.recordings));
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(a.recordings)) {
    if (entry.path().string().ends_with(".ids.npy")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) {
    const Recording recording = Recording::open(path.string());
    const int experts = experts_of(recording);
    Json points = Json::array();
    for (const int ranks : a.ranks) {
      if (ranks <= experts) points.push_back(recorded_point(recording, experts, ranks));
    }
    all.push_back({{"name", path.filename().string()},
                   {"experts", experts},
                   {"topk", recording.topk()},
                   {"layers", recording.layers()},
                   {"tokens", recording.tokens()},
                   {"points", points}});
    print_line(fmt::format("{}: {}, {}, {}, top-{}", path.filename().string(), count_of(recording.layers(), "layer"),
                           count_of(recording.tokens(), "token"), count_of(experts, "expert"), recording.topk()));
  }
  return all;
}

Json regions_of(const Buffer& buffer) {
  Json regions = Json::array();
  for (const Region& region : buffer.regions)
    regions.push_back({{"name", region.name}, {"rows", region.rows}, {"bytes", region.bytes}});
  return regions;
}

Json buffer_row(const char* whose, const std::string& way, const std::string& preset, const PlanRequest& request,
                std::uint64_t bytes) {
  return {{"whose", whose}, {"way", way}, {"preset", preset}, {"ranks", request.ranks}, {"cap", request.cap}, {"bytes", bytes}};
}

void add_way_buffers(Json& rows, int ranks, int cap) {
  const std::string preset = "deepseek-v4.1-flash";
  const PlanRequest request = plan::example(preset, "b300", ranks, cap, cap);
  for (const Way way : {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided}) {
    rows.push_back(buffer_row("layout", std::string(name(way)), preset, request, own_layouts().at(way)(request)));
    rows.push_back(buffer_row("article", std::string(name(way)), preset, request, article_buffer(way, request).bytes()));
  }
}

void add_fused_buffers(Json& rows, int ranks, int cap) {
  const std::string preset = "deepseek-v4-flash";
  const PlanRequest request = plan::example(preset, "b300", ranks, cap, cap);
  const auto add = [&](const char* whose, const std::string& kind, const Buffer& buffer) {
    Json row = buffer_row(whose, "mega", preset, request, buffer.bytes());
    row["kind"] = kind;
    row["regions"] = regions_of(buffer);
    rows.push_back(row);
  };
  for (const ArrivedRegion arrived : {ArrivedRegion::worst_case, ArrivedRegion::ring})
    add("article", arrived == ArrivedRegion::ring ? "ring" : "worst case",
        fused_buffer(request.shape, ranks, cap, arrived, 0, request.machine.sms));
  for (const RingSize ring : {RingSize::full, RingSize::live})
    add("layout", ring == RingSize::live ? "live ring" : "full ring", mega_buffer(request, ring));
}

}  // namespace

Measured measure_copies(const std::string& typed, const std::string&) {
  PlannedArguments a;
  read_flags(typed, a, add_flags);
  const ModelPreset& preset = find_preset(a.preset);
  Json rows = Json::array();
  for (const int ranks : a.ranks) rows.push_back(copies_of(preset.shape, ranks));
  return {{{"heddle", version},
           {"benchmark", "copies"},
           {"preset", a.preset},
           {"experts", preset.shape.experts},
           {"topk", preset.shape.topk},
           {"rows", rows},
           {"recordings", recordings_of(a)}},
          ""};
}

Measured measure_buffers(const std::string& typed, const std::string&) {
  PlannedArguments a;
  read_flags(typed, a, add_flags);
  Json rows = Json::array();
  for (const int ranks : a.ranks) {
    for (const int cap : a.caps) {
      add_way_buffers(rows, ranks, cap);
      add_fused_buffers(rows, ranks, cap);
    }
  }
  Json numbers = Json::array();
  for (const ArticleNumber& number : article_numbers()) {
    numbers.push_back({{"article", number.article},
                       {"section", number.section},
                       {"title", number.title},
                       {"stated", number.stated},
                       {"ours", number.rounded()},
                       {"unit", number.unit},
                       {"formula", number.formula},
                       {"agrees", number.agrees()}});
  }
  return {{{"heddle", version}, {"benchmark", "buffers"}, {"rows", rows}, {"article_numbers", numbers}}, ""};
}

}  // namespace heddle::tool
