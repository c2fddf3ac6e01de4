// The activation step on a GPU: against the host engine, bit for bit where exp cannot differ, grids and placings against each
// other, and nothing written that is no real row's.
#include <cmath>
#include <cstring>
#include <limits>

#include "exchange_support.hpp"
#include "formats/rows.hpp"
#include "gpu/activation_bed.hpp"
#include "gpu/activation_values.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

constexpr DeviceGrid every_grid[] = {DeviceGrid::padded, DeviceGrid::persistent, DeviceGrid::fixed};
const char* name(DeviceGrid grid) {
  return grid == DeviceGrid::padded ? "padded" : (grid == DeviceGrid::persistent ? "persistent" : "fixed");
}

/// Counts of several kinds: even, with empty experts, all in one, none at all.
std::vector<int> draw_counts(std::mt19937_64& random, int experts, int most) {
  std::vector<int> counts(static_cast<std::size_t>(experts), 0);
  const auto kind = random() % 5;
  if (kind == 0) return counts;
  if (kind == 1) {
    counts[random() % counts.size()] = most;
    return counts;
  }
  for (int left = most; left > 0; --left) {
    auto expert = random() % counts.size();
    if (kind == 2) expert = expert / 3 * 3;  // two experts of three are empty
    ++counts[expert];
  }
  return counts;
}

ActivationCase draw_case(std::mt19937_64& random) {
  const auto one_of = [&random](const auto& list) { return list[random() % std::size(list)]; };
  ActivationCase c;
  constexpr int widths[] = {64, 128, 640, 2048, 2304, 2880, 8192 + 192};
  constexpr int experts[] = {1, 2, 7, 32, 33, 64, 257, 1000, 1024};
  constexpr float clamps[] = {10.0f, 1.7f, 0.3f, 0.0f};  // as bf16 and not
  const int local = one_of(experts);
  c.intermediate = widths[random() % (local > 100 ? 3 : std::size(widths))];  // blocks of many experts take memory
  c.counts = draw_counts(random, local, 1 + static_cast<int>(random() % (local > 100 ? 12 : (c.intermediate > 1000 ? 30 : 400))));
  if (random() % 3 != 0) c.clamp = one_of(clamps);
  c.weighted = random() % 2 == 0;
  c.format = random() % 4 == 0 ? Activation::bf16 : Activation::fp8;
  c.group = random() % 3 == 0 ? 32 : 128;
  c.scale = random() % 2 == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0;
  if (random() % 2 == 0) c.order = c.scale == ScaleFormat::f32 ? ScaleOrder::column_major : ScaleOrder::packed;
  return c;
}

/// Codes in the order of their values.
int e4m3_order(std::byte code) {
  const int magnitude = static_cast<int>(code) & 0x7F;
  return (static_cast<int>(code) & 0x80) != 0 ? -magnitude : magnitude;
}
int bf16_order(const std::byte* value) {
  bf16 bits;
  std::memcpy(&bits, value, sizeof bits);
  const int magnitude = bits.bits & 0x7FFF;
  return (bits.bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/// How many codes, or bf16 values, lie between two results. What is all but zero is zero: there exp overflows or not.
int steps_apart(const ActivationCase& c, const ActivatedRows& a, const ActivatedRows& b, std::size_t i) {
  if (c.format == Activation::fp8) return std::abs(e4m3_order(a.values[i]) - e4m3_order(b.values[i]));
  constexpr int all_but_zero = 0x0D00;  // 4e-31
  const int one = bf16_order(&a.values[2 * i]), other = bf16_order(&b.values[2 * i]);
  return std::abs(one) < all_but_zero && std::abs(other) < all_but_zero ? 0 : std::abs(one - other);
}

bool same_scale(const ActivationCase& c, const ActivatedRows& a, const ActivatedRows& b, std::size_t scale) {
  if (c.format == Activation::bf16) return true;
  if (c.scale == ScaleFormat::ue8m0) return a.scales[scale] == b.scales[scale];
  float one, other;
  std::memcpy(&one, &a.scales[4 * scale], 4);
  std::memcpy(&other, &b.scales[4 * scale], 4);
  return std::abs(one - other) <= 1e-6f * other;
}

/// exp differs in its last bits between engines, so a few values lie a step apart, and no more (docs/numerics.md). An ulp of f32
/// changes a code with a probability of about 2^-18, a bf16 value with 2^-15. A scale byte changes where amax lies on an
/// edge, one in a million; then the codes of its group move by a binade, which is 8 steps.
void expect_close(const ActivationCase& c, const ActivatedRows& device, const ActivatedRows& host) {
  ASSERT_EQ(device.values.size(), host.values.size());
  ASSERT_EQ(device.scales.size(), host.scales.size());
  const auto width = static_cast<std::size_t>(c.intermediate), group = static_cast<std::size_t>(c.group);
  const std::size_t groups = (width + group - 1) / group, rows = static_cast<std::size_t>(c.rows());
  std::size_t apart = 0, other_scales = 0;
  for (std::size_t i = 0; i < rows * width; ++i) {
    const std::size_t column = i % width;
    const bool same = same_scale(c, device, host, i / width * groups + column / group);
    other_scales += !same && column % group == 0 ? 1 : 0;
    const int steps = steps_apart(c, device, host, i);
    ASSERT_LE(steps, same ? 1 : 9) << "row " << i / width << " column " << column << (same ? "" : ", whose scale differs");
    apart += same && steps != 0 ? 1 : 0;
  }
  EXPECT_LE(apart, 5 + rows * width / 2000) << "values of " << rows * width;
  EXPECT_LE(other_scales, c.scale == ScaleFormat::f32 ? 0u : 1 + rows * groups / 5000) << "scales of " << rows * groups;
}

void expect_equal(const ActivatedRows& a, const ActivatedRows& b, const std::string& what) {
  EXPECT_TRUE(a.values == b.values) << what << ": values differ";
  EXPECT_TRUE(a.scales == b.scales) << what << ": scales differ";
}

TEST(ActivationGpu, EveryGateIsAsTheRuleSays) {
  SKIP_WITHOUT_GPU();
  Buffer<SiluOfGate> results(0, 65536);
  launch_silu_of_all_gates(results.data(), nullptr);
  const std::vector<SiluOfGate> all = results.read();
  double worst = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float gate = float_from_bits(bits << 16);
    const SiluOfGate& silu = all[bits];
    if (std::isnan(silu.rule) || std::isnan(silu.shared)) {
      EXPECT_EQ(std::isnan(silu.rule), std::isnan(silu.shared)) << "gate " << gate;
      continue;
    }
    if (std::abs(gate) < 60) {
      const double wide = gate, exact = wide / (1 + std::exp(-wide));
      if (std::abs(exact) > 1e-30) worst = std::max(worst, std::abs(silu.shared - exact) / std::abs(exact) * 0x1p23);
    }
    if (silu.shared == silu.rule) continue;  // infinity as well
    // Beyond -87 the rule's exponential overflows or its quotient is about to vanish.
    const double allowed = gate < -87.0f ? 1e-35 : 6 * 0x1p-23 * std::abs(static_cast<double>(silu.rule)) + 0x1p-148;
    EXPECT_LE(std::abs(static_cast<double>(silu.shared) - static_cast<double>(silu.rule)), allowed)
        << "gate " << gate << " gives " << silu.shared << ", the rule " << silu.rule;
  }
  EXPECT_LE(worst, 4.0) << "units of the last place from float64";
  std::printf("silu of all gates: at most %.2f ulp from float64\n", worst);
}

TEST(ActivationGpu, RandomShapesAgainstTheHostEngine) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (int round = 0; round < longer(60) && !HasFailure(); ++round) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(round));
    const ActivationCase c = draw_case(random);
    SCOPED_TRACE(fmt::format("round {}: {}", round, c.title()));
    const ActivationRows rows(c, random);
    const ActivatedRows host = on_the_host(c, rows);
    std::optional<ActivatedRows> first;
    for (const Placing placing : {Placing::masked, Placing::runs, Placing::flat}) {
      ActivationBed bed(c, placing, rows, random);
      for (const DeviceGrid grid : every_grid) {
        const ActivatedRows device = bed.run({grid});
        if (!first) {
          expect_close(c, device, host);
          first = device;
        }
        expect_equal(device, *first, fmt::format("placing {}, {} grid", static_cast<int>(placing), name(grid)));
      }
      // A persistent grid of any size, and one launched ahead of the end of the kernel before.
      expect_equal(bed.run({DeviceGrid::persistent, 1 + static_cast<int>(random() % 7), true}), *first, "few slots, ahead");
    }
  }
}

// Where every gate is at least 32, 1 + exp(-gate) is 1 on any engine: then all bits are the host's, in every layout of scales.
TEST(ActivationGpu, TheHostsBitsWhereExpCannotDiffer) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  for (const int intermediate : {64, 640, 2048, 2880}) {
    for (const int group : {128, 32}) {
      for (const ScaleFormat scale : {ScaleFormat::f32, ScaleFormat::ue8m0}) {
        for (const bool row_major : {true, false}) {
          ActivationCase c;
          c.intermediate = intermediate;
          c.counts = {3, 0, 11, 1};
          c.group = group;
          c.scale = scale;
          if (!row_major) c.order = scale == ScaleFormat::f32 ? ScaleOrder::column_major : ScaleOrder::packed;
          c.weighted = true;
          c.least_gate = 32;
          SCOPED_TRACE(c.title());
          const ActivationRows rows(c, random);
          expect_equal(ActivationBed(c, Placing::masked, rows, random).run({}), on_the_host(c, rows), "host and GPU");
        }
      }
    }
  }
}

TEST(ActivationGpu, FloatSixtyFour) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  ActivationCase c;
  c.counts = {40, 1, 0, 23};
  c.clamp = 7.0f;
  c.weighted = true;
  for (const Activation format : {Activation::fp8, Activation::bf16}) {
    c.format = format;
    const ActivationRows rows(c, random);
    const ActivatedRows device = ActivationBed(c, Placing::masked, rows, random).run({});
    const auto width = static_cast<std::size_t>(c.intermediate);
    double error = 0, norm = 0;
    std::vector<float> wide(width);
    for (std::size_t row = 0; row < static_cast<std::size_t>(c.rows()); ++row) {
      if (format == Activation::fp8) {
        widen_fp8(reinterpret_cast<const std::uint8_t*>(&device.values[row * width]), &device.scales[row * 16], c.intermediate,
                  {c.group, c.scale}, wide.data());
      } else {
        for (std::size_t i = 0; i < width; ++i) {
          bf16 value;
          std::memcpy(&value, &device.values[2 * (row * width + i)], 2);
          wide[i] = to_float(value);
        }
      }
      for (std::size_t i = 0; i < width; ++i) {
        const double gate = std::min(7.0, static_cast<double>(to_float(rows.gate_up[2 * row * width + i])));
        const double up = std::clamp(static_cast<double>(to_float(rows.gate_up[(2 * row + 1) * width + i])), -7.0, 7.0);
        const double exact = gate / (1 + std::exp(-gate)) * up * static_cast<double>(rows.weights[row]);
        error += std::pow(wide[i] - exact, 2);
        norm += std::pow(exact, 2);
      }
    }
    // Half a unit of 4 and of 8 significant bits, on average less.
    EXPECT_LE(std::sqrt(error / norm), format == Activation::fp8 ? 0.04 : 0.0025);
    EXPECT_GT(error, 0.0);
  }
}

TEST(ActivationGpu, NanAndInfinityStayInTheirGroup) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  const float infinity = std::numeric_limits<float>::infinity();
  for (const ScaleFormat scale : {ScaleFormat::f32, ScaleFormat::ue8m0}) {
    for (const std::optional<float> clamp : {std::optional<float>(), std::optional<float>(40.0f), std::optional<float>(33.3f)}) {
      ActivationCase c;
      c.intermediate = 640;
      c.counts = {4, 3};
      c.scale = scale;
      c.clamp = clamp;
      c.least_gate = 32;  // elsewhere, so that the host's bits can be asked for
      SCOPED_TRACE(c.title());
      ActivationRows rows(c, random);
      const auto gate = [&rows](std::size_t row, std::size_t i) -> bf16& { return rows.gate_up[row * 2 * 640 + i]; };
      gate(0, 5) = to_bf16(std::numeric_limits<float>::quiet_NaN());
      gate(1, 640 + 130) = to_bf16(std::numeric_limits<float>::quiet_NaN());
      gate(2, 639) = to_bf16(infinity);
      gate(3, 640 + 300) = to_bf16(-infinity);
      gate(4, 7) = to_bf16(-infinity);
      gate(5, 0) = to_bf16(-0.0f);
      gate(5, 1) = to_bf16(-1000.0f);
      gate(5, 2) = to_bf16(1e38f);
      for (std::size_t i = 0; i < 1280; ++i) gate(6, i) = to_bf16(i % 2 == 0 ? 0.0f : -0.0f);
      expect_equal(ActivationBed(c, Placing::runs, rows, random).run({}), on_the_host(c, rows), "host and GPU");
    }
  }
}

// Counts change between replays of one graph; beyond the bounds that DeviceActivation states nothing is touched.
TEST(ActivationGpu, GraphsReplayWithOtherCounts) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  for (const DeviceGrid grid : every_grid) {
    for (const bool ahead : {false, true}) {
      SCOPED_TRACE(fmt::format("{} grid, ahead {}", name(grid), ahead));
      ActivationCase c;
      c.intermediate = 2304;
      c.counts.assign(40, 9);
      c.scale = ScaleFormat::f32;
      const ActivationRows rows(c, random);
      ActivationBed bed(c, Placing::masked, rows, random);
      const ActivatedRows whole = bed.run({grid});
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
      launch_activation(bed.step(), {grid, 0, ahead}, stream);
      launch_activation(bed.step(), {grid, 0, ahead}, stream);
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      check(cudaStreamEndCapture(stream, &graph), "end of capture");
      check(cudaGraphInstantiate(&replay, graph, 0), "graph");
      for (int round = 0; round < longer(12); ++round) {
        std::vector<int> counts = c.counts;
        for (int& count : counts) count = round % 4 == 0 ? 0 : static_cast<int>(random() % 10);
        bed.counts().write(counts);
        bed.poison_results();
        check(cudaGraphLaunch(replay, stream), "replay");
        wait_for(stream, "replay of activation kernels");
        ActivatedRows some;  // of all rows those that the counts leave
        for (std::size_t expert = 0; expert < counts.size(); ++expert) {
          const auto pick = [&](const std::vector<std::byte>& from, std::size_t bytes, std::vector<std::byte>& to) {
            const auto begin = from.begin() + static_cast<std::ptrdiff_t>(expert * 9 * bytes);
            to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(counts[expert]) * bytes));
          };
          pick(whole.values, 2304, some.values);
          pick(whole.scales, 4 * 18, some.scales);
        }
        expect_equal(bed.results(counts), some, fmt::format("round {}", round));
      }
      check(cudaGraphExecDestroy(replay), "graph");
      check(cudaGraphDestroy(graph), "graph");
      check(cudaStreamDestroy(stream), "stream");
    }
  }
}

TEST(ActivationGpu, BoundsOfCounts) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  ActivationCase c;
  c.intermediate = 128;
  c.counts = {5, 4, 6};
  const ActivationRows rows(c, random);
  ActivationBed bed(c, Placing::masked, rows, random);
  for (const DeviceGrid grid : every_grid) {
    SCOPED_TRACE(name(grid));
    DeviceActivation step = bed.step();
    step.most_rows = 7;  // 5 of the first expert, 2 of the second
    bed.launch_alone(step, {grid});
    EXPECT_EQ(bed.results({5, 2, 0}).values.size(), 7u * 128);
    bed.counts().write({-3, 4, -2147483647 - 1});
    bed.launch_alone(bed.step(), {grid});
    EXPECT_EQ(bed.results({0, 4, 0}).values.size(), 4u * 128);
    bed.counts().write({0, 0, 2147483647});  // as many as a block has, and no more: those behind belong to nobody
    step.most_rows = 6;
    bed.launch_alone(step, {grid});
    EXPECT_EQ(bed.results({0, 0, 6}).values.size(), 6u * 128);
    bed.counts().write(c.counts);
  }
}

TEST(ActivationGpu, SlotsComeFromTheDriver) {
  SKIP_WITHOUT_GPU();
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "SMs");
  for (const int intermediate : {64, 2048, 2880, 16384}) {
    DeviceActivation step;
    step.intermediate = intermediate;
    step.most_rows = 1 << 20;
    const int slots = activation_slots(step);
    EXPECT_GE(slots, sms) << intermediate;
    EXPECT_EQ(slots % sms, 0) << intermediate;
    EXPECT_LE(slots / sms * activation_threads(intermediate), 2048) << intermediate;
    EXPECT_EQ(activation_ctas(step, {}), slots);
    EXPECT_EQ(activation_ctas(step, {DeviceGrid::padded}), 1 << 20);
    EXPECT_EQ(activation_ctas(step, {DeviceGrid::fixed}), 4224);
    std::printf("D = %d: %d threads, %d CTAs an SM\n", intermediate, activation_threads(intermediate), slots / sms);
  }
}

// Needs no GPU: nothing is launched. Pointers are never followed.
TEST(ActivationLaunch, RefusedByName) {
  alignas(16) static std::byte memory[64];
  DeviceActivation good;
  good.experts = 4;
  good.intermediate = 192;
  good.gate_up = reinterpret_cast<const bf16*>(memory);
  good.counts = reinterpret_cast<const int*>(memory);
  good.values = memory;
  good.scales = memory;
  good.scale_layout = {ScaleOrder::row_major, ScaleFormat::ue8m0, 2, 0};
  const auto refused = [&good](const char* part, const auto& change) {
    DeviceActivation step = good;
    change(step);
    try {
      launch_activation(step, {}, nullptr);
      ADD_FAILURE() << "not refused, should name: " << part;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nshould name: " << part;
    }
  };
  refused("0 local experts", [](auto& step) { step.experts = 0; });
  refused("1025 local experts", [](auto& step) { step.experts = 1025; });
  refused("D = 100", [](auto& step) { step.intermediate = 100; });
  refused("at most -1 rows", [](auto& step) { step.most_rows = -1; });
  refused("clamp is -1", [](auto& step) { step.clamp = -1.0f; });
  refused("64 values share a scale", [](auto& step) { step.group = 64; });
  refused("has 2 groups", [](auto& step) { step.group = 32; });
  refused("counts is null", [](auto& step) { step.counts = nullptr; });
  refused("values is at", [](auto& step) { step.values = memory + 8; });
  refused("gate_up is at", [](auto& step) { step.gate_up = reinterpret_cast<const bf16*>(memory + 2); });
  refused("scales is at", [](auto& step) {
    step.scale_layout.format = ScaleFormat::f32;
    step.scales = memory + 1;
  });
  refused("column-major scales are f32", [](auto& step) { step.scale_layout.order = ScaleOrder::column_major; });
  refused("packed scales are ue8m0", [](auto& step) { step.scale_layout = {ScaleOrder::packed, ScaleFormat::f32, 2, 4}; });
  refused("6 padded rows", [](auto& step) { step.scale_layout = {ScaleOrder::packed, ScaleFormat::ue8m0, 2, 6}; });
  refused("4 experts have 2 rows each", [](auto& step) {
    step.scale_layout = {ScaleOrder::packed, ScaleFormat::ue8m0, 2, 4};
    step.block_rows = 2;
  });
  good.most_rows = 0;
  EXPECT_NO_THROW(launch_activation(good, {}, nullptr)) << "no rows at all need no launch";
}

}  // namespace
}  // namespace heddle
