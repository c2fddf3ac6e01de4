// Grouped products alone on one GPU: against the host engine's within the bounds of docs/numerics.md, layouts and row blocks
// against each other bit for bit. Rows of no group are NaN, and their results poison that has to stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "exchange_support.hpp"
#include "experts/host/grouped.hpp"
#include "experts/sm90/cuda_grouped.hpp"
#include "gpu/experts_bed.hpp"

namespace heddle::testing {
namespace {

using sm90::GroupedOptions;
using sm90::GroupedProduct;
using sm90::GroupedRows;
using sm90::NobodysRows;
using ::testing::HasSubstr;

/// Weights, rows, and each row's group; -1: none.
struct Case {
  int n, k, rows;
  Quantisation how;
  std::vector<OwnedWeights> owned;
  std::vector<WeightMatrix> weights;
  OwnedRows made;
  std::vector<int> group_of;

  Case(Random& random, WeightKind kind, int groups, int n_, int k_, int rows_) : n(n_), k(k_), rows(rows_) {
    how = {pick(random, 0, 2) == 0 ? 32 : 128, pick(random, 0, 1) == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0};
    for (int group = 0; group < groups; ++group) owned.push_back(random_weights(random, kind, n, k));
    for (const OwnedWeights& one : owned) weights.push_back(one.view);
    made = random_rows(random, rows, k, activation(), how);
    const int missing = pick(random, 1, groups);  // a group without rows, or none such
    for (int row = 0; row < rows; ++row) {
      const int group = pick(random, -1, groups - 1);
      group_of.push_back(group == missing ? -1 : group);
    }
  }
  Case(const Case&) = delete;

  int groups() const { return static_cast<int>(weights.size()); }
  WeightKind kind() const { return weights[0].kind; }
  Activation activation() const {
    return kind() == WeightKind::fp8_block || kind() == WeightKind::mxfp4 ? Activation::fp8 : Activation::bf16;
  }
  bool is_real(int row) const { return group_of[size(row)] >= 0; }
  std::string text() const {
    std::ostringstream out;
    out << name_of(kind()) << ", " << groups() << " matrices [" << n << ", " << k << "], " << rows << " rows, a scale of "
        << how.group << " columns as " << (how.scale == ScaleFormat::f32 ? "f32" : "ue8m0");
    return out.str();
  }
  /// By row, poison where there is no group.
  std::vector<bf16> on_host() const {
    std::vector<bf16> out(size(rows) * size(n), bf16{poison_bits});
    grouped_product(made.view, group_of, weights, activation(), how, {out.data()});
    return out;
  }
  /// Which row lies where: rows of a group one behind another, each group at a multiple of `alignment`, and where groups end.
  std::vector<int> runs(int alignment, std::vector<int>& ends) const {
    std::vector<int> row_at;
    ends.clear();
    for (int group = 0; group < groups(); ++group) {
      const int before = static_cast<int>(row_at.size());
      const int begin = (before + alignment - 1) / alignment * alignment;
      std::vector<int> own;
      for (int row = 0; row < rows; ++row) {
        if (group_of[size(row)] == group) own.push_back(row);
      }
      if (!own.empty()) row_at.resize(size(begin), -1);
      row_at.insert(row_at.end(), own.begin(), own.end());
      ends.push_back(static_cast<int>(row_at.size()));
    }
    row_at.resize(row_at.size() + 7, -1);
    return row_at;
  }
  /// The same in blocks, and how many rows each has.
  std::vector<int> blocks(int block, std::vector<int>& counts) const {
    std::vector<int> row_at(size(groups() * block), -1);
    counts.assign(size(groups()), 0);
    for (int row = 0; row < rows; ++row) {
      const int group = group_of[size(row)];
      if (group >= 0) row_at[size(group * block + counts[size(group)]++)] = row;
    }
    return row_at;
  }
};

/// One object with a stream, and calls of a case.
class Bed {
 public:
  Bed(const Case& of, int most_rows, DeviceRowBlocks blocks = DeviceRowBlocks::automatic)
      : product(of.weights, {0, most_rows, blocks}), case_(of) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  ~Bed() { cudaStreamDestroy(stream); }
  Bed(const Bed&) = delete;

  GroupedRows call_of(const DeviceRows& rows, int count, const DeviceResults& out) const {
    GroupedRows call{rows.view(), case_.how, out.rows(), 0};
    call.rows.rows = count;
    return call;
  }

  /// Rows as they are. Zeroed rows are looked at here.
  std::vector<bf16> contiguous(NobodysRows nobodys, const std::string& what) {
    std::vector<int> source(size(case_.rows));
    for (int row = 0; row < case_.rows; ++row) source[size(row)] = case_.is_real(row) ? row : -1;
    std::vector<int> ids = case_.group_of;
    for (std::size_t row = 0; row < ids.size(); row += 2) {
      if (ids[row] < 0) ids[row] = row % 4 == 0 ? case_.groups() : -77;  // no groups, either
    }
    const DeviceRows rows(case_.made, gathered(case_.made, source));
    const DeviceResults out(case_.rows, case_.n);
    const Buffer<int> group_of(0, ids);
    product.contiguous(call_of(rows, case_.rows, out), group_of.data(), nobodys, stream);
    wait_for(stream, what);
    const bool zeroed = nobodys == NobodysRows::zeroed;
    std::vector<bf16> got = out.read(what, [&](int row) { return zeroed || case_.is_real(row); });
    int nonzero = 0;
    for (int row = 0; zeroed && row < case_.rows; ++row) {
      if (case_.is_real(row)) continue;
      bf16* from = got.data() + size(row) * size(case_.n);
      nonzero += static_cast<int>(std::count_if(from, from + case_.n, [](bf16 value) { return value.bits != 0; }));
      std::fill(from, from + case_.n, bf16{poison_bits});
    }
    EXPECT_EQ(nonzero, 0) << what << ": values of nobody's rows are not zero";
    return got;
  }
  std::vector<bf16> ended(int alignment, const std::string& what) {
    std::vector<int> given;
    const std::vector<int> row_at = case_.runs(alignment, given);
    const Buffer<int> ends(0, given);
    return by_row(row_at, what,
                  [&](const GroupedRows& call) { product.ended(call, ends.data(), alignment, NobodysRows::left, stream); });
  }
  std::vector<bf16> masked(int block, const std::string& what) {
    std::vector<int> given;
    const std::vector<int> row_at = case_.blocks(block, given);
    const Buffer<int> counts(0, given);
    auto got = by_row(row_at, what, [&](const GroupedRows& call) { product.masked(call, counts.data(), stream); });
    product.throw_if_failed();
    return got;
  }

  GroupedProduct product;
  cudaStream_t stream = nullptr;

 private:
  /// What a call makes of rows that lie so, in the case's order.
  template <class Queue>
  std::vector<bf16> by_row(const std::vector<int>& row_at, const std::string& what, Queue queue) const {
    const int places = static_cast<int>(row_at.size());
    const DeviceRows rows(case_.made, gathered(case_.made, row_at));
    const DeviceResults results(places, case_.n);
    queue(call_of(rows, places, results));
    wait_for(stream, what);
    const std::vector<bf16> laid = results.read(what, [&](int place) { return row_at[size(place)] >= 0; });
    std::vector<bf16> out(size(case_.rows) * size(case_.n), bf16{poison_bits});
    for (std::size_t place = 0; place < row_at.size(); ++place) {
      if (row_at[place] < 0) continue;
      std::copy_n(laid.data() + place * size(case_.n), case_.n, out.data() + size(row_at[place]) * size(case_.n));
    }
    return out;
  }
  const Case& case_;
};

double relative_error(const std::vector<bf16>& got, const std::vector<bf16>& want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (want[i].bits == poison_bits) continue;
    error += std::pow(static_cast<double>(to_float(got[i])) - to_float(want[i]), 2);
    norm += std::pow(static_cast<double>(to_float(want[i])), 2);
  }
  return std::sqrt(error / norm);
}

void expect_close(const Case& of, const std::vector<bf16>& got) {
  const double bound = of.activation() == Activation::fp8 ? 1.5e-2 : 4e-3, error = relative_error(got, of.on_host());
  std::printf("  %s: off by %.2e, may be %.1e\n", of.text().c_str(), error, bound);
  EXPECT_LE(error, bound) << of.text();
}

class GroupedGpu : public ::testing::TestWithParam<WeightKind> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
};

TEST_P(GroupedGpu, LayoutsAreTheHostEngines) {
  Random random(test_seed());
  for (int round = 0; round < longer(6); ++round) {
    const int groups = pick(random, 1, 9), count = pick(random, 200, 700);
    const Case of(random, GetParam(), groups, 64 * pick(random, 1, 9), 64 * pick(random, 4, 12), count);
    SCOPED_TRACE(of.text());
    const int alignment = pick(random, 0, 1) == 0 ? 128 : pick(random, 1, 40), room = count + groups * alignment + 7;
    std::vector<std::vector<bf16>> found;
    for (const DeviceRowBlocks blocks : {DeviceRowBlocks::small, DeviceRowBlocks::medium, DeviceRowBlocks::large}) {
      Bed bed(of, room, blocks);
      found.push_back(bed.contiguous(NobodysRows::left, "contiguous rows"));
      found.push_back(bed.contiguous(NobodysRows::zeroed, "contiguous rows, others zeroed"));
      found.push_back(bed.ended(alignment, "groups one behind another"));
      found.push_back(bed.masked(count, "masked blocks"));
    }
    expect_close(of, found[0]);
    for (const auto& other : found) expect_same_bits(other, found[0], of.n, of.text());
    if (HasFailure()) return;
  }
}

TEST_P(GroupedGpu, CapturedCallsFollowTheLayoutsInMemory) {
  Random random(test_seed());
  Case of(random, GetParam(), 5, 192, 320, 150);
  Bed bed(of, of.rows);
  const DeviceRows rows(of.made);
  DeviceResults plain(of.rows, of.n), blocked(of.rows, of.n);
  Buffer<int> group_of(0, of.group_of), counts(0, std::vector<int>(5, 30));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(bed.stream, cudaStreamCaptureModeThreadLocal), "capture");
  bed.product.contiguous(bed.call_of(rows, of.rows, plain), group_of.data(), NobodysRows::left, bed.stream);
  bed.product.masked(bed.call_of(rows, of.rows, blocked), counts.data(), bed.stream);
  check(cudaStreamEndCapture(bed.stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  check(cudaGraphDestroy(graph), "graph");
  for (int round = 0; round < 5; ++round) {
    std::vector<int> own;
    for (int group = 0; group < 5; ++group) own.push_back(pick(random, 0, 30));
    for (int& group : of.group_of) group = pick(random, -1, 4);
    group_of.write(of.group_of);
    counts.write(own);
    plain.poison();
    blocked.poison();
    check(cudaGraphLaunch(executable, bed.stream), "graph");
    wait_for(bed.stream, "replayed products");
    const auto replayed = plain.read("contiguous rows", [&](int row) { return of.is_real(row); });
    expect_same_bits(replayed, bed.contiguous(NobodysRows::left, "contiguous rows, queued"), of.n, of.text());
    const auto masked = blocked.read("masked blocks", [&](int row) { return row % 30 < own[size(row / 30)]; });
    for (int row = 0; row < of.rows; ++row) of.group_of[size(row)] = row % 30 < own[size(row / 30)] ? row / 30 : -1;
    expect_same_bits(masked, bed.contiguous(NobodysRows::left, "rows of blocks, queued"), of.n, of.text());
    if (HasFailure()) break;
  }
  check(cudaGraphExecDestroy(executable), "graph");
}

std::string name_of_kind(const ::testing::TestParamInfo<WeightKind>& info) { return name_of(info.param); }
INSTANTIATE_TEST_SUITE_P(All, GroupedGpu,
                         ::testing::Values(WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4, WeightKind::mxfp8,
                                           WeightKind::nvfp4),
                         name_of_kind);

/// Rows whose groups differ by more than codes without step exponents can hold: the matrices are laid out once more.
TEST(GroupedProductGpu, HoldsMxfp4OfManyBinades) {
  SKIP_WITHOUT_GPU();
  Random random(test_seed());
  Case of(random, WeightKind::mxfp4, 3, 320, 512, 500);
  for (int scale = 0; scale < 4; ++scale) of.owned[1].scales[size(scale)] = std::byte{100};
  Bed bed(of, of.rows);
  expect_close(of, bed.contiguous(NobodysRows::left, "contiguous rows"));
}

TEST(GroupedProductGpu, SaysWhatDoesNotFit) {
  SKIP_WITHOUT_GPU();
  Random random(test_seed());
  const auto refusal = [](const auto& act) {
    try {
      act();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const auto refused = [&](const std::vector<WeightMatrix>& weights) {
    return refusal([&] { const GroupedProduct product(weights, {}); });
  };
  const OwnedWeights odd = random_weights(random, WeightKind::bf16, 96, 128);
  Case of(random, WeightKind::fp8_block, 2, 128, 128, 40);
  EXPECT_THAT(refused({odd.view}), HasSubstr("group 0: 96 rows are asked for; the tile engine takes multiples of 64"));
  EXPECT_THAT(refused({of.weights[0], odd.view}), HasSubstr("group 1: bf16 weights among fp8 block ones"));
  EXPECT_THAT(refused({}), HasSubstr("0 matrices; 1 to 1024 are taken"));

  Bed bed(of, 30);
  const DeviceRows rows(of.made);
  const DeviceResults out(of.rows, of.n);
  const Buffer<int> layout(0, of.group_of), counts(0, std::vector<int>{21, -1});
  GroupedRows call = bed.call_of(rows, 40, out);
  EXPECT_THAT(refusal([&] { bed.product.contiguous(call, layout.data(), NobodysRows::left, bed.stream); }),
              HasSubstr("40 rows; the options allow 0 to 30"));
  call.rows.format = Activation::bf16;
  EXPECT_THAT(refusal([&] { bed.product.masked(call, counts.data(), bed.stream); }),
              HasSubstr("bf16 rows; fp8_block and mxfp4 weights are multiplied by fp8 ones"));
  call = bed.call_of(rows, 39, out);
  EXPECT_THAT(refusal([&] { bed.product.masked(call, counts.data(), bed.stream); }), HasSubstr("39 rows; they must be as many"));
  call = bed.call_of(rows, 40, out);
  bed.product.masked(call, counts.data(), bed.stream);
  wait_for(bed.stream, "counts that do not fit");
  EXPECT_THAT(refusal([&] { bed.product.throw_if_failed(); }), HasSubstr("none may be below 0 or above its block"));
  EXPECT_EQ(refusal([&] { bed.product.throw_if_failed(); }), "nothing");
  out.read("counts that do not fit", [](int row) { return row < 20; });
}

}  // namespace
}  // namespace heddle::testing
