// Numbers of the exchange-ways article: DeepSeek-V4.1-Flash on 8 B300 (MB and GB are powers of 1,024).
#include "plan/articles.hpp"

namespace heddle::plan {

namespace {

using Numbers = std::vector<ArticleNumber>;

PlanRequest flash(int ranks, int tokens) { return example("deepseek-v4.1-flash", "b300", ranks, tokens, tokens); }

void add(Numbers& list, const char* section, const char* title, const char* stated, double value, const char* unit,
         const char* formula) {
  list.push_back({title, "exchange-ways", section, stated, value, unit, formula});
}

void add_copies(Numbers& list) {
  const auto copies = [](Way way, int ranks) { return copies_of_a_token(way, flash(ranks, 64).shape, ranks); };
  const auto more = [&](Way way, int ranks) { return 100 * (copies(way, ranks) / copies(Way::elastic, ranks) - 1); };
  const char* formula = "G (1 - C(E - E/G, k) / C(E, k))";
  add(list, "1.3", "copies of a token, a rank that needs it, 8 ranks", "4.43", copies(Way::elastic, 8), "copies", formula);
  add(list, "1.3", "the same on 4 ranks", "3.30", copies(Way::elastic, 4), "copies", formula);
  add(list, "1.3", "the same on 64 ranks", "5.81", copies(Way::elastic, 64), "copies", formula);
  add(list, "1.3", "copies of a token, one an expert", "6", copies(Way::low_latency, 8), "copies", "k");
  add(list, "1.3", "copies of a token, one a rank", "8", copies(Way::gather, 8), "copies", "G");
  add(list, "2.3", "gather on 4 ranks moves more by", "21", more(Way::gather, 4), "%", "4 / 3.30 - 1");
  add(list, "2.3", "gather on 8 ranks moves more by", "81", more(Way::gather, 8), "%", "8 / 4.43 - 1");
  add(list, "4.1", "one copy an expert moves more by", "35", more(Way::low_latency, 8), "%", "6 / 4.43 - 1");
  add(list, "2.4", "copies that gather sends for nothing", "3.6", copies(Way::gather, 8) - copies(Way::elastic, 8), "copies",
      "8 - 4.43");
}

void add_bytes(Numbers& list) {
  const auto delivered = [](Way way, int tokens) { return dispatch_traffic(way, flash(8, tokens)).bytes / mebi; };
  const char* formula = "tokens x copies x 10,240 bytes";
  const char* unit = "MB (2^20)";
  add(list, "1.3", "4,096 rows a rank, to every rank", "320", delivered(Way::gather, 4096), unit, formula);
  add(list, "1.3", "4,096 rows a rank, one copy an expert", "240", delivered(Way::low_latency, 4096), unit, formula);
  add(list, "1.3", "4,096 rows a rank, to ranks that need them", "177", delivered(Way::elastic, 4096), unit, formula);
  add(list, "1.3", "64 rows a rank, to every rank", "5.0", delivered(Way::gather, 64), unit, formula);
  add(list, "1.3", "64 rows a rank, one copy an expert", "3.8", delivered(Way::low_latency, 64), unit, formula);
  add(list, "1.3", "64 rows a rank, to ranks that need them", "2.8", delivered(Way::elastic, 64), unit, formula);

  const int hidden = flash(8, 64).shape.hidden;
  const auto row = [&](Wire wire, Quantisation quantisation) { return double(wire_row_bytes(wire, hidden, quantisation)); };
  add(list, "7.2", "row, 16-bit", "10,240", row(Wire::bf16, {}), "bytes", "2 H");
  add(list, "7.2", "row, fp8, a scale byte for 32", "5,280", row(Wire::fp8, {32, ScaleFormat::ue8m0}), "bytes", "H + H/32");
  add(list, "7.2", "row, fp8, a 4-byte scale for 128", "5,280", row(Wire::fp8, {128, ScaleFormat::f32}), "bytes", "H + 4 H/128");
  add(list, "7.2", "row, nvfp4, a scale byte for 16", "2,880", row(Wire::nvfp4, {}), "bytes", "H/2 + H/16");
  add(list, "9.3", "4-bit rows out and 8-bit rows back, fewer by", "2.56", round_trip_reduction({4, 32}, {8, 32}), "times",
      "2 x 16 bits / ((4 + 8/32) + (8 + 8/32)), a scale byte for 32 both ways");
}

void add_room(Numbers& list) {
  const PlanRequest decode = flash(8, 64);
  const LayerShape& shape = decode.shape;
  const Machine& b300 = decode.machine;
  const double blocks = double(article_buffer(Way::one_sided, flash(8, 4096)).region("arrived").rows);
  const int sms = transfer_sms(expected_copies(shape.experts, shape.topk, 8), 8, b300.link->value, b300.sm_read->value,
                               b300.sm_write->value, b300.sms);
  add(list, "1.1", "experts of a rank", "48", most_local_experts(shape.experts, 8), "experts", "384 / 8");
  add(list, "4.2", "rows of room, cap 128", "49,152", double(padded_tensors(shape, 8, 128).rows), "rows", "48 x 8 x 128");
  add(list, "4.2", "rows that arrive, 64 a rank", "384", pair_counts(shape, 8, 64).per_rank, "rows", "64 x 8 x 6 / 8");
  add(list, "6.3", "rows of one_sided's tensor, 4,096 a rank", "32,768", blocks, "rows", "8 x 4,096");
  add(list, "9.2", "rows of a decode step, 64 requests with 4 draft tokens", "256",
      token_bound({.decode_graphs = {64}, .speculative_rows = 4, .prefill_chunk = {}}).decode, "rows", "64 x 4");
  add(list, "5.1", "SMs that elastic's rule asks for", "26", sms, "SMs",
      "1.25 x (0.9 x 18 links x 53.125 GB/s / (7/8)) / 50 GB/s that an SM writes, up to even");
}

}  // namespace

std::vector<ArticleNumber> exchange_numbers() {
  Numbers list;
  add_copies(list);
  add_bytes(list);
  add_room(list);
  return list;
}

}  // namespace heddle::plan
