// A bed for tests of DeviceExperts: one batch of pairs, laid out for every runner, its results always by choice.
//
// Whatever may not be read is NaN, whatever may not be written is poison and looked at afterwards, behind rows too.
#pragma once

#include <cmath>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "experts_support.hpp"
#include "gpu/buffers.hpp"
#include "gpu/waiting.hpp"
#include "heddle/device_experts.hpp"
#include "heddle/error.hpp"

namespace heddle::testing {

/// Weights that are multiplied as bf16 take bf16 activations, too.
inline bool takes_bf16(WeightKind kind) { return kind != WeightKind::fp8_block && kind != WeightKind::mxfp4; }

inline constexpr std::uint16_t poison_bits = 0x7F7F;

/// Tokens, and the experts that each of them goes to.
struct Batch {
  OwnedRows rows;
  int topk = 1;
  std::vector<int> ids;          ///< local, -1: none
  std::vector<int> foreign_ids;  ///< the same, where -1 may be any id that is not local
  std::vector<float> weights;

  Batch(Batch&&) = default;  // a copy's rows would still be seen through the original's
  int tokens() const { return rows.count; }
  int choices() const { return rows.count * topk; }

  /// Random choices, or the given ones: [tokens, choices].
  Batch(Random& random, OwnedRows&& made, int choices, int experts, std::vector<int> given = {})
      : rows(std::move(made)), topk(choices), ids(std::move(given)) {
    if (ids.empty()) ids = Routing(random, rows.count, choices, experts).ids;
    foreign_ids = ids;
    for (int& id : foreign_ids) {
      if (id < 0 && pick(random, 0, 1) == 0) id = pick(random, 0, 1) == 0 ? experts + pick(random, 0, 300) : -pick(random, 1, 300);
    }
    for (int i = 0; i < this->choices(); ++i) weights.push_back(std::uniform_real_distribution<float>(0.1f, 1.0f)(random));
  }
};

/// How the pairs of a batch lie one behind the other: which of an expert's rows is which choice.
struct Arrangement {
  std::vector<int> begin;  ///< by expert, as `counts`
  std::vector<int> counts;
  std::vector<int> choice_of;  ///< by row; -1: padding
  int block_rows = 0;          ///< masked

  /// Every expert's choices in any order: in runs padded to `alignment` and more, or in blocks.
  static Arrangement runs(Random& random, const Batch& batch, int experts, int alignment) {
    Arrangement made;
    for (int expert = 0; expert < experts; ++expert) {
      made.add(random, batch, expert);
      const int padded = (made.rows() + alignment - 1) / alignment * alignment + alignment * pick(random, 0, 2);
      made.choice_of.resize(size(padded), -1);
    }
    made.choice_of.push_back(-1);
    return made;
  }
  static Arrangement blocks(Random& random, const Batch& batch, int experts, int block_rows) {
    Arrangement made;
    made.block_rows = block_rows;
    for (int expert = 0; expert < experts; ++expert) {
      made.add(random, batch, expert);
      made.choice_of.resize(size((expert + 1) * block_rows), -1);
    }
    return made;
  }
  int rows() const { return static_cast<int>(choice_of.size()); }
  /// By row; -1 and NaN: padding.
  std::vector<int> tokens(const Batch& batch) const {
    std::vector<int> out;
    for (const int choice : choice_of) out.push_back(choice < 0 ? -1 : choice / batch.topk);
    return out;
  }
  std::vector<float> weights(const Batch& batch) const {
    std::vector<float> out;
    for (const int choice : choice_of) out.push_back(choice < 0 ? std::nanf("") : batch.weights[size(choice)]);
    return out;
  }
  /// Rows of `hidden` values, by choice; poison where there is none.
  std::vector<bf16> by_choice(const std::vector<bf16>& rows_of_values, const Batch& batch, int hidden) const {
    std::vector<bf16> out(size(batch.choices()) * size(hidden), bf16{poison_bits});
    for (int row = 0; row < rows(); ++row) {
      const int choice = choice_of[size(row)];
      if (choice < 0) continue;
      const auto from = rows_of_values.begin() + static_cast<std::ptrdiff_t>(row) * hidden;
      std::copy(from, from + hidden, out.begin() + static_cast<std::ptrdiff_t>(choice) * hidden);
    }
    return out;
  }

 private:
  void add(Random& random, const Batch& batch, int expert) {
    std::vector<int> own;
    for (int choice = 0; choice < batch.choices(); ++choice) {
      if (batch.ids[size(choice)] == expert) own.push_back(choice);
    }
    std::shuffle(own.begin(), own.end(), random);
    begin.push_back(rows());
    counts.push_back(static_cast<int>(own.size()));
    choice_of.insert(choice_of.end(), own.begin(), own.end());
  }
};

/// Row r is row source[r] of `rows`, or NaN where that is -1.
inline std::vector<std::byte> gathered(const OwnedRows& rows, const std::vector<int>& source) {
  const std::size_t stride = rows.view.value_stride;
  std::vector<std::byte> copies(source.size() * stride, std::byte{0xFF});  // NaN in every format
  for (std::size_t row = 0; row < source.size(); ++row) {
    if (source[row] >= 0) std::memcpy(copies.data() + row * stride, rows.bytes.data() + size(source[row]) * stride, stride);
  }
  return copies;
}

/// Rows in device memory.
class DeviceRows {
 public:
  /// `bytes` are rows made as `like`'s; there may be room for more.
  DeviceRows(const OwnedRows& like, const std::vector<std::byte>& bytes, std::size_t room = 0)
      : bytes_(0, std::max({room, bytes.size(), std::size_t{1}})), view_(like.view) {
    write(bytes);
    view_.values = bytes_.data();
    view_.scales = like.view.scales == nullptr ? nullptr : bytes_.data() + (like.view.scales - like.bytes.data());
  }
  explicit DeviceRows(const OwnedRows& rows) : DeviceRows(rows, rows.bytes) {}
  void write(const std::vector<std::byte>& bytes) { bytes_.write(bytes); }
  const RowView& view() const { return view_; }

 private:
  Buffer<std::byte> bytes_;
  RowView view_;
};

/// Poisoned result rows with a gap behind each.
class DeviceResults {
 public:
  DeviceResults(int rows, int hidden) : rows_(rows), hidden_(hidden), buffer_(0, std::max<std::size_t>(1, size(rows) * stride())) {}
  ResultRows rows() const { return {buffer_.data(), stride()}; }
  void poison() { buffer_.poison(); }

  /// [rows, hidden]. Fails unless exactly the rows that `real` names were written, and those completely.
  template <class Real>
  std::vector<bf16> read(const std::string& what, const Real& real) const {
    const std::vector<bf16> all = buffer_.read();
    buffer_.expect_guards(what);
    std::vector<bf16> out;
    int missing = 0;
    int stray = 0;
    std::ostringstream first;
    for (int row = 0; row < rows_; ++row) {
      const bf16* from = all.data() + size(row) * stride();
      out.insert(out.end(), from, from + hidden_);
      for (int column = 0; column < static_cast<int>(stride()); ++column) {
        const bool wanted = column < hidden_ && real(row);
        if (wanted != (from[column].bits == poison_bits)) continue;
        if (missing + stray == 0) first << "the first: row " << row << ", column " << column << " of " << hidden_;
        ++(wanted ? missing : stray);
      }
    }
    EXPECT_EQ(missing, 0) << what << ": values of real rows were not written; " << first.str();
    EXPECT_EQ(stray, 0) << what << ": values that are nobody's were written; " << first.str();
    return out;
  }

 private:
  std::size_t stride() const { return size(hidden_) + 8; }
  int rows_;
  int hidden_;
  Buffer<bf16> buffer_;
};

/// Equal in every bit, or a failure that says where not. Rows of `hidden` values.
inline void expect_same_bits(const std::vector<bf16>& got, const std::vector<bf16>& want, int hidden, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  int wrong = 0;
  int wrong_rows = 0;
  int last = -1;
  std::ostringstream text;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i].bits == want[i].bits) continue;
    const int row = static_cast<int>(i / size(hidden));
    if (row != last) ++wrong_rows;
    last = row;
    if (++wrong <= 8) {
      text << "\n  row " << row << ", column " << i % size(hidden) << ": " << to_float(got[i]) << " instead of "
           << to_float(want[i]) << " (" << std::hex << got[i].bits << ", " << want[i].bits << std::dec << ")";
    }
  }
  EXPECT_EQ(wrong, 0) << what << ": values of " << wrong_rows << " of " << got.size() / size(hidden)
                      << " rows differ in bits:" << text.str();
}

/// DeviceExperts with a stream, whose runners take a batch and give results by choice (slots) or by token.
class ExpertsBed {
 public:
  ExpertsBed(std::span<const ExpertWeights> views, int hidden, int intermediate, const ExpertOptions& options,
             const DeviceExpertsOptions& device)
      : experts(views, hidden, intermediate, options, device) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  ExpertsBed(const Layer& layer, const ExpertOptions& options, const DeviceExpertsOptions& device)
      : ExpertsBed(layer.views, layer.hidden, layer.intermediate, options, device) {}
  ~ExpertsBed() { cudaStreamDestroy(stream); }
  ExpertsBed(const ExpertsBed&) = delete;
  ExpertsBed& operator=(const ExpertsBed&) = delete;

  int hidden() const { return experts.hidden(); }

  std::vector<bf16> routed(const Batch& batch, RoutedOutput mode, int expected_rows = 0) {
    const bool slots = mode == RoutedOutput::slots;
    const std::string what = slots ? "routed runner, slots" : "routed runner, sums";
    const DeviceRows rows(batch.rows);
    const Buffer<int> ids(0, batch.foreign_ids);
    const Buffer<float> weights(0, batch.weights);
    const DeviceResults out(slots ? batch.choices() : batch.tokens(), hidden());
    experts.routed(rows.view(), batch.tokens(), batch.topk, ids.data(), weights.data(), mode, out.rows(), stream, nullptr,
                   expected_rows);
    settle(what);
    return out.read(what, [&](int row) { return !slots || batch.ids[size(row)] >= 0; });
  }

  /// The pairs by contiguous or, where the arrangement is in blocks, masked.
  std::vector<bf16> arranged(const Batch& batch, const Arrangement& pairs, int expected_rows = 0) {
    const std::string what = pairs.block_rows > 0 ? "masked runner" : "contiguous runner";
    const DeviceRows rows(batch.rows, gathered(batch.rows, pairs.tokens(batch)));
    const Buffer<float> weights(0, pairs.weights(batch));
    const Buffer<int> begin(0, pairs.begin);
    const Buffer<int> counts(0, pairs.counts);
    const DeviceResults out(pairs.rows(), hidden());
    if (pairs.block_rows > 0) {
      experts.masked(rows.view(), pairs.block_rows, counts.data(), weights.data(), out.rows(), stream, expected_rows);
    } else {
      experts.contiguous(rows.view(), begin.data(), counts.data(), weights.data(), out.rows(), stream, expected_rows);
    }
    settle(what);
    return pairs.by_choice(out.read(what, [&](int row) { return pairs.choice_of[size(row)] >= 0; }), batch, hidden());
  }

  std::vector<bf16> dense(const OwnedRows& made, int expert = 0) {
    const DeviceRows rows(made);
    const DeviceResults out(made.count, hidden());
    experts.dense(rows.view(), made.count, out.rows(), stream, expert);
    settle("dense runner");
    return out.read("dense runner", [](int) { return true; });
  }

  /// Waits for what is queued. Every count has to have fitted, or, with `must_refuse`, one has not: `refusal` says which.
  void settle(const std::string& what) {
    wait_for(stream, what);
    try {
      experts.throw_if_failed();
      EXPECT_FALSE(must_refuse) << what << ": a count that does not fit was not reported";
    } catch (const Error& error) {
      if (!must_refuse) throw;
      EXPECT_EQ(error.kind(), ErrorKind::fault);
      refusal = error.what();
    }
  }

  DeviceExperts experts;
  cudaStream_t stream = nullptr;
  bool must_refuse = false;
  std::string refusal;
};

/// Room for a batch's pairs, `spare` rows more, and calls of its tokens.
inline DeviceExpertsOptions room_for(const Batch& batch, int spare = 0) {
  DeviceExpertsOptions device;
  device.most_rows = batch.choices() + spare;
  device.most_tokens = batch.tokens();
  device.topk = batch.topk;
  return device;
}

/// What the host makes of slots, in choice order, one rounding.
inline std::vector<bf16> sums_of_slots(const Batch& batch, const std::vector<bf16>& slots, int hidden, WeightAt weight_at) {
  std::vector<bf16> out;
  for (int token = 0; token < batch.tokens(); ++token) {
    for (int column = 0; column < hidden; ++column) {
      float sum = 0.0f;
      for (int choice = token * batch.topk; choice < (token + 1) * batch.topk; ++choice) {
        if (batch.ids[size(choice)] < 0) continue;
        const float weight = weight_at == WeightAt::combine ? batch.weights[size(choice)] : 1.0f;
        sum = std::fma(weight, to_float(slots[size(choice) * size(hidden) + size(column)]), sum);
      }
      out.push_back(to_bf16(sum));
    }
  }
  return out;
}

}  // namespace heddle::testing
