// heddle run: one layer on one batch, by one way, outputs to a file.
#include <fmt/format.h>

#include <memory>

#include "command.hpp"
#include "heddle/error.hpp"
#include "inputs.hpp"
#include "job.hpp"
#include "json_file.hpp"
#include "report.hpp"

namespace heddle::tool {

namespace {

struct RunArguments {
  LayerArguments layer;
  std::string way, out, json;
};

void write_output(const Inputs& inputs, const JobResult& result, const std::string& path) {
  const std::int64_t tokens = inputs.tokens();
  const std::vector<TensorOut> tensors{
      {"output", "BF16", {tokens, inputs.source.shape.hidden}, std::as_bytes(std::span(result.output))},
      {"topk_ids", "I32", {tokens, inputs.routing.topk}, std::as_bytes(std::span(inputs.routing.ids))},
      {"topk_weights", "F32", {tokens, inputs.routing.topk}, std::as_bytes(std::span(inputs.routing.weights))}};
  write_safetensors(path, tensors);
}

void run(const RunArguments& arguments) {
  if (arguments.out.empty()) throw InputError("give --out FILE for the outputs");
  if (arguments.way.empty()) throw InputError("give --way: gather, normal, low_latency, elastic, one_sided, mega or auto");
  const Inputs inputs = load_inputs(arguments.layer);
  const LayerOptions options = options_of_way(arguments.way, arguments.layer, inputs);
  if (!arguments.layer.save_inputs.empty()) save_inputs(inputs, arguments.layer.save_inputs);
  const JobResult result = run_job(inputs, options);
  if (!arguments.json.empty()) write_json(arguments.json, report_of(inputs, options, result));
  write_output(inputs, result, arguments.out);  // last: it appears only if all else succeeded
  fmt::print("{}: {} tokens on {} ranks, {:.2f} copies a token, {:.3f} s\n", title_of(options, result), inputs.tokens(),
             inputs.ranks, result.copies, result.seconds);
  if (result.reports.front().passes > 1)
    fmt::print("  in {} passes of up to {} tokens a rank\n", result.reports.front().passes, options.cap);
  if (options.way == Way::automatic) fmt::print("{}", result.choice);
  for (const std::string& note : inputs.notes) fmt::print("  {}\n", note);
}

}  // namespace

void add_run(CLI::App& app, int&) {
  auto arguments = std::make_shared<RunArguments>();
  auto* command = app.add_subcommand("run", "compute one MoE layer on a batch by one way");
  add_layer_arguments(*command, arguments->layer);
  command->add_option("--way", arguments->way,
                      "gather, normal, low_latency, elastic, one_sided, mega or auto; an engine's names too");
  command->add_option("--out", arguments->out, "safetensors file for output, topk_ids and topk_weights");
  command->add_option("--json", arguments->json, "report of the run as one JSON object");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace heddle::tool
