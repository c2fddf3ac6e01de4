// What vLLM returns of a request's experts, as JSON: `--enable-return-routed-experts`, docs/replay.md has versions and fields.
#pragma once

#include <span>
#include <string>

#include "routing/npy.hpp"

namespace heddle {

/// Responses of /v1/completions or /v1/chat/completions: one object, a list of them, or one a line. Ids come as [tokens, layers,
/// topk] of type i4, in the order of the file: of each response the prompt's, then those of each choice. Throws InputError that
/// names the file and what is missing or damaged.
NpyArray parse_vllm_output(std::span<const char> text, const std::string& path);

}  // namespace heddle
