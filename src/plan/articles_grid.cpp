// Numbers of the persistent-grid article: DeepSeek-V4-Flash on 4 B200 (GB are powers of ten).
#include "plan/articles.hpp"

namespace heddle::plan {

namespace {

constexpr double giga = 1e9;
using Numbers = std::vector<ArticleNumber>;

PlanRequest flash(int tokens, int cap) { return example("deepseek-v4-flash", "b200", 4, tokens, cap); }

void add(Numbers& list, const char* section, const char* title, const char* stated, double value, const char* unit,
         const char* formula) {
  list.push_back({title, "persistent-grid", section, stated, value, unit, formula});
}

void add_grids(Numbers& list) {
  const PlanRequest decode = flash(64, 1024);
  const LayerShape& shape = decode.shape;
  const GridPlan grid = activation_grid(shape, 4, 1024, decode.machine.sms);
  const double hopper = double(activation_grid(shape, 4, 1024, find_machine("h200").sms).persistent);
  const double rows = pair_counts(shape, 4, 64).per_rank;
  const double padded = double(grid.padded), persistent = double(grid.persistent);
  add(list, "The shapes", "experts of a rank", "64", most_local_experts(shape.experts, 4), "experts", "256 / 4");
  add(list, "How T is computed", "T, cap 1,024", "4,096", double(padded_tensors(shape, 4, 1024).rows_an_expert), "rows",
      "1,024 x 4");
  add(list, "How T is computed", "real rows, 64 tokens a rank", "384", rows, "rows", "64 x 4 x 6 / 4");
  add(list, "The padded grid", "threads of a CTA", "256", grid.threads, "threads", "D / 8");
  add(list, "The padded grid", "CTAs of the padded grid", "24,576", padded, "CTAs", "T x 6");
  add(list, "The persistent grid", "CTAs of the persistent grid", "1,184", persistent, "CTAs",
      "min(148 SMs x 8 CTAs, T x 6); 8 CTAs of 256 threads are assumed");
  add(list, "The persistent grid", "the same on 132 SMs", "1,056", hopper, "CTAs", "132 x 8; the article's rule on an H200");
  add(list, "The two grids side by side", "CTAs not launched", "23,392", double(grid.not_launched()), "CTAs", "24,576 - 1,184");
  add(list, "Inside one CTA", "empty CTAs of the padded grid", "24,192", padded - rows, "CTAs", "24,576 - 384");
  add(list, "Inside one CTA", "empty CTAs of the persistent grid", "800", persistent - rows, "CTAs", "1,184 - 384");
  add(list, "The padded grid", "empty CTAs for a slot", "20", (padded - rows) / double(grid.slots), "CTAs", "24,192 / 1,184");
  add(list, "The two grids side by side", "loops of a CTA, 1,024 tokens a rank", "5",
      pair_counts(shape, 4, 1024).per_rank / persistent, "rows", "6,144 / 1,184");
}

void add_prefill(Numbers& list) {
  const LayerShape shape = flash(8192, 8192).shape;
  const PaddedTensors padded = padded_tensors(shape, 4, 8192);
  const double rows = pair_counts(shape, 4, 8192).per_rank;
  const char* section = "Prefill uses option (a)";
  const char* unit = "GB (10^9)";
  add(list, section, "T, 8,192 tokens a rank", "32,768", double(padded.rows_an_expert), "rows", "8,192 x 4");
  add(list, section, "padded received rows, fp8", "8.6", double(padded.received) / giga, unit, "64 x 32,768 x 4,096");
  add(list, section, "padded GEMM 1 output, bf16", "17.2", double(padded.gate_up) / giga, unit, "64 x 32,768 x 4,096 x 2");
  add(list, section, "real received rows, fp8", "0.2", rows * shape.hidden / giga, unit, "49,152 x 4,096");
}

}  // namespace

std::vector<ArticleNumber> grid_numbers() {
  Numbers list;
  add_grids(list);
  add_prefill(list);
  return list;
}

}  // namespace heddle::plan
