// The three runners: each brings its arrived layout into sorted pairs, the chain does the rest.
#include <algorithm>
#include <chrono>
#include <limits>

#include <fmt/format.h>

#include "experts/host/chain.hpp"
#include "experts/host/kernels.hpp"
#include "experts/host/parts.hpp"
#include "heddle/error.hpp"
#include "heddle/experts.hpp"

namespace heddle {
namespace {

std::size_t size(int value) { return static_cast<std::size_t>(value); }

void check_options(int hidden, int intermediate, const ExpertOptions& options) {
  if (hidden < 64 || hidden % 64 != 0 || intermediate < 64 || intermediate % 64 != 0) {
    throw InputError(
        fmt::format("experts: hidden {} and intermediate {} must be multiples of 64, at least 64", hidden, intermediate));
  }
  if (options.quantisation.group != 128 && options.quantisation.group != 32) {
    throw InputError(fmt::format("experts: activation groups of {}; 128 and 32 are supported", options.quantisation.group));
  }
  if (options.row_block != 0 && (options.row_block < 8 || options.row_block > 256)) {
    throw InputError(fmt::format("experts: row block {}; it is 0 (chosen from the count) or 8 to 256", options.row_block));
  }
  if (options.activation_slots < 1) {
    throw InputError(fmt::format("experts: {} activation slots; at least 1", options.activation_slots));
  }
  if (options.clamp.has_value() && !(*options.clamp > 0)) {
    throw InputError(fmt::format("experts: clamp {}; it must be above 0", *options.clamp));
  }
}

void check_expert(const ExpertWeights& weights, std::size_t expert, int hidden, int intermediate) {
  check_weights(weights.gate, intermediate, hidden, fmt::format("local expert {}, gate", expert));
  check_weights(weights.up, intermediate, hidden, fmt::format("local expert {}, up", expert));
  check_weights(weights.down, hidden, intermediate, fmt::format("local expert {}, down", expert));
}

void check_counts(const ExpertSet& set, const char* runner, const char* what, std::span<const int> counts, int most) {
  if (counts.size() != set.experts.size()) {
    throw InputError(fmt::format("{} runner: {} has {} entries, but there are {} local experts", runner, what, counts.size(),
                                 set.experts.size()));
  }
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    if (counts[expert] < 0 || counts[expert] > most) {
      throw InputError(fmt::format("{} runner: {}[{}] is {}; it must be 0 to {}", runner, what, expert, counts[expert], most));
    }
  }
}

void check_view(const ExpertSet& set, const char* runner, const RowView& rows, int count) {
  if (rows.format == Activation::fp8 && set.options.activation == Activation::bf16) {
    throw InputError(fmt::format("{} runner: rows arrived as fp8, but the activations are bf16; send bf16 rows", runner));
  }
  if (count > 0 && (rows.values == nullptr || (rows.format == Activation::fp8 && rows.scales == nullptr))) {
    throw InputError(fmt::format("{} runner: {} rows, but no {}", runner, count, rows.values == nullptr ? "values" : "scales"));
  }
}

/// A part of one expert's columns: does it begin inside of them?
void check_part(const ExpertSet& set, int expert, int part, int part_columns, int columns) {
  const auto experts = static_cast<int>(set.experts.size());
  if (expert < 0 || expert >= experts)
    throw InputError(fmt::format("a part of expert {}; there are {} local experts", expert, experts));
  if (part < 0 || part >= (columns + part_columns - 1) / part_columns) {
    throw InputError(fmt::format("part {} of {} columns; parts of {} are numbered from 0 to {}", part, columns, part_columns,
                                 (columns + part_columns - 1) / part_columns - 1));
  }
}

/// One expert's rows [begin, begin + count) of the view, results at the same places.
void add_run(PairList& pairs, int expert, int begin, int count, const float* row_weights) {
  pairs.masked_m[size(expert)] = count;
  for (int row = begin; row < begin + count; ++row) {
    pairs.source.push_back(row);
    pairs.target.push_back(row);
    if (row_weights != nullptr) {
      pairs.weights.push_back(row_weights[row]);
    }
  }
}

/// Sorts the choices by expert, (token, choice) order within one. pair_of says where each went.
void sort_choices(const ExpertSet& set, int count, int topk, const int* ids, const float* weights, ExpertWorkspace& workspace) {
  PairList& pairs = workspace.pairs;
  const int experts = static_cast<int>(set.experts.size());
  pairs.clear(experts);
  pairs.most_rows = count * topk;
  for (int choice = 0; choice < count * topk; ++choice) {
    if (ids[choice] < -1 || ids[choice] >= experts) {
      throw InputError(fmt::format("routed runner: token {}, choice {} names local expert {}; it must be -1 to {}", choice / topk,
                                   choice % topk, ids[choice], experts - 1));
    }
    if (ids[choice] >= 0) {
      ++pairs.masked_m[size(ids[choice])];
    }
  }
  std::vector<int> next(size(experts));
  int total = 0;
  for (int expert = 0; expert < experts; ++expert) {
    next[size(expert)] = total;
    total += pairs.masked_m[size(expert)];
  }
  pairs.source.resize(size(total));
  pairs.target.resize(size(total));
  pairs.weights.resize(set.options.weight_at == WeightAt::activation ? size(total) : 0);
  workspace.pair_of.assign(size(count) * size(topk), -1);
  for (int choice = 0; choice < count * topk; ++choice) {
    if (ids[choice] < 0) {
      continue;
    }
    const int pair = next[size(ids[choice])]++;
    pairs.source[size(pair)] = choice / topk;
    pairs.target[size(pair)] = choice;
    if (!pairs.weights.empty()) {
      pairs.weights[size(pair)] = weights[choice];
    }
    workspace.pair_of[size(choice)] = pair;
  }
}

/// Each token's own pairs in choice order from +0, rounded once. `weights` null: they were applied before.
void sum_pairs(int count, int topk, int hidden, const float* weights, ExpertWorkspace& workspace, const ResultRows& out) {
  const TileKernels& kernels = tile_kernels();
  float* sum = workspace.sum.resize(size(hidden));
  float* wide = workspace.wide.resize(size(hidden));
  for (int token = 0; token < count; ++token) {
    std::fill_n(sum, hidden, 0.0f);
    for (int choice = token * topk; choice < (token + 1) * topk; ++choice) {
      const int pair = workspace.pair_of[size(choice)];
      if (pair >= 0) {
        kernels.widen_bf16(reinterpret_cast<const std::byte*>(workspace.results.data() + size(pair) * size(hidden)), hidden, wide);
        kernels.promote(wide, weights == nullptr ? 1.0f : weights[choice], hidden, sum);
      }
    }
    kernels.round(sum, hidden, out.values + size(token) * out.stride);
  }
}

}  // namespace

struct HostExperts::Impl : ExpertSet {
  ResultRows with_stride(ResultRows out) const {
    out.stride = out.stride == 0 ? size(hidden) : out.stride;
    return out;
  }
  const float* at_activation(const float* weights) const { return options.weight_at == WeightAt::activation ? weights : nullptr; }
};

HostExperts::HostExperts(std::vector<ExpertWeights> experts, int hidden, int intermediate, const ExpertOptions& options)
    : impl_(std::make_unique<Impl>()) {
  check_options(hidden, intermediate, options);
  for (std::size_t expert = 0; expert < experts.size(); ++expert) check_expert(experts[expert], expert, hidden, intermediate);
  use_one_blas_thread();
  impl_->experts = std::move(experts);
  impl_->hidden = hidden;
  impl_->intermediate = intermediate;
  impl_->options = options;
}

HostExperts::~HostExperts() = default;
HostExperts::HostExperts(HostExperts&&) noexcept = default;
HostExperts& HostExperts::operator=(HostExperts&&) noexcept = default;

int HostExperts::count() const { return static_cast<int>(impl_->experts.size()); }
int HostExperts::hidden() const { return impl_->hidden; }
int HostExperts::intermediate() const { return impl_->intermediate; }
const ExpertOptions& HostExperts::options() const { return impl_->options; }

void HostExperts::update(int expert, const ExpertWeights& weights) {
  if (expert < 0 || expert >= count())
    throw InputError(fmt::format("weights of local expert {}; there are {} here", expert, count()));
  check_expert(weights, size(expert), hidden(), intermediate());
  impl_->experts[size(expert)] = weights;
}

void HostExperts::contiguous(const RowView& rows, std::span<const int> row_begin, std::span<const int> row_count,
                             const float* row_weights, ResultRows out, ExpertReport* report) const {
  constexpr int any = std::numeric_limits<int>::max();
  check_counts(*impl_, "contiguous", "row_begin", row_begin, any);
  check_counts(*impl_, "contiguous", "row_count", row_count, any);
  ExpertWorkspace& workspace = expert_workspace();
  workspace.pairs.clear(count());
  for (int expert = 0; expert < count(); ++expert) {
    add_run(workspace.pairs, expert, row_begin[size(expert)], row_count[size(expert)], impl_->at_activation(row_weights));
  }
  workspace.pairs.most_rows = workspace.pairs.count();
  check_view(*impl_, "contiguous", rows, workspace.pairs.count());
  ExpertReport unused;
  out = impl_->with_stride(out);
  run_chain(*impl_, 0, rows, workspace, {out.values, out.stride, nullptr}, report != nullptr ? *report : unused);
}

void HostExperts::masked(const RowView& rows, int block_rows, std::span<const int> masked_m, const float* row_weights,
                         ResultRows out, ExpertReport* report, int most_rows) const {
  check_counts(*impl_, "masked", "masked_m", masked_m, block_rows);
  ExpertWorkspace& workspace = expert_workspace();
  workspace.pairs.clear(count());
  for (int expert = 0; expert < count(); ++expert) {
    add_run(workspace.pairs, expert, expert * block_rows, masked_m[size(expert)], impl_->at_activation(row_weights));
  }
  workspace.pairs.most_rows = most_rows != 0 ? most_rows : count() * block_rows;
  check_view(*impl_, "masked", rows, workspace.pairs.count());
  ExpertReport unused;
  out = impl_->with_stride(out);
  run_chain(*impl_, 0, rows, workspace, {out.values, out.stride, nullptr}, report != nullptr ? *report : unused);
}

void HostExperts::routed(const RowView& rows, int count, int topk, const int* local_ids, const float* weights, RoutedOutput mode,
                         ResultRows out, ExpertReport* report) const {
  ExpertWorkspace& workspace = expert_workspace();
  sort_choices(*impl_, count, topk, local_ids, weights, workspace);
  check_view(*impl_, "routed", rows, workspace.pairs.count());
  ExpertReport unused;
  ExpertReport& to = report != nullptr ? *report : unused;
  out = impl_->with_stride(out);
  if (mode == RoutedOutput::slots) {
    run_chain(*impl_, 0, rows, workspace, {out.values, out.stride, nullptr}, to);
    return;
  }
  PairList& pairs = workspace.pairs;
  for (int pair = 0; pair < pairs.count(); ++pair) {
    pairs.target[size(pair)] = pair;
  }
  bf16* results = workspace.results.resize(size(pairs.count()) * size(hidden()));
  run_chain(*impl_, 0, rows, workspace, {results, size(hidden()), nullptr}, to);
  const auto start = std::chrono::steady_clock::now();
  sum_pairs(count, topk, hidden(), impl_->options.weight_at == WeightAt::combine ? weights : nullptr, workspace, out);
  to.sum += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

RowView HostExperts::activations(const RowView& rows, int count, const float* row_weights, int expert, int part) const {
  check_part(*impl_, expert, part, activation_part, intermediate());
  check_view(*impl_, "part", rows, count);
  return run_activations(*impl_, rows, count, impl_->at_activation(row_weights), expert, part, expert_workspace());
}

void HostExperts::results(const RowView& activations, int count, int expert, int part, ResultRows out) const {
  check_part(*impl_, expert, part, result_part, hidden());
  check_view(*impl_, "part", activations, count);
  run_results(*impl_, activations, count, expert, part, expert_workspace(), {out.values, out.stride, nullptr});
}

void HostExperts::dense(const RowView& rows, int count, ResultRows out, ExpertReport* report, int expert) const {
  if (expert < 0 || expert >= this->count()) {
    throw InputError(fmt::format("dense runner: expert {}; there are {} local experts", expert, this->count()));
  }
  check_view(*impl_, "dense", rows, count);
  ExpertWorkspace& workspace = expert_workspace();
  workspace.pairs.clear(1);
  add_run(workspace.pairs, 0, 0, count, nullptr);
  workspace.pairs.most_rows = count;
  ExpertReport unused;
  out = impl_->with_stride(out);
  run_chain(*impl_, expert, rows, workspace, {out.values, out.stride, nullptr}, report != nullptr ? *report : unused);
}

}  // namespace heddle
