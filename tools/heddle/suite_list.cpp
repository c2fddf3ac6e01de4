// What there is to measure: names, how, what it serves, and an estimate of how long it takes, which a budget is held against.
#include <fmt/format.h>

#include "suite.hpp"

namespace heddle::tool {

namespace {

/// Computed, not measured: the same on every machine.
std::vector<Measurement> computed_list(const SuiteArguments& a) {
  return {{"copies", "copies", "--preset deepseek-v4.1-flash --ranks 1,2,4,8,16,32,64 --recordings " + a.recordings,
           "ways: Figure 3, loads of section 1.4, {{summary_text}}", 2},
          {"buffers", "buffers", "--ranks 8 --caps 64,128,1024,4096,8192",
           "fused: Figure 11, {{buffer_check}}; ways: {{ll_buffer_128}}, {{ll_buffer_1024}}, {{fi_workspace_4096}}", 1}};
}

/// The persistent-grid article's running example.
constexpr const char* grid_example = "--experts 64 --ranks 4 --topk 6 --cap 1024 --intermediate 2048 --tokens 1,8,64,256,1024";

void add(std::vector<Measurement>& list, const std::vector<Measurement>& more) {
  list.insert(list.end(), more.begin(), more.end());
}

/// On one GPU: what 8 (and 4) ranks would exchange, as virtual ranks of it, without links.
std::vector<Measurement> virtual_list() {
  const std::string ranks8 = "--ranks 8 --gpus 1 --experts 384 --hidden 5120 --wire bf16 --replays 20 ";
  const std::string ways = "gather,low_latency,elastic,one_sided,normal";
  return {{"exchange-8v", "exchange", ranks8 + "--tokens 8,64,128,512 --way " + ways,
           "ways: Figure 11, {{*_64_8}}, {{fig11_discussion_8}}, {{s8_summary}}", 8},
          {"prefill-8v", "exchange", ranks8 + "--tokens 1024,4096 --way gather,elastic,one_sided,elastic_sync,normal",
           "ways: Figure 11, {{*_4096_8}}", 10},
          {"exchange-4v", "exchange",
           "--ranks 4 --gpus 1 --experts 384 --hidden 5120 --wire bf16 --replays 20 --tokens 64 --way " + ways,
           "ways: {{best_total_64_4}}, {{best_step_share}}", 4},
          {"layouts-8v", "exchange", ranks8 + "--layout-cost --tokens 64,512 --way low_latency,elastic,one_sided,normal",
           "ways: section 8.3, {{layout_discussion}}, {{v2masked_total_64_8}}", 6}};
}

/// Ranks with a GPU each.
std::vector<Measurement> exchange_list(int ranks) {
  const std::string layer = fmt::format("--ranks {0} --gpus {0} --experts 384 --hidden 5120 --wire bf16 --replays 20 ", ranks);
  return {
      {fmt::format("exchange-{}", ranks), "exchange",
       layer + "--tokens 1,8,16,32,64,128,256,512 --way gather,low_latency,elastic,one_sided,normal",
       "ways: Figure 11, {{*_64_8}}, {{best_total_64_4}}", 12},
      {fmt::format("prefill-{}", ranks), "exchange",
       layer + "--tokens 1024,2048,4096,8192 --way gather,elastic,one_sided,elastic_sync,normal", "ways: Figure 11, {{*_4096_8}}",
       12},
      {fmt::format("layouts-{}", ranks), "exchange", layer + "--layout-cost --tokens 64,512,4096 --way elastic,one_sided,normal",
       "ways: section 8.3, {{layout_discussion}}, {{v2masked_total_64_8}}", 8}};
}

/// After everything with way normal: it frees memory, which waits for all GPUs once NCCL has opened them to each other.
Measurement nccl(int ranks) {
  return {fmt::format("nccl-{}", ranks), "exchange",
          fmt::format("--ranks {0} --gpus {0} --experts 384 --hidden 5120 --wire bf16 --replays 20 --way nccl "
                      "--tokens 1,8,16,32,64,128,256,512,1024,2048,4096,8192",
                      ranks),
          "ways: Figure 11, {{agrs_total_64_8}}", 10};
}

/// Layers of DeepSeek-V4-Flash with an eighth of its experts on every GPU, as 8 GPUs have it.
std::vector<Measurement> layer_list(int ranks) {
  const std::string layer = fmt::format("--ranks {0} --gpus {0} --experts-local 32 ", ranks);
  return {{fmt::format("mega-{}", ranks), "mega",
           layer + "--weights mxfp4 --tokens 1,4,8,16,64,128,512,2048,4096,8192 --way gather,low_latency,elastic,one_sided "
                   "--combine slots,fp8,add --replays 10",
           "fused: Figures 3, 10, {{chain_us_512}}, {{fused_us_512}}, {{step_saved_ms}}, {{fp8_combine_result}}", 25},
          {fmt::format("step-{}", ranks), "step",
           fmt::format("--preset deepseek-v4-flash --engine cuda --ranks {0} --gpus {0} --experts {1} --sizes 8,64,512 --replays 5",
                       ranks, 32 * ranks),
           "fused: {{server_ab}}, {{chain_launches}}; ways: section 8.4", 15},
          {fmt::format("skew-{}", ranks), "mega",
           layer + "--weights mxfp4 --tokens 64,512,4096 --way low_latency,elastic --routing zipf:1.0 --replays 10",
           "fused: {{skew_note}}", 8},
          {fmt::format("shared-{}", ranks), "mega",
           layer + "--weights mxfp4 --shared-weights mxfp4 --shared inside,module,extra,none --tokens 8,64,512,4096 --way none "
                   "--replays 10",
           "fused: section 3.8, {{sec4_variants}}", 8},
          {fmt::format("ring-{}", ranks), "mega",
           layer + "--weights mxfp4 --tokens 64,512,4096 --way low_latency --full-ring --replays 10", "fused: {{ring_timing}}", 6},
          {fmt::format("fp8-{}", ranks), "mega",
           layer + "--weights fp8_block --tokens 8,64,512,4096 --way low_latency,elastic --replays 10",
           "fused: {{sec4_variants}}, roofline", 10}};
}

}  // namespace

std::vector<Measurement> host_list(const SuiteArguments& a) {
  const std::string layer = "--preset deepseek-v4-flash --hidden 512 --intermediate 256 ";
  std::vector<Measurement> list = computed_list(a);
  add(list,
      {{"machine", "machine", "", "roofline", 3},
       {"trips-8", "trips", "--ranks 8 --experts 64 --topk 6 --hidden 1024 --sizes 1,8,64,512,1024 --calls 9",
        "ways: Figure 11, {{*_64_8}}, {{fig11_discussion_8}}", 10},
       {"trips-4", "trips", "--ranks 4 --experts 64 --topk 6 --hidden 1024 --sizes 1,8,64,512,2048 --calls 9",
        "ways: Figure 11, {{best_total_64_4}}", 8},
       {"trips-2", "trips", "--ranks 2 --experts 64 --topk 6 --hidden 1024 --sizes 1,8,64,512,4096 --calls 9",
        "ways: Figure 11, {{*_4096_8}}", 8},
       {"layer-8", "layer", layer + "--ranks 8 --sizes 1,8,64,256 --calls 5",
        "fused: Figures 3, 10, {{chain_us_512}}, {{fused_us_512}}; ways: section 8.3, {{layout_discussion}}", 10},
       {"layer-4", "layer", layer + "--ranks 4 --sizes 1,8,64,256 --calls 5", "fused: Figures 3, 10", 8},
       {"layer-2", "layer", layer + "--ranks 2 --sizes 1,8,64,256 --calls 5", "fused: Figures 3, 10", 8},
       {"ring-8", "layer", layer + "--ranks 8 --sizes 64,256 --calls 5 --way mega --ring full", "fused: {{ring_timing}}", 4},
       {"add-8", "layer", layer + "--ranks 8 --sizes 64,256 --calls 5 --way mega --combine add", "fused: {{sec4_variants}}", 4},
       {"fp8-combine-8", "layer", layer + "--ranks 8 --sizes 64,256 --calls 5 --way mega,low_latency --combine-wire fp8",
        "fused: {{fp8_combine_result}}", 6},
       {"skew-8", "layer", layer + "--ranks 8 --sizes 64,256 --calls 5 --way mega,low_latency,elastic --routing zipf:1.0",
        "fused: {{skew_note}}", 8},
       {"grids", "grids", grid_example, "grid: both grids, padded against persistent", 6},
       {"step-4", "step", layer + "--engine host --ranks 4 --sizes 8 --layers 8 --replays 5",
        "fused: {{server_ab}}; ways: section 8.4", 40},
       {"trace-2", "trace", layer + "--engine host --ranks 2 --tokens 64 --way mega,low_latency", "fused: Figures 2, 9, 14", 3}});
  return list;
}

std::vector<Measurement> gpu_list(const SuiteArguments& a, int gpus) {
  std::vector<Measurement> list = computed_list(a);
  std::vector<int> sizes;
  for (const int ranks : {8, 4, 2, 1}) {
    if (ranks <= gpus) sizes.push_back(ranks);
  }
  for (const int ranks : sizes) {
    if (ranks > 1) add(list, exchange_list(ranks));
    const std::vector<Measurement> layers = layer_list(ranks);
    add(list, ranks == sizes.front() ? layers : std::vector{layers.front()});
  }
  add(list, {{"activation", "activation", std::string(grid_example) + " --rows 0 --clamp 10 --replays 20",
              "grid: both grids, an empty CTA, CTA slots", 6},
             {"experts", "experts",
              "--shape v4_flash --weights mxfp4,fp8_block --product fused,gemm2 --blocks auto --peer none --rows 1,12,96,384,1536 "
              "--replays 10",
              "roofline, share of floor", 8}});
  if (gpus < 8) add(list, virtual_list());
  add(list, {{"trace-1", "trace",
              "--preset deepseek-v4-flash --engine cuda --ranks 1 --gpus 1 --experts 32 --tokens 512 --way mega,low_latency",
              "fused: Figures 2, 9, 14", 15}});
  for (const int ranks : sizes) {
    if (ranks > 1) list.push_back(nccl(ranks));
  }
  return list;
}

}  // namespace heddle::tool
