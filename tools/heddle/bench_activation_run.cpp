#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <random>

#include "bench_activation.hpp"
#include "bench_kernels.hpp"
#include "bench_machine.hpp"
#include "experts/activation/flat_list.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

using Json = nlohmann::ordered_json;
using cuda::check;

namespace {

const std::map<std::string, DeviceGrid> grids{
    {"padded", DeviceGrid::padded}, {"persistent", DeviceGrid::persistent}, {"fixed", DeviceGrid::fixed}};
const std::map<std::string, bool> l2_states{{"warm", false}, {"cold", true}};
const std::map<std::string, ScaleOrder> orders{
    {"row", ScaleOrder::row_major}, {"column", ScaleOrder::column_major}, {"packed", ScaleOrder::packed}};

std::optional<float> clamp_of(const std::string& typed) {
  if (typed == "none") return std::nullopt;
  float value = 0;
  const auto [end, error] = std::from_chars(typed.data(), typed.data() + typed.size(), value);
  if (error != std::errc() || end != typed.data() + typed.size() || !(value >= 0.0f))
    throw InputError(fmt::format("--clamp does not know '{}'; it takes none or a number of at least 0", typed));
  return value;
}

/// The step over whole buffers, without pointers.
DeviceActivation shape_of(const ActivationArguments& a) {
  DeviceActivation step;
  step.experts = a.experts;
  step.intermediate = a.intermediate;
  step.block_rows = a.cap * a.ranks;
  step.most_rows = padded_blocks(a.cap * a.ranks, a.topk);
  step.clamp = clamp_of(a.clamp);
  step.format = value_of(activations, "--format", a.format);
  step.group = a.group;
  step.scale_layout = {value_of(orders, "--order", a.order), value_of(scales, "--scale", a.scale), step.groups(),
                       (a.experts * a.cap * a.ranks + 3) / 4 * 4};
  return step;
}

std::size_t value_bytes(const DeviceActivation& step) {
  return static_cast<std::size_t>(step.intermediate) * (step.format == Activation::fp8 ? 1 : 2);
}

}  // namespace

void check_arguments(const ActivationArguments& a) {
  const auto at_least = [](const char* option, int value, int least) {
    if (value < least) throw InputError(fmt::format("{} {}: at least {} is needed", option, value, least));
  };
  for (const int tokens : a.tokens) at_least("--tokens", tokens, 0);
  for (const int rows : a.rows) at_least("--rows", rows, 0);
  for (const int ctas : a.empty_ctas) at_least("--empty-ctas", ctas, 0);
  at_least("--experts", a.experts, 1);
  at_least("--ranks", a.ranks, 1);
  at_least("--topk", a.topk, 1);
  at_least("--cap", a.cap, 1);
  at_least("--replays", a.replays, 1);
  at_least("--launches", a.launches, 1);
  if (std::int64_t{a.cap} * a.ranks * std::max(a.topk, a.experts) > (1 << 28))
    throw InputError(fmt::format("--cap {} with --ranks {}: too many rows", a.cap, a.ranks));
  if (a.intermediate < 64 || a.intermediate % 64 != 0)
    throw InputError(fmt::format("--intermediate {}: a multiple of 64 is needed", a.intermediate));
  if (a.group != 128 && a.group != 32) throw InputError(fmt::format("--group {}: 128 or 32 are supported", a.group));
  for (const std::string& grid : a.grids) value_of(grids, "--grid", grid);
  for (const std::string& state : a.l2) value_of(l2_states, "--l2", state);
  const DeviceActivation shape = shape_of(a);
  for (const int tokens : a.tokens) {
    if (tokens > a.cap) throw InputError(fmt::format("--tokens {}: --cap is {}", tokens, a.cap));
  }
  for (const int rows : a.rows) {
    if (rows > shape.most_rows)
      throw InputError(fmt::format("--rows {}: there can be {} (--cap x --ranks x --topk)", rows, shape.most_rows));
  }
  if (shape.scale_layout.order == ScaleOrder::column_major && a.scale != "f32")
    throw InputError("--order column needs --scale f32");
  if (shape.scale_layout.order == ScaleOrder::packed && a.scale != "ue8m0") throw InputError("--order packed needs --scale ue8m0");
}

ActivationRun::ActivationRun(const ActivationArguments& a, Lanes& lanes)
    : a_(a),
      lanes_(lanes),
      whole_(shape_of(a)),
      gate_up_(lanes.device(0), static_cast<std::size_t>(a.experts) * static_cast<std::size_t>(block_rows()) * 4 *
                                    static_cast<std::size_t>(a.intermediate)),
      weights_(lanes.device(0), static_cast<std::size_t>(a.experts) * static_cast<std::size_t>(block_rows()) * sizeof(float)),
      counts_(lanes.device(0), static_cast<std::size_t>(a.experts) * sizeof(int)),
      values_(lanes.device(0), static_cast<std::size_t>(a.experts) * static_cast<std::size_t>(block_rows()) * value_bytes(whole_)),
      scales_(lanes.device(0),
              whole_.scale_layout.bytes(static_cast<std::size_t>(a.experts) * static_cast<std::size_t>(block_rows())) + 16),
      flush_(lanes.device(0), std::size_t{512} << 20) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, lanes.device(0)), "size of the L2");
  l2_bytes_ = static_cast<std::size_t>(bytes);
  fill_normal(gate_up_.as<bf16>(), gate_up_.bytes() / sizeof(bf16), a.seed, lanes.stream(0));
  // Weights of a half and around it; what they are changes nothing.
  const std::vector<float> weights(weights_.bytes() / sizeof(float), 0.4375f);
  check(cudaMemcpy(weights_.as<float>(), weights.data(), weights_.bytes(), cudaMemcpyHostToDevice), "weights");
  lanes.settle();
  slots_ = activation_slots(whole_);
  machine_ = machine_of(lanes);
}

std::vector<double> ActivationRun::time(int launches, const std::function<void(int)>& launch, bool cold) {
  Replay replay(lanes_, [&] {
    for (int i = 0; i < launches; ++i) launch(i);
  });
  std::vector<double> samples = replay.run(a_.replays, [&] {
    if (cold) check(cudaMemsetAsync(flush_.as<void>(), 0, flush_.bytes(), lanes_.stream(0)), "flush of the L2");
  });
  for (double& sample : samples) sample /= launches;
  return samples;
}

double ActivationRun::bytes_of(int rows) const {
  const double scale_bytes = whole_.format == Activation::bf16 ? 0 : static_cast<double>(whole_.scale_layout.bytes_a_scale());
  return rows * (4.0 * a_.intermediate + static_cast<double>(value_bytes(whole_)) + whole_.groups() * scale_bytes +
                 (a_.no_weights ? 0 : 4));
}

void ActivationRun::measure_ceiling() {
  const std::size_t half = flush_.bytes() / 2;
  const double copy_us = median(time(
      4,
      [&](int) {
        check(cudaMemcpyAsync(flush_.as<std::byte>(), flush_.as<std::byte>() + half, half, cudaMemcpyDeviceToDevice,
                              lanes_.stream(0)),
              "copy");
      },
      false));
  copy_rate_ = 2.0 * static_cast<double>(half) / (copy_us * 1e-6);
  nothing_us_ = median(time(
      a_.launches, [&](int) { launch_nothing(lanes_.sms(), 256, lanes_.stream(0)); }, false));
  print_line(fmt::format("{} CTAs of {} threads are resident at once; {} rows a block, at most {} rows in all", slots_,
                         activation_threads(a_.intermediate), block_rows(), whole_.most_rows));
  print_line(
      fmt::format("floor: a kernel that does nothing, {:.2f} us in a graph, and the rows' bytes at the rate of a copy, {:.0f} GB/s",
                  nothing_us_, copy_rate_ / 1e9));
}

void ActivationRun::measure_empty_ctas() {
  check(cudaMemset(counts_.as<int>(), 0, counts_.bytes()), "counts");
  lanes_.settle();
  double first_us = 0, first_ctas = 0;
  for (const int ctas : a_.empty_ctas) {
    if (ctas == 0) continue;
    DeviceActivation empty = step({}, 0);
    empty.most_rows = ctas;
    const std::vector<double> samples = time(
        a_.launches,
        [&](int) {
          launch_activation(empty, {DeviceGrid::padded, slots_, a_.ahead}, lanes_.stream(0));
        },
        false);
    Json entry{{"ctas", ctas}};
    entry.update(summary(samples));
    empty_.push_back(entry);
    print_line(fmt::format("padded grid without rows, {:>6} CTAs: {:8.2f} us", ctas, median(samples)));
    if (first_ctas == 0) {
      first_us = median(samples);
      first_ctas = ctas;
    } else if (ctas > first_ctas) {
      empty_cta_ns_ = 1e3 * (median(samples) - first_us) / (ctas - first_ctas);
    }
  }
  if (empty_cta_ns_ > 0) {
    print_line(fmt::format("an empty CTA: {:.3f} ns of the GPU, {:.2f} us in its slot (last size against the first)", empty_cta_ns_,
                           1e-3 * empty_cta_ns_ * slots_));
  }
}

ActivationRun::Size ActivationRun::deal(int rows, int tokens) {
  std::mt19937_64 random(a_.seed + static_cast<std::uint64_t>(rows));
  std::vector<int> counts(static_cast<std::size_t>(a_.experts), 0);
  for (int row = 0; row < rows;) {
    int& count = counts[random() % counts.size()];
    if (count == block_rows()) continue;  // an expert has a token once
    ++count;
    ++row;
  }
  check(cudaMemcpy(counts_.as<int>(), counts.data(), counts_.bytes(), cudaMemcpyHostToDevice), "counts");
  const int largest = std::max(1, *std::max_element(counts.begin(), counts.end()));
  return {rows, tokens, largest, block_rows() / largest};
}

DeviceActivation ActivationRun::step(const Size& size, int set) const {
  DeviceActivation step = whole_;
  const auto shift = static_cast<std::size_t>(set) * static_cast<std::size_t>(size.largest);
  step.gate_up = gate_up_.as<bf16>() + shift * 2 * static_cast<std::size_t>(a_.intermediate);
  step.counts = counts_.as<int>();
  step.weights = a_.no_weights ? nullptr : weights_.as<float>() + shift;
  step.values = values_.as<std::byte>() + shift * value_bytes(whole_);
  step.scales = scales_.as<std::byte>() + shift * whole_.scale_layout.row_stride();
  return step;
}

void ActivationRun::measure(const Size& size, DeviceGrid grid, bool cold) {
  const double bytes = bytes_of(size.rows);
  const std::string label = fmt::format("{:>6} {:>6} {:<10} {:<5}", size.tokens == 0 ? "" : fmt::to_string(size.tokens), size.rows,
                                        word_of(grids, grid), word_of(l2_states, cold));
  if (!cold && bytes > 0.8 * static_cast<double>(l2_bytes_)) {
    print_line(label + " rows do not fit the L2");
    return;
  }
  // Every launch of a replay finds rows of its own, as long as there are any.
  const std::vector<double> samples = time(
      a_.launches,
      [&](int i) {
        launch_activation(step(size, cold ? i % size.sets : 0), {grid, slots_, a_.ahead}, lanes_.stream(0));
      },
      cold);
  const double middle = median(samples), floor = nothing_us_ + 1e6 * bytes / copy_rate_;
  Json entry{{"tokens", size.tokens},
             {"rows", size.rows},
             {"grid", word_of(grids, grid)},
             {"l2", word_of(l2_states, cold)},
             {"ctas", activation_ctas(whole_, {grid, slots_})},
             {"bytes", bytes},
             {"sets", cold ? std::min(size.sets, a_.launches) : 1},
             {"bytes_per_second", bytes / (middle * 1e-6)},
             {"share_of_copy", bytes / (middle * 1e-6) / copy_rate_},
             {"floor_us", floor},
             {"times_floor", middle / floor}};
  entry.update(summary(samples));
  rows_.push_back(entry);
  print_line(fmt::format("{} {:>7} {:>9.2f} {:>9.2f} {:>9.2f} {:>8.0f} {:>5.0f}% {:>8.2f} {:>6.2f}", label,
                         entry["ctas"].get<int>(), middle, entry["least_us"].get<double>(), entry["most_us"].get<double>(),
                         bytes / (middle * 1e-6) / 1e9, 100 * entry["share_of_copy"].get<double>(), floor, middle / floor));
}

void ActivationRun::all() {
  measure_ceiling();
  measure_empty_ctas();
  print_line(fmt::format("\n{:>6} {:>6} {:<10} {:<5} {:>7} {:>9} {:>9} {:>9} {:>8} {:>6} {:>8} {:>6}", "tokens", "rows", "grid",
                         "L2", "CTAs", "median", "least", "most", "GB/s", "copy", "floor", "times"));
  std::vector<std::pair<int, int>> sizes;  // rows, tokens
  for (const int tokens : a_.tokens) sizes.emplace_back(tokens * a_.topk, tokens);
  for (const int rows : a_.rows) sizes.emplace_back(rows, 0);
  for (const auto& [rows, tokens] : sizes) {
    if (rows == 0) continue;
    const Size size = deal(rows, tokens);
    for (const std::string& state : a_.l2) {
      for (const std::string& grid : a_.grids) measure(size, grids.at(grid), l2_states.at(state));
    }
  }
}

Json ActivationRun::json() const {
  Json json = result_head("activation", a_.commit, machine_);
  json.update({{"experts", a_.experts},
               {"ranks", a_.ranks},
               {"topk", a_.topk},
               {"cap", a_.cap},
               {"intermediate", a_.intermediate},
               {"format", a_.format},
               {"group", a_.group},
               {"scale", a_.scale},
               {"order", a_.order},
               {"clamp", a_.clamp},
               {"weights", !a_.no_weights},
               {"ahead", a_.ahead},
               {"launches_a_replay", a_.launches},
               {"slots", slots_},
               {"l2_bytes", l2_bytes_},
               {"copy_bytes_per_second", copy_rate_},
               {"nothing_us", nothing_us_},
               {"empty_cta_ns", empty_cta_ns_},
               {"empty_grids", empty_},
               {"rows", rows_}});
  return json;
}

}  // namespace heddle::tool
