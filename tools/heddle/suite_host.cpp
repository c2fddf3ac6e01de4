// What is measured on the host engine: layers by way and size, phase by phase; the two grids; what the machine can do at best.
#include <cblas.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <random>

#include "command.hpp"
#include "experts/activation/activation.hpp"
#include "heddle/error.hpp"
#include "host_calls.hpp"
#include "provenance.hpp"
#include "report.hpp"
#include "step.hpp"
#include "suite.hpp"
#include "suite_flags.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) { return std::chrono::duration<double, std::micro>(Clock::now() - begin).count(); }

/// Microseconds of `calls` calls, after one that warms up.
template <class Call>
std::vector<double> time_calls(int calls, const Call& call) {
  std::vector<double> samples;
  for (int i = -1; i < calls; ++i) {
    const auto begin = Clock::now();
    call();
    if (i >= 0) samples.push_back(us_since(begin));
  }
  return samples;
}

// ---------------------------------------------------------------- layers

struct HostLayerArguments {
  LayerArguments layer;
  std::vector<int> sizes{1, 8, 64, 256};
  std::vector<std::string> ways{"gather", "normal", "low_latency", "elastic", "one_sided", "mega"};
  int calls = 5;
};

void add_layer_flags(CLI::App& app, HostLayerArguments& a) {
  add_layer_arguments(app, a.layer);
  app.add_option("--sizes", a.sizes)->delimiter(',');
  app.add_option("--way", a.ways)->delimiter(',');
  app.add_option("--calls", a.calls);
}

constexpr std::pair<const char*, PhaseReport LayerReport::*> phases[] = {
    {"dispatch", &LayerReport::dispatch},     {"regroup", &LayerReport::regroup}, {"gemm1", &LayerReport::gemm1},
    {"activation", &LayerReport::activation}, {"gemm2", &LayerReport::gemm2},     {"combine", &LayerReport::combine}};

/// The calls of one way and size, seen over all ranks.
struct SeenCalls {
  std::vector<double> us;                      ///< of the slowest rank
  std::vector<std::vector<double>> phases_us;  ///< [phase][call], of the rank that took longest
  std::vector<LayerReport> last;               ///< [rank]
  std::size_t heap_bytes = 0;
};

SeenCalls see(const Inputs& inputs, const LayerOptions& options, int tokens, int calls) {
  const auto n = static_cast<std::size_t>(calls);
  SeenCalls seen{std::vector<double>(n, 0.0), std::vector<std::vector<double>>(std::size(phases), std::vector<double>(n, 0.0)),
                 std::vector<LayerReport>(static_cast<std::size_t>(inputs.ranks)), 0};
  std::mutex mutex;
  on_host_ranks(inputs, options, 1, [&](HostRank& rank) {
    for (int call = -1; call < calls; ++call) {  // the first one warms up
      rank.meet();
      const auto begin = Clock::now();
      const LayerReport& report = rank.call(0, tokens);
      const double us = us_since(begin);
      if (call < 0) continue;
      const auto at = static_cast<std::size_t>(call);
      const std::lock_guard lock(mutex);
      seen.us[at] = std::max(seen.us[at], us);
      for (std::size_t i = 0; i < std::size(phases); ++i) {
        double& slowest = seen.phases_us[i][at];
        slowest = std::max(slowest, 1e6 * (report.*phases[i].second).seconds);
      }
      seen.last[static_cast<std::size_t>(rank.rank())] = report;
      seen.heap_bytes = rank.heap_bytes();
    }
  });
  return seen;
}

Json layer_row(const LayerOptions& options, int tokens, const SeenCalls& seen) {
  Json row{{"way", name(options.way)},
           {"title", title_of(options)},
           {"tokens", tokens},
           {"combine", word_of(combines, options.combine)},
           {"combine_wire", word_of(wires, options.combine_wire)},
           {"ring", word_of(ring_sizes, options.ring)}};
  row.update(summary(seen.us));
  for (std::size_t i = 0; i < std::size(phases); ++i) row[fmt::format("{}_us", phases[i].first)] = median(seen.phases_us[i]);
  double remote = 0, local = 0, sent = 0, weights_and_rows = 0, pairs = 0, room = 0;
  for (const LayerReport& report : seen.last) {
    remote += static_cast<double>(report.dispatch.remote_bytes + report.combine.remote_bytes);
    local += static_cast<double>(report.dispatch.local_bytes + report.combine.local_bytes);
    weights_and_rows += static_cast<double>(report.gemm1.local_bytes + report.gemm2.local_bytes);
    sent += static_cast<double>(report.rows_sent);
    pairs += static_cast<double>(report.rows_real);
    room += static_cast<double>(report.rows_room);
  }
  row["host_waited"] = seen.last.front().host_waited;
  row["arrived"] = name(seen.last.front().layout);
  row["remote_bytes"] = remote;
  row["local_bytes"] = local;
  row["expert_bytes"] = weights_and_rows;
  row["copies_per_token"] = sent / (tokens * static_cast<double>(seen.last.size()));
  row["rows_real"] = pairs;
  row["rows_room"] = room;
  row["heap_bytes"] = seen.heap_bytes;
  return row;
}

void print_layer_row(const Json& row) {
  const auto us = [&](const char* field) { return row.at(field).get<double>(); };
  print_line(
      fmt::format("{:>6} {:<26} {:>10.1f} us: dispatch {:.1f}, regroup {:.1f}, products and activation {:.1f}, combine {:.1f}",
                  row["tokens"].get<int>(), row["title"].get<std::string>(), us("median_us"), us("dispatch_us"), us("regroup_us"),
                  us("gemm1_us") + us("activation_us") + us("gemm2_us"), us("combine_us")));
}

}  // namespace

Measured measure_host_layer(const std::string& typed, const std::string& commit) {
  HostLayerArguments a;
  read_flags(typed, a, add_layer_flags);
  a.layer.tokens = a.layer.ranks.value() * *std::max_element(a.sizes.begin(), a.sizes.end());
  if (a.layer.routing.empty()) a.layer.routing = "uniform";
  Inputs inputs = load_inputs(a.layer);
  inputs.source.shared.reset();  // as the articles leave it out
  Json rows = Json::array();
  for (const int tokens : a.sizes) {
    for (const std::string& way : a.ways) {
      LayerOptions options = options_of_way(way, a.layer, inputs);
      options.cap = tokens;
      rows.push_back(layer_row(options, tokens, see(inputs, options, tokens, a.calls)));
      print_layer_row(rows.back());
    }
  }
  Json json = result_head("layer", commit, host_machine_json());
  json["ranks"] = inputs.ranks;
  json.update(layer_json(inputs.source.shape, inputs.source.kind));
  json.update({{"routing", a.layer.routing}, {"rows", rows}});
  return {json, ""};
}

// ---------------------------------------------------------------- the two grids

namespace {

struct GridArguments {
  int experts = 64, ranks = 4, topk = 6, cap = 1024, intermediate = 2048;
  std::vector<int> tokens;
};

void add_grid_flags(CLI::App& app, GridArguments& a) {
  app.add_option("--experts", a.experts);
  app.add_option("--ranks", a.ranks);
  app.add_option("--topk", a.topk);
  app.add_option("--cap", a.cap);
  app.add_option("--intermediate", a.intermediate);
  app.add_option("--tokens", a.tokens)->delimiter(',');
}

/// One step of the activation, with as many rows as `counts` say, one behind the other.
class GridBed {
 public:
  GridBed(const GridArguments& a, int rows) : counts_(static_cast<std::size_t>(a.experts), 0) {
    std::mt19937_64 random(1);
    for (int row = 0; row < rows; ++row) ++counts_[random() % counts_.size()];
    const auto wide = static_cast<std::size_t>(rows) * static_cast<std::size_t>(a.intermediate);
    gate_up_.assign(2 * wide, to_bf16(0.5f));
    step_.intermediate = a.intermediate;
    step_.gate_up = gate_up_.data();
    step_.clamp = 10.0f;
    values_.resize(static_cast<std::size_t>(rows) * step_.value_bytes());
    scales_.resize(static_cast<std::size_t>(rows) * step_.scale_bytes());
    step_.values = values_.data();
    step_.scales = scales_.data();
  }
  const ActivationStep& step() const { return step_; }
  const std::vector<int>& counts() const { return counts_; }

 private:
  std::vector<int> counts_;
  std::vector<bf16> gate_up_;
  std::vector<std::byte> values_, scales_;
  ActivationStep step_;
};

}  // namespace

Measured measure_host_grids(const std::string& typed, const std::string& commit) {
  GridArguments a;
  read_flags(typed, a, add_grid_flags);
  const int most = a.cap * a.ranks * a.topk;
  Json rows = Json::array();
  for (const int tokens : a.tokens) {
    const GridBed bed(a, tokens * a.topk);  // of all ranks' tokens, an even share is here
    for (const bool padded : {true, false}) {
      GridCounts counts;
      const std::vector<double> samples = time_calls(9, [&] {
        counts = padded ? run_padded(bed.step(), bed.counts(), most) : run_persistent(bed.step(), bed.counts(), 1, most);
      });
      Json row{{"tokens", tokens}, {"rows", tokens * a.topk}, {"grid", padded ? "padded" : "persistent"},
               {"l2", "warm"},     {"ctas", counts.blocks},   {"empty", counts.empty}};
      row.update(summary(samples));
      rows.push_back(row);
      print_line(fmt::format("{:>6} rows {:<10} {:>6} blocks, {:>6} of them empty: {:>9.1f} us", tokens * a.topk,
                             padded ? "padded" : "persistent", counts.blocks, counts.empty, median(samples)));
    }
  }
  Json json = result_head("grids", commit, host_machine_json());
  json.update({{"experts", a.experts},
               {"ranks", a.ranks},
               {"topk", a.topk},
               {"cap", a.cap},
               {"intermediate", a.intermediate},
               {"slots", 1},
               {"rows", rows}});
  return {json, ""};
}

// ---------------------------------------------------------------- the machine

Measured measure_host_machine(const std::string&, const std::string& commit) {
  constexpr std::size_t bytes = std::size_t{256} << 20;
  std::vector<std::byte> from(bytes, std::byte{1}), to(bytes);
  const std::vector<double> copy = time_calls(5, [&] { std::memcpy(to.data(), from.data(), bytes); });
  constexpr int rows = 96, size = 2048;
  const std::vector<float> a(static_cast<std::size_t>(rows) * size, 0.5f), b(static_cast<std::size_t>(size) * size, 0.25f);
  std::vector<float> c(a.size());
  openblas_set_num_threads(1);  // as the engine has it: threads are ranks
  const std::vector<double> product = time_calls(9, [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, size, size, 1.0f, a.data(), size, b.data(), size, 0.0f, c.data(),
                size);
  });
  const double copied = 2.0 * bytes / (median(copy) * 1e-6);
  const double operations = 2.0 * rows * size * size / (median(product) * 1e-6);
  print_line(
      fmt::format("memcpy {:.1f} GB/s, read and written bytes added up; the BLAS' f32 products {:.1f} GFLOP/s, by one thread each",
                  copied / 1e9, operations / 1e9));
  Json json = result_head("machine", commit, host_machine_json());
  json.update({{"copy_bytes_per_second", copied},
               {"copy_samples_us", copy},
               {"operations_per_second_a_core", operations},
               {"product_samples_us", product}});
  return {json, ""};
}

std::map<std::string, Runner> host_runners() {
  const Runner step = [](const std::string& typed, const std::string& commit) -> Measured {
    StepArguments a;
    read_flags(typed, a, add_step_flags);
    a.commit = commit;
    Measured measured;
    int status = 0;
    try {
      measured.result = measure_step(
          a, [&](const Json& so_far) { measured.result = so_far; }, status);
    } catch (const InputError&) {
      throw;
    } catch (const Error& error) {
      if (measured.result.is_null()) throw;
      measured.failed = error.what();
    }
    measured.wrong = status != 0;
    return measured;
  };
  return {{"copies", measure_copies},
          {"buffers", measure_buffers},
          {"machine", measure_host_machine},
          {"layer", measure_host_layer},
          {"trips", measure_host_trips},
          {"grids", measure_host_grids},
          {"step", step},
          {"trace", measure_trace}};
}

}  // namespace heddle::tool
