#include "drawn_layer.hpp"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

void check_usual_ways(const LayerArguments& given, const std::string& command) {
  const LayerArguments usual;
  const std::pair<const char*, bool> others[] = {{"--wire", !given.wire.empty()},
                                                 {"--combine-wire", !given.combine_wire.empty()},
                                                 {"--combine", given.combine != usual.combine},
                                                 {"--weight-at", given.weight_at != usual.weight_at},
                                                 {"--reduce", given.reduce != usual.reduce},
                                                 {"--runner", given.runner != usual.runner},
                                                 {"--scale", given.scale != usual.scale},
                                                 {"--group", given.group != usual.group},
                                                 {"--shared", given.shared != usual.shared},
                                                 {"--overflow", given.overflow != usual.overflow}};
  for (const auto& [flag, is_given] : others) {
    if (is_given) throw InputError(fmt::format("{} measures ways as they are by default; leave {}", command, flag));
  }
}

void check_drawn_layer(const LayerArguments& given, const std::string& command) {
  const LayerArguments usual;
  const std::pair<const char*, bool> others[] = {{"--layer", !given.layer.empty()},
                                                 {"--hidden-states", given.hidden_states != usual.hidden_states},
                                                 {"--save-inputs", !given.save_inputs.empty()},
                                                 {"--clamp", !given.clamp.empty()},
                                                 {"--shared-mxfp4", given.shared_mxfp4},
                                                 {"--experts-engine", !given.experts_engine.empty()},
                                                 {"--processes", given.processes},
                                                 {"--workers", given.workers != usual.workers},
                                                 {"--cap", given.cap.has_value()},
                                                 {"--cpu-sync", given.cpu_sync},
                                                 {"--gather", given.gather != usual.gather},
                                                 {"--ring", given.ring != usual.ring},
                                                 {"--block-rows", given.block_rows != usual.block_rows},
                                                 {"--tensor-parallel", given.tensor_parallel},
                                                 {"--expert-slices", given.expert_slices}};
  for (const auto& [flag, is_given] : others) {
    if (is_given)
      throw InputError(fmt::format("{} --engine cuda measures a drawn layer as heddle bench mega does; leave {}", command, flag));
  }
  const std::string weights = drawn_weights(given, command);
  const std::string_view activation = word_of(activations, weights == "bf16" ? Activation::bf16 : Activation::fp8);
  if (given.activation.empty() || given.activation == activation) return;
  throw InputError(fmt::format(
      "--activation {}: on GPUs {} weights are measured with {} activations; leave --activation, or take other --weights",
      given.activation, weights, activation));
}

}  // namespace heddle::tool
