// Numbers of the fused-kernel article: DeepSeek-V4-Flash on 8 B300 (MB and GB are powers of 1,024).
#include "plan/articles.hpp"

namespace heddle::plan {

namespace {

using Numbers = std::vector<ArticleNumber>;

PlanRequest flash(int tokens) { return example("deepseek-v4-flash", "b300", 8, tokens, tokens); }

void add(Numbers& list, const char* section, const char* title, const char* stated, double value, const char* unit,
         const char* formula) {
  list.push_back({title, "fused-kernel", section, stated, value, unit, formula});
}

void add_pairs(Numbers& list) {
  const LayerShape shape = flash(512).shape;
  const PairCounts decode = pair_counts(shape, 8, 512);
  const PairBytes pair = fused_pair_bytes(shape.hidden);
  const double with_replacement = expected_copies_with_replacement(shape.experts, shape.topk, 8);
  add(list, "1.2", "pairs of a layer, 512 tokens a rank", "24,576", double(decode.pairs), "pairs", "512 x 8 x 6");
  add(list, "1.2", "rows of an expert, 512 tokens a rank", "96", decode.per_expert, "rows", "24,576 / 256");
  add(list, "3.3", "rows of an expert, 8,192 tokens a rank", "1,536", pair_counts(shape, 8, 8192).per_expert, "rows",
      "8,192 x 8 x 6 / 256");
  add(list, "1.2", "a pair on its way out", "4,228", double(pair.out), "bytes", "4,096 + 128 + 4");
  add(list, "1.2", "its result on the way back", "8,192", double(pair.back), "bytes", "2 H");
  add(list, "5.4", "a pair out and back", "12,420", double(pair.out + pair.back), "bytes", "4,228 + 8,192");
  add(list, "3.2", "copies of a token, drawn with replacement", "4.4", with_replacement, "copies", "8 (1 - (7/8)^6)");
}

void add_gemms(Numbers& list) {
  const LayerShape shape = flash(512).shape;
  const GemmTasks tasks = gemm_tasks(shape);
  add(list, "3.3", "GEMM 1 tasks of a row block", "16", tasks.gemm1_tasks, "tasks", "4,096 / 256");
  add(list, "3.3", "GEMM 1 steps of a task", "32", tasks.gemm1_steps, "steps", "4,096 / 128");
  add(list, "3.6", "GEMM 2 steps of a task", "16", tasks.gemm2_steps, "steps", "2,048 / 128");

  const double values = double(expert_weight_bytes(shape, WeightKind::mxfp4).values);
  const double weights = most_local_experts(shape.experts, 8) * values;
  const double rows = pair_counts(shape, 8, 512).per_rank;
  const double incoming = rows * shape.hidden;
  const double outgoing = rows * double(wire_row_bytes(Wire::bf16, shape.hidden));
  const char* unit = "MB (2^20)";
  add(list, "3.4", "weights of an expert", "12", values / mebi, unit, "3 x 4,096 x 2,048 / 2, without scales");
  add(list, "3.4", "weights that a rank reads", "384", weights / mebi, unit, "32 x 12 MB");
  add(list, "3.4", "rows that arrive at a rank", "3,072", rows, "rows", "24,576 / 8");
  add(list, "3.4", "incoming rows", "12", incoming / mebi, unit, "3,072 x 4,096, without scales");
  add(list, "3.4", "outgoing results", "24", outgoing / mebi, unit, "3,072 x 8,192");
  add(list, "3.4", "weights against rows", "11", weights / (incoming + outgoing), "times", "384 / (12 + 24)");
  add(list, "3.4", "reading one expert", "1.9", values / find_machine("b300").memory_read->value * 1e6, "us", "12 MB / 6.5 TB/s");
  add(list, "3.4", "touched experts, 4 tokens, 32 experts", "18", expected_touched_experts(32, 32, 6, 4), "experts",
      "32 (1 - (26/32)^4)");
  add(list, "3.4", "touched experts, 16 tokens", "31", expected_touched_experts(32, 32, 6, 16), "experts", "32 (1 - (26/32)^16)");
}

void add_buffers(Numbers& list) {
  const PlanRequest large = flash(8192);
  const LayerShape& shape = large.shape;
  const auto buffer = [&](int ranks, int cap, ArrivedRegion arrived, int shared_experts) {
    return fused_buffer(shape, ranks, cap, arrived, shared_experts, large.machine.sms);
  };
  const auto total = [](const Buffer& whole) { return double(whole.bytes()) / gibi; };
  const Buffer routed = buffer(8, 8192, ArrivedRegion::worst_case, 0);
  const auto size = [&](const char* name) { return double(routed.region(name).bytes) / gibi; };
  const char* unit = "GB (2^30)";
  const char* multiple = "up to a multiple of 1,920";
  add(list, "5.1", "cap 8,192 rounded up", "9,600", fused_cap(8192), "tokens", multiple);
  const TokenBudget recipe{.decode_graphs = {}, .prefill_chunk = 65536, .data_parallel_groups = 8};
  add(list, "5.2", "tokens of a rank, a chunk of 65,536", "8,192", token_bound(recipe).prefill, "tokens", "65,536 / 8 groups");
  add(list, "5.2", "cap 8,320 rounded up", "9,600", fused_cap(8320), "tokens", multiple);
  add(list, "5.1", "cap 4,096 rounded up", "5,760", fused_cap(4096), "tokens", multiple);
  add(list, "5.1", "rows that can arrive", "460,800", double(fused_worst_rows(shape, 8, 8192)), "rows", "8 x 9,600 x 6");
  add(list, "5.1", "arrived tokens", "1.8", size("arrived"), unit, "460,800 rows and padding, x 4,096 bytes");
  add(list, "5.1", "intermediate values", "0.9", size("intermediate"), unit, "the same rows x 2,048 bytes");
  add(list, "5.1", "scales of both", "1.3", size("scales"), unit, "the same rows x 16 x (128 + 64) bytes");
  add(list, "5.1", "result slots", "0.4", size("result_slots"), unit, "9,600 x 6 x 8,192 bytes");
  add(list, "5.1", "whole buffer, routed experts", "4.5", total(routed), unit,
      "all regions; counters as that kernel's published layout");
  add(list, "5.1", "whole buffer, shared expert inside", "4.7", total(buffer(8, 8192, ArrivedRegion::worst_case, 1)), unit,
      "and a 7th slot, its activations and scales");
  add(list, "5.1", "whole buffer, cap 4,096", "0.35", total(buffer(8, 4096, fused_arrived(4096), 0)), unit,
      "a ring; its rows as that kernel's published schedule");
  add(list, "8", "whole buffer, 64 ranks", "22", total(buffer(64, 8192, ArrivedRegion::worst_case, 0)), unit,
      "64 x 9,600 x min(6, 4 local experts) rows");
  add(list, "8", "whole buffer, 64 ranks, with a ring", "0.6", total(buffer(64, 8192, ArrivedRegion::ring, 0)), unit,
      "the same ring");
}

}  // namespace

std::vector<ArticleNumber> fused_numbers() {
  Numbers list;
  add_pairs(list);
  add_gemms(list);
  add_buffers(list);
  return list;
}

}  // namespace heddle::plan
