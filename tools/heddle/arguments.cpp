// The flags that run, verify and trace share.
#include "command.hpp"
#include "inputs.hpp"

namespace heddle::tool {

namespace {

void add_sources(CLI::App& command, LayerArguments& a) {
  const char* layer = "Layer";
  command.add_option("--layer", a.layer, "safetensors file, index or folder that holds the layer")->group(layer);
  command.add_option("--layer-index", a.layer_index, "which layer, where there are several")->group(layer)->check(whole_number);
  auto* preset =
      command.add_option("--preset", a.preset, "a published model's shape with weights drawn from --seed (heddle plan --list)")
          ->group(layer);
  command
      .add_option("--weights", a.weights, "with --preset: bf16, fp8_block, mxfp4, nvfp4 or mxfp8; a shared expert goes with them")
      ->group(layer)
      ->needs(preset);
  command.add_option("--hidden", a.hidden, "with --preset: another hidden size")->group(layer)->check(whole_number)->needs(preset);
  command.add_option("--intermediate", a.intermediate, "with --preset: another intermediate size")
      ->group(layer)
      ->check(whole_number)
      ->needs(preset);
  command.add_option("--experts", a.experts, "with --preset: another number of experts")
      ->group(layer)
      ->check(whole_number)
      ->needs(preset);
  command.add_option("--clamp", a.clamp, "SwiGLU clamp, a number or none (default: config.json or preset)")->group(layer);
  command.add_flag("--shared-mxfp4", a.shared_mxfp4, "convert an fp8 or bf16 shared expert to mxfp4")->group(layer);
  command
      .add_option("--shared", a.shared,
                  "shared expert: alone, fused with the routed ones, or with way mega one more (extra) of them")
      ->group(layer)
      ->capture_default_str();

  const char* batch = "Batch";
  auto* given =
      command
          .add_option("--batch", a.batch, "safetensors file with hidden_states and, if chosen elsewhere, topk_ids and topk_weights")
          ->group(batch);
  auto* trace = command.add_option("--trace", a.trace, "routing recording (.npy) instead of --batch's ids")->group(batch);
  command.add_option("--trace-layer", a.trace_layer, "layer of the recording")
      ->group(batch)
      ->check(whole_number)
      ->capture_default_str()
      ->needs(trace);
  command.add_option("--trace-step", a.trace_step, "first step of the recording")
      ->group(batch)
      ->check(whole_number)
      ->capture_default_str()
      ->needs(trace);
  command.add_option("--trace-expand", a.trace_expand, "spread each recorded expert over this many")
      ->group(batch)
      ->check(whole_number)
      ->needs(trace);
  command.add_option("--routing", a.routing, "draw the routing: uniform, zipf:EXPONENT, hot:RANK or counts:FILE")->group(batch);
  command.add_option("--tokens", a.tokens, "tokens in all, where no --batch says so (default: 64 a rank)")
      ->group(batch)
      ->check(whole_number);
  command.add_option("--hidden-states", a.hidden_states, "gaussian or heavy_tailed, where no --batch brings them")
      ->group(batch)
      ->capture_default_str()
      ->excludes(given);
  command.add_option("--seed", a.seed, "seed of everything drawn")->group(batch)->capture_default_str()->check(seed_number);
  command.add_option("--save-inputs", a.save_inputs, "write the layer and the batch as used into this folder")->group(batch);
}

void add_router(CLI::App& command, LayerArguments& a) {
  const char* router = "Router (default: config.json or preset)";
  command.add_option("--topk", a.topk, "choices a token")->group(router)->check(whole_number);
  command.add_option("--score", a.score, "softmax, sigmoid, sqrtsoftplus or softmax_topk")->group(router);
  command.add_option("--groups", a.groups, "expert groups")->group(router)->check(whole_number);
  command.add_option("--topk-groups", a.topk_groups, "groups that may be chosen from")->group(router)->check(whole_number);
  auto* yes = command.add_flag("--renormalise", a.renormalise, "weights of the chosen sum to 1 before the factor")->group(router);
  command.add_flag("--no-renormalise", a.no_renormalise, "they keep their scores")->group(router)->excludes(yes);
  command.add_option("--route-scale", a.route_scale, "the model's factor")->group(router)->check(finite_number);
}

void add_execution(CLI::App& command, LayerArguments& a) {
  const char* run = "Execution";
  command.add_option("--ranks", a.ranks, "ranks that share the experts")->group(run)->check(whole_number);
  command.add_option("--engine", a.engine, "host, or cuda: the layer on GPUs")->group(run)->capture_default_str();
  command
      .add_option("--experts-engine", a.experts_engine,
                  "with --engine cuda: where experts run, cuda or host; on the host only rows travel on GPUs (default: cuda)")
      ->group(run);
  command.add_option("--gpus", a.gpus, "GPUs of --engine cuda, ranks spread over them (default: all, at most one a rank)")
      ->group(run)
      ->check(whole_number);
  command.add_flag("--processes", a.processes, "a process a rank instead of a thread; with --engine cuda a process a GPU")
      ->group(run);
  command.add_option("--workers", a.workers, "protocol threads a rank; mega: in each of its two roles")
      ->group(run)
      ->check(whole_number)
      ->capture_default_str();
  command.add_option("--cap", a.cap, "most tokens a rank may bring (default: the largest batch of any rank)")
      ->group(run)
      ->check(whole_number);
  command.add_option("--deadline-ms", a.deadline_ms, "longest wait for another rank")
      ->group(run)
      ->check(whole_number)
      ->capture_default_str();
  command.add_option("--runner", a.runner, "auto, contiguous, masked or routed")->group(run)->capture_default_str();
  command.add_option("--activation", a.activation, "fp8 or bf16 (default: bf16 with bf16 weights, else fp8)")->group(run);
  command.add_option("--group", a.group, "values a scale: 128 or 32")->group(run)->check(whole_number)->capture_default_str();
  command.add_option("--scale", a.scale, "ue8m0 or f32")->group(run)->capture_default_str();
  command.add_option("--weight-at", a.weight_at, "routing weight at the activation or the combine")
      ->group(run)
      ->capture_default_str();
  command.add_option("--wire", a.wire, "rows on their way out: bf16, fp8 or nvfp4 (default: what the runner takes)")->group(run);
  command.add_option("--combine-wire", a.combine_wire, "rows on their way back: bf16, fp8 or nvfp4 (default: bf16)")->group(run);
  command.add_option("--reduce", a.reduce, "elastic: first sum at the expert's rank or at home")->group(run)->capture_default_str();
  command
      .add_option("--nodes", a.nodes,
                  "elastic: virtual nodes that share the ranks equally and send each other messages (docs/nodes.md)")
      ->group(run)
      ->check(whole_number)
      ->capture_default_str();
  command.add_option("--mode", a.mode, "elastic over nodes: direct, or hybrid, where a row crosses once and is forwarded")
      ->group(run)
      ->capture_default_str();
  command.add_flag("--cpu-sync", a.cpu_sync, "elastic: the host waits for the count")->group(run);
  command.add_option("--gather", a.gather, "gather: padded, uneven or zero_filled")->group(run)->capture_default_str();
  command.add_option("--combine", a.combine, "mega: results wait in slots, or are added where they arrive: slots or add")
      ->group(run)
      ->capture_default_str();
  command.add_option("--ring", a.ring, "mega: room for the row blocks that can be live, or full: for all that can arrive")
      ->group(run)
      ->capture_default_str();
  command.add_option("--block-rows", a.block_rows, "mega: rows of a row block, a multiple of 8, 8 to 256")
      ->group(run)
      ->check(whole_number)
      ->capture_default_str();
  command
      .add_option("--overflow", a.overflow, "more tokens than --cap: error, or split: as many passes as the largest batch needs")
      ->group(run)
      ->capture_default_str();
  command.add_option("--tuning", a.tuning, "way auto: the table of times to choose by (heddle tune; default: the shipped one)")
      ->group(run);
  command.add_option("--candidates", a.candidates, "way auto: ways to choose from (default: all that do what the options ask)")
      ->delimiter(',')
      ->group(run);
  command.add_option("--sums", a.sums, "way auto: any; or slots or two_stages: only ways that have equal bits")
      ->group(run)
      ->capture_default_str();
  command.add_option("--deepep-mode", a.deepep_mode, "what `--way deepep` means: normal, low_latency or auto")
      ->group(run)
      ->capture_default_str();
  command.add_flag("--tensor-parallel", a.tensor_parallel, "tensor-parallel attention: every rank has and wants all tokens")
      ->group(run);
  command
      .add_flag("--expert-slices", a.expert_slices, "tensor-parallel experts: every rank holds a slice of every expert (gather)")
      ->group(run);
}

}  // namespace

void add_layer_arguments(CLI::App& command, LayerArguments& arguments) {
  add_sources(command, arguments);
  add_router(command, arguments);
  add_execution(command, arguments);
}

}  // namespace heddle::tool
