#include "bench_experts_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "bench_cublas.hpp"
#include "bench_machine.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

/// What dense products of real data reach on an H200, operations a second.
double tensor_rate(bool fp8) { return fp8 ? 1400e12 : 790e12; }

/// A graph of more than this is as good as a longer one.
constexpr double enough_us = 3000;

std::string label_of(const RowCounts& counts, const std::string& product, const std::string& by, int ctas) {
  return fmt::format("{:>10} {:<6} {:<10} {:>4}", counts.name, product, by, ctas);
}

double number(const Json& entry, const char* field) { return entry.at(field).get<double>(); }

}  // namespace

ExpertsRun::ExpertsRun(const ExpertsArguments& a, const std::vector<RowCounts>& counts, Lanes& lanes)
    : a_(a), counts_(counts), lanes_(lanes) {}

bool ExpertsRun::wants(const std::vector<std::string>& words, const char* word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::vector<double> ExpertsRun::time(int calls, int replays, const Queue& queue) {
  Replay replay(lanes_, [&] {
    for (int call = 0; call < calls; ++call) queue(call);
  });
  std::vector<double> samples = replay.run(
      replays, [] {}, give_up_);
  for (double& sample : samples) sample /= calls;
  return samples;
}

void ExpertsRun::measure_launches() {
  under_way_ = "an empty kernel";
  const double empty = median(time(a_.calls, a_.replays, [&](int) { launch_empty_product(lanes_.sms(), lanes_.stream(0)); }));
  launches_ = {{"empty_us", empty}, {"ctas", lanes_.sms()}};
  print_line(fmt::format("an empty launch in a graph, {} CTAs of 640 threads and 192 KB: {:.2f} us", lanes_.sms(), empty));
}

int ExpertsRun::calls_of(const ProductBed& bed, double us) const {
  const int wanted = std::max(1, std::min(a_.calls, static_cast<int>(std::ceil(enough_us / std::max(us, 1.0)))));
  return (wanted + bed.cycle() - 1) / bed.cycle() * bed.cycle();
}

ExpertsRun::Floor ExpertsRun::floor_of(ProductBed& bed) {
  under_way_ = fmt::format("the stream of {} weights", word_of(kinds, bed.shape().kind));
  const double expected = bed.counts().touched() * bed.expert_bytes() / 4.5e6;
  const auto samples =
      time(calls_of(bed, expected), std::min(10, a_.replays), [&](int call) { bed.queue_stream(call, lanes_.sms()); });
  return {median(samples), 1e6 * flops(bed.shape(), bed.counts()) / tensor_rate(bed.shape().fp8())};
}

Json ExpertsRun::entry_of(const ProductBed& bed, const Line& line) const {
  const RowCounts& counts = bed.counts();
  return {{"shape", shape_.name},
          {"hidden", shape_.hidden},
          {"intermediate", shape_.intermediate},
          {"weights", word_of(kinds, bed.shape().kind)},
          {"product", line.product},
          {"by", line.by},
          {"rule", line.rule},
          {"ctas", line.ctas},
          {"counts", counts.name},
          {"rows", counts.total()},
          {"most_rows", counts.most()},
          {"touched", counts.touched()},
          {"layers", bed.layers()}};
}

void ExpertsRun::report(Json& entry, const std::string& label, const ProductBed& bed, const std::vector<double>& samples,
                        double bytes, const Floor& floor) {
  const double middle = median(samples);
  entry.update(summary(samples));
  entry["tflops"] = 1e-6 * flops(bed.shape(), bed.counts()) / middle;
  entry["weight_bytes"] = bytes;
  entry["weight_gbps"] = 1e-3 * bytes / middle;
  entry["stream_us"] = floor.stream_us;
  entry["flops_us"] = floor.flops_us;
  entry["floor_us"] = floor.us();
  entry["share_of_floor"] = floor.us() / middle;
  print_line(fmt::format("{} {:>9.2f} {:>9.2f} {:>9.2f} {:>8.1f} {:>8.0f} {:>9.2f} {:>5.0f}%{}", label, middle,
                         number(entry, "least_us"), number(entry, "most_us"), number(entry, "tflops"), number(entry, "weight_gbps"),
                         floor.us(), 100 * floor.us() / middle, entry["rule"].get<bool>() ? "  rule" : ""));
  rows_.push_back(entry);
}

bool ExpertsRun::right(ProductBed& bed, Json& entry, const std::string& label, bool activates, const Queue& queue) {
  under_way_ = "the check of:" + label;
  const double error = bed.error_of(
      activates, [&] { queue(0); }, give_up_);
  const double allowed = bed.allowed_error(activates);
  entry["error"] = error;
  if (error <= allowed) return true;  // false for NaN
  const std::string what = std::isnan(error) ? "not all rows were written, or not with numbers"
                                             : fmt::format("off by {:.2g} of the reference, {:.2g} is allowed", error, allowed);
  print_line(fmt::format("{} wrong: {}", label, what));
  entry["wrong"] = what;
  rows_.push_back(entry);
  ++wrong_;
  return false;
}

void ExpertsRun::own(ProductBed& bed, const Floor& floor, const std::string& product) {
  const bool activates = product == "fused";
  const sm90::BlockChoice choice{DeviceRowBlocks::automatic, sm90::has_medium_blocks(bed.kind())};
  const sm90::RowBlocks rule = choice.choose(average_rows(bed.counts()));
  const std::vector<int> all_sms{lanes_.sms()};
  for (const int ctas : a_.ctas.empty() ? all_sms : a_.ctas) {
    for (const sm90::RowBlocks blocks : sm90::every_row_blocks) {
      const char* name = sm90::name(blocks);
      if (!choice.includes(blocks)) continue;
      if (!wants(a_.blocks, name) && !(wants(a_.blocks, "auto") && blocks == rule)) continue;
      if (blocks != sm90::RowBlocks::large && bed.counts().total() > 256 * bed.counts().touched()) continue;  // hopeless, and slow
      const Line line{product, name, ctas, blocks == rule};
      const std::string label = label_of(bed.counts(), product, name, ctas);
      Json entry = entry_of(bed, line);
      attempt(rows_, entry, label, [&] {
        if (ctas > lanes_.sms()) throw InputError(fmt::format("--ctas {}: this GPU has {} SMs, a CTA each", ctas, lanes_.sms()));
        const auto queue = [&](int call) { bed.queue_product(call, blocks, activates, ctas); };
        if (!right(bed, entry, label, activates, queue)) return;
        under_way_ = label;
        const auto samples = time(calls_of(bed, floor.us()), a_.replays, queue);
        report(entry, label, bed, samples, bed.counts().touched() * bed.expert_bytes(), floor);
        if (blocks == rule && (a_.ctas.empty() || ctas == a_.ctas.front()))
          touched_.push_back({product, bed.counts().most(), bed.counts().touched(), median(samples)});
      });
    }
  }
}

void ExpertsRun::cutlass(ProductBed& bed, const Floor& floor) {
  const Line line{bed.shape().down ? "gemm2" : "gemm1", "cutlass", lanes_.sms(), false};
  const std::string label = label_of(bed.counts(), line.product, line.by, line.ctas);
  Json entry = entry_of(bed, line);
  attempt(rows_, entry, label, [&] {
    std::vector<std::unique_ptr<CutlassGrouped>> grouped;
    for (int call = 0; call < bed.cycle(); ++call) grouped.push_back(std::make_unique<CutlassGrouped>(bed.problems(call)));
    const auto queue = [&](int call) { grouped[static_cast<std::size_t>(call) % grouped.size()]->launch(lanes_.stream(0)); };
    if (!right(bed, entry, label, false, queue)) return;
    under_way_ = label;
    entry["kernel"] = CutlassGrouped::kernel();
    const auto samples = time(calls_of(bed, floor.us()), a_.replays, queue);
    report(entry, label, bed, samples, bed.counts().touched() * bed.expert_bytes(), floor);
  });
}

void ExpertsRun::cublas(ProductBed& bed) {
  const Line line{bed.shape().down ? "gemm2" : "gemm1", "cublaslt", lanes_.sms(), false};
  const std::string label = label_of(bed.counts(), line.product, line.by, line.ctas);
  Json entry = entry_of(bed, line);
  attempt(rows_, entry, label, [&] {
    under_way_ = label;
    const ProductShape& shape = bed.shape();
    const int rows = (bed.counts().total() + 15) / 16 * 16;  // tensor cores of e4m3 want that
    CublasDense dense(shape.fp8(), rows, shape.rows(), shape.cols());
    const int matrices = bed.layers() * shape.experts;
    const auto queue_with = [&](int algorithm) {
      return [&, algorithm](int call) {
        const int matrix = call % matrices;
        dense.launch(algorithm, bed.stored_weights(matrix % bed.layers(), matrix / bed.layers()), bed.tokens(), bed.results(),
                     lanes_.stream(0));
      };
    };
    const Floor floor{0, 1e6 * flops(shape, bed.counts()) / tensor_rate(shape.fp8())};
    const int calls = std::max(calls_of(bed, floor.us()), std::min(matrices, floor.us() < 100 ? 32 : 1));
    int best = 0;
    double best_us = 0;
    for (int algorithm = 0; algorithm < dense.algorithms(); ++algorithm) {
      queue_with(algorithm)(0);  // kernels are loaded at their first launch, not while a stream is captured
      lanes_.settle(give_up_);
      const double us = median(time(calls, 3, queue_with(algorithm)));
      if (algorithm > 0 && us >= best_us) continue;
      best = algorithm;
      best_us = us;
    }
    entry["library"] = CublasDense::version();
    entry["algorithms"] = dense.algorithms();
    const double bytes = static_cast<double>(shape.rows()) * shape.cols() * (shape.fp8() ? 1 : 2);
    report(entry, label, bed, time(calls, a_.replays, queue_with(best)), bytes, floor);
  });
}

void ExpertsRun::products(ProductBed& bed, const RowCounts& counts) {
  bed.set_counts(counts);
  if (counts.total() == 0) {
    print_line(fmt::format("{:>10} no rows for these experts", counts.name));
    return;
  }
  const Floor floor = floor_of(bed);
  if (bed.shape().down) {
    own(bed, floor, "gemm2");
  } else {
    if (wants(a_.products, "gemm1")) own(bed, floor, "gemm1");
    if (wants(a_.products, "fused")) own(bed, floor, "fused");
    if (!wants(a_.products, "gemm1")) return;  // whose peers follow
  }
  const WeightKind kind = bed.shape().kind;
  if (wants(a_.peers, "cutlass") && kind == WeightKind::fp8_block) cutlass(bed, floor);
  if (wants(a_.peers, "cublaslt") && (kind == WeightKind::fp8_block || kind == WeightKind::bf16)) cublas(bed);
}

/// What the rule's kernels take from the fewest touched experts to the most, an expert.
void ExpertsRun::touched_costs(const ProductBed& bed) {
  std::set<std::pair<std::string, int>> cases;
  for (const Touched& one : touched_) cases.insert({one.label, one.rows});
  for (const auto& [product, rows] : cases) {
    const Touched* least = nullptr;
    const Touched* most = nullptr;
    for (const Touched& one : touched_) {
      if (one.label != product || one.rows != rows) continue;
      if (least == nullptr || one.experts < least->experts) least = &one;
      if (most == nullptr || one.experts > most->experts) most = &one;
    }
    if (least->experts == most->experts) continue;
    const double cost = (most->us - least->us) / (most->experts - least->experts);
    print_line(fmt::format("{:>10} {:<6} one more touched expert costs {:.2f} us ({} to {}), {:.0f} GB/s", rows, product, cost,
                           least->experts, most->experts, 1e-3 * bed.expert_bytes() / cost));
    costs_.push_back({{"shape", shape_.name},
                      {"weights", word_of(kinds, bed.shape().kind)},
                      {"product", product},
                      {"rows_an_expert", rows},
                      {"from", least->experts},
                      {"to", most->experts},
                      {"us_an_expert", cost},
                      {"bytes_an_expert", bed.expert_bytes()}});
  }
}

void ExpertsRun::matrix(const ExpertsShape& shape, WeightKind kind, bool down) {
  shape_ = shape;
  touched_.clear();
  const ProductShape product{kind, shape.hidden, shape.intermediate, down, a_.experts};
  const std::string title = fmt::format("{} {} [{}, {}]", shape.name, word_of(kinds, kind), product.rows(), product.cols());
  under_way_ = title + ", drawing of weights";
  int most_rows = 16;
  for (const RowCounts& counts : counts_) most_rows = std::max(most_rows, (counts.total() + 15) / 16 * 16);
  const Json entry{{"shape", shape.name}, {"weights", word_of(kinds, kind)}, {"product", down ? "gemm2" : "gemm1"}};
  attempt(rows_, entry, title, [&] {
    ProductBed bed(lanes_, product, most_rows, a_.seed);
    bed.in_boxes = !a_.gather;
    print_line(
        fmt::format("\n{}: {} experts of {:.2f} MB, {} layers\n{:>10} {:<6} {:<10} {:>4} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9} {:>6}",
                    title, a_.experts, 1e-6 * bed.expert_bytes(), bed.layers(), "rows", "", "by", "ctas", "median", "least", "most",
                    "TFLOP/s", "GB/s", "floor", "share"));
    for (const RowCounts& counts : counts_) products(bed, counts);
    if (!a_.touched.empty()) touched_costs(bed);
  });
}

void ExpertsRun::all(const std::function<void()>& save, const std::function<void()>& give_up) {
  give_up_ = give_up;
  const cuda::DeviceScope scope(lanes_.device(0));
  prepare_streams();
  measure_launches();
  machine_ = machine_of(lanes_);  // while the GPU is awake, for its clocks
  print_line(
      fmt::format("us a call, median of {} replays of a graph; rows an expert; floor: the weights streamed by bulk copies, or "
                  "{:.0f} (e4m3) and {:.0f} (bf16) TFLOP/s, whichever takes longer; share: of the floor in the median",
                  a_.replays, 1e-12 * tensor_rate(true), 1e-12 * tensor_rate(false)));
  for (const std::string& shape : a_.shapes) {
    for (const std::string& kind : a_.weights) {
      if (wants(a_.products, "gemm1") || wants(a_.products, "fused"))
        matrix(shape_of(shape), value_of(kinds, "--weights", kind), false);
      if (wants(a_.products, "gemm2")) matrix(shape_of(shape), value_of(kinds, "--weights", kind), true);
      save();
    }
  }
  if (wrong_ > 0) print_line(fmt::format("\n{} of the results were wrong", wrong_));
}

Json ExpertsRun::json() const {
  Json json = result_head("experts", a_.commit, machine_);
  json.update({{"experts", a_.experts},
               {"seed", a_.seed},
               {"rows_in_boxes", !a_.gather},
               {"tensor_tflops", {{"e4m3", 1e-12 * tensor_rate(true)}, {"bf16", 1e-12 * tensor_rate(false)}}},
               {"launch", launches_},
               {"rows", rows_},
               {"touched", costs_}});
  return json;
}

}  // namespace heddle::tool
