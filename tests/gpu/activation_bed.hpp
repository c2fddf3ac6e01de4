// The activation step on a GPU with everything around it: drawn inputs, buffers that are poisoned before each launch, and
// the host engine's rows to hold results against.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "experts/activation/activation.hpp"
#include "experts/activation/device.hpp"
#include "gpu/buffers.hpp"
#include "gpu/waiting.hpp"

namespace heddle {

/// What is computed; where its rows lie is a Placing.
struct ActivationCase {
  int intermediate = 2048;
  std::vector<int> counts;
  std::optional<float> clamp;
  bool weighted = false;
  Activation format = Activation::fp8;
  int group = 128;
  ScaleFormat scale = ScaleFormat::ue8m0;
  ScaleOrder order = ScaleOrder::row_major;
  float least_gate = 0;  ///< above 0: all gates are drawn from there up

  int rows() const { return std::accumulate(counts.begin(), counts.end(), 0); }
  std::string title() const {
    return fmt::format("D {}, {} experts, {} rows, clamp {}, weights {}, {} group {} scale {} order {}", intermediate,
                       counts.size(), rows(), clamp.value_or(-1), weighted, format == Activation::fp8 ? "fp8" : "bf16", group,
                       scale == ScaleFormat::f32 ? "f32" : "ue8m0", static_cast<int>(order));
  }
};

/// Blocks of equal size; runs padded to different lengths, not in order of experts; runs without gaps.
enum class Placing { masked, runs, flat };

/// The inputs of all rows, in the order of the flat list.
struct ActivationRows {
  std::vector<bf16> gate_up;
  std::vector<float> weights;

  ActivationRows(const ActivationCase& c, std::mt19937_64& random) {
    const auto width = static_cast<std::size_t>(c.intermediate);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::uniform_real_distribution<float> high(c.least_gate, 2 * c.least_gate + 1), factor(0.0f, 2.5f);
    for (int row = 0; row < c.rows(); ++row) {
      const float size = std::ldexp(1.0f, static_cast<int>(random() % 12) - 6);  // groups need scales of all sizes
      for (std::size_t i = 0; i < 2 * width; ++i) {
        const bool high_gate = c.least_gate > 0 && i < width;
        gate_up.push_back(to_bf16(high_gate ? high(random) : size * normal(random)));
      }
      weights.push_back(factor(random));
    }
  }
};

/// Values and scales of all rows in flat order: [rows, D] and [rows, groups], as RowView has them.
struct ActivatedRows {
  std::vector<std::byte> values, scales;
};

inline ActivatedRows on_the_host(const ActivationCase& c, const ActivationRows& rows) {
  ActivationStep step;
  step.intermediate = c.intermediate;
  step.gate_up = rows.gate_up.data();
  step.weights = c.weighted ? rows.weights.data() : nullptr;
  step.clamp = c.clamp;
  step.format = c.format;
  step.quantisation = {c.group, c.scale};
  ActivatedRows result;
  result.values.resize(static_cast<std::size_t>(c.rows()) * step.value_bytes());
  result.scales.resize(static_cast<std::size_t>(c.rows()) * step.scale_bytes());
  step.values = result.values.data();
  step.scales = result.scales.data();
  for (int row = 0; row < c.rows(); ++row) activate_row(step, {row, 0, row});
  return result;
}

/// Device memory of one case in one placing.
class ActivationBed {
 public:
  ActivationBed(const ActivationCase& c, Placing placing, const ActivationRows& rows, std::mt19937_64& random)
      : case_(c),
        places_(place_rows(placing, random)),
        gate_up_(0, spread(rows.gate_up, 2 * static_cast<std::size_t>(c.intermediate), bf16{0xFFFF})),
        weights_(0, spread(rows.weights, 1, std::numeric_limits<float>::quiet_NaN())),
        counts_(0, c.counts),
        begins_(0, begin_values_),
        values_(0, static_cast<std::size_t>(room_) * value_bytes()),
        scales_(0, c.format == Activation::fp8 ? layout().bytes(static_cast<std::size_t>(room_)) : 0) {}

  DeviceActivation step() const {
    DeviceActivation step;
    step.experts = static_cast<int>(case_.counts.size());
    step.intermediate = case_.intermediate;
    step.gate_up = gate_up_.data();
    step.counts = counts_.data();
    step.row_begin = by_begins_ ? begins_.data() : nullptr;
    step.block_rows = block_rows_;
    step.most_rows = case_.rows() + 3;
    step.weights = case_.weighted ? weights_.data() : nullptr;
    step.clamp = case_.clamp;
    step.format = case_.format;
    step.group = case_.group;
    step.scale_layout = layout();
    step.values = values_.data();
    step.scales = scales_.data();
    return step;
  }
  int block_rows() const { return block_rows_; }
  Buffer<int>& counts() { return counts_; }

  void poison_results() {
    values_.poison();
    scales_.poison();
  }
  /// Poisons the results, launches, waits and reads them.
  ActivatedRows run(const ActivationLaunch& launch) { return run(step(), launch); }
  ActivatedRows run(const DeviceActivation& given, const ActivationLaunch& launch) {
    launch_alone(given, launch);
    return results(case_.counts);
  }
  void launch_alone(const DeviceActivation& given, const ActivationLaunch& launch) {
    poison_results();
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    launch_activation(given, launch, stream);
    wait_for(stream, "activation kernel");
    check(cudaStreamDestroy(stream), "stream");
  }

  /// The rows that these counts make real, in flat order. Nothing else may have been written.
  ActivatedRows results(const std::vector<int>& counts) const {
    const std::vector<std::byte> values = values_.read(), scales = scales_.read();
    std::vector<bool> is_value(values.size()), is_scale(scales.size());
    const auto take = [](const std::vector<std::byte>& from, std::vector<bool>& seen, std::size_t begin, std::size_t bytes,
                         std::vector<std::byte>& to) {
      for (std::size_t i = begin; i < begin + bytes; ++i) {
        seen.at(i) = true;
        to.push_back(from.at(i));
      }
    };
    ActivatedRows all;
    const ScaleLayout scale = layout();
    for (std::size_t expert = 0, flat = 0; expert < counts.size(); flat += static_cast<std::size_t>(case_.counts[expert++])) {
      for (int row = 0; row < counts[expert]; ++row) {
        const std::size_t place = places_.at(flat + static_cast<std::size_t>(row));
        take(values, is_value, place * value_bytes(), value_bytes(), all.values);
        for (int group = 0; group < scale.groups && case_.format == Activation::fp8; ++group) {
          take(scales, is_scale, scale.offset(place, group), scale.bytes_a_scale(), all.scales);
          for (int i = 1; i <= scale.zeros_behind(group); ++i) {
            is_scale.at(scale.offset(place, group) + static_cast<std::size_t>(i)) = true;
            EXPECT_EQ(scales.at(scale.offset(place, group) + static_cast<std::size_t>(i)), std::byte{0})
                << "byte behind the last scale of the row at place " << place;
          }
        }
      }
    }
    expect_poison(values, is_value, "values");
    expect_poison(scales, is_scale, "scales");
    values_.expect_guards("values");
    scales_.expect_guards("scales");
    return all;
  }

 private:
  std::size_t value_bytes() const {
    return static_cast<std::size_t>(case_.intermediate) * (case_.format == Activation::fp8 ? 1 : 2);
  }
  ScaleLayout layout() const {
    const int padded = (room_ + 3) / 4 * 4 + 4;
    return {case_.order, case_.scale, (case_.intermediate + case_.group - 1) / case_.group, padded};
  }

  /// The place of every row of the flat list; room_ is how many places there are.
  std::vector<std::size_t> place_rows(Placing placing, std::mt19937_64& random) {
    by_begins_ = placing == Placing::runs;
    const int largest = *std::max_element(case_.counts.begin(), case_.counts.end());
    if (placing == Placing::masked) block_rows_ = largest + 1 + static_cast<int>(random() % 3);
    std::vector<int> begins(case_.counts.size()), order(case_.counts.size());
    std::iota(order.begin(), order.end(), 0);
    if (placing == Placing::runs) std::shuffle(order.begin(), order.end(), random);
    for (const int expert : order) {
      const auto e = static_cast<std::size_t>(expert);
      begins[e] = room_;
      const int pad = placing == Placing::runs ? static_cast<int>(random() % 4) : 0;
      room_ += placing == Placing::masked ? block_rows_ : case_.counts[e] + pad;
    }
    room_ += 2;
    std::vector<std::size_t> places;
    for (std::size_t expert = 0; expert < case_.counts.size(); ++expert) {
      for (int row = 0; row < case_.counts[expert]; ++row) places.push_back(static_cast<std::size_t>(begins[expert] + row));
    }
    begin_values_ = begins;
    return places;
  }
  template <class T>
  std::vector<T> spread(const std::vector<T>& rows, std::size_t width, T between) const {
    std::vector<T> all(static_cast<std::size_t>(room_) * width, between);
    for (std::size_t row = 0; row < places_.size(); ++row)
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(row * width), width,
                  all.begin() + static_cast<std::ptrdiff_t>(places_[row] * width));
    return all;
  }
  static void expect_poison(const std::vector<std::byte>& bytes, const std::vector<bool>& written, const char* what) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (!written[i] && bytes[i] != std::byte{poison_byte}) {
        ADD_FAILURE() << what << ": byte " << i << " of " << bytes.size() << " belongs to no real row and was written";
        return;
      }
    }
  }

  ActivationCase case_;
  bool by_begins_ = false;
  int block_rows_ = 0, room_ = 0;
  std::vector<int> begin_values_;
  std::vector<std::size_t> places_;
  Buffer<bf16> gate_up_;
  Buffer<float> weights_;
  Buffer<int> counts_, begins_;
  Buffer<std::byte> values_, scales_;
};

}  // namespace heddle
