#include "reference/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "heddle/error.hpp"

namespace heddle::reference {

namespace {
void check_length(std::size_t length, int rows, int cols, const std::string& what) {
  const std::size_t wanted = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  if (length != wanted) {
    throw InputError(fmt::format("reference: {} has {} values; [{}, {}] wants {}", what, length, rows, cols, wanted));
  }
}

void check_multiple_of_64(int size, const std::string& what) {
  if (size <= 0 || size % 64 != 0) {
    throw InputError(fmt::format("reference: {} is {}; it must be a positive multiple of 64", what, size));
  }
}

void check_ids(const ReferenceInput& input) {
  const auto topk = static_cast<std::size_t>(input.topk);
  for (std::size_t pair = 0; pair < input.ids.size(); ++pair) {
    const std::int32_t id = input.ids[pair];
    const std::size_t choice = pair % topk;
    if (id < -1 || id >= input.experts) {
      throw InputError(fmt::format("reference: token {} choice {} has expert id {}; it must be in [-1, {})", pair / topk, choice,
                                   id, input.experts));
    }
    const auto earlier = input.ids.subspan(pair - choice, choice);
    if (id >= 0 && std::find(earlier.begin(), earlier.end(), id) != earlier.end()) {
      throw InputError(
          fmt::format("reference: token {} chooses expert {} twice, the second time as choice {}", pair / topk, id, choice));
    }
  }
}

void check_shared(const SharedExpert& shared, int hidden) {
  check_multiple_of_64(shared.intermediate, "the shared expert's intermediate size");
  if (!shared.gate.empty()) {
    check_length(shared.gate.size(), 1, hidden, "the shared expert's gate");
  }
}

void check_options(const ReferenceOptions& options) {
  if (options.quantisation.group != 128 && options.quantisation.group != 32) {
    throw InputError(fmt::format("reference: quantisation group {} is not supported; use 128 or 32", options.quantisation.group));
  }
  if (!(options.wire_global_scale > 0.0f) || !std::isfinite(options.wire_global_scale)) {
    throw InputError(fmt::format("reference: the nvfp4 global scale is {}; it must be above zero", options.wire_global_scale));
  }
  if (options.clamp && !(*options.clamp >= 0.0f)) {
    throw InputError(fmt::format("reference: the clamp is {}; it must not be negative", *options.clamp));
  }
}
}  // namespace

void check_input(const ReferenceInput& input, const ReferenceOptions& options) {
  check_options(options);
  check_multiple_of_64(input.hidden, "the hidden size");
  check_multiple_of_64(input.intermediate, "the intermediate size");
  if (input.tokens < 0 || input.topk < 0 || input.experts < 0) {
    throw InputError(
        fmt::format("reference: {} tokens, {} choices, {} experts; none may be negative", input.tokens, input.topk, input.experts));
  }
  check_length(input.hidden_states.size(), input.tokens, input.hidden, "hidden_states");
  check_length(input.ids.size(), input.tokens, input.topk, "ids");
  check_length(input.weights.size(), input.tokens, input.topk, "weights");
  check_ids(input);
  if (options.sum == Sum::two_stage) {
    check_length(input.rank_of.size(), 1, input.experts, "rank_of");
    const auto negative = std::find_if(input.rank_of.begin(), input.rank_of.end(), [](int rank) { return rank < 0; });
    if (negative != input.rank_of.end()) {
      throw InputError(
          fmt::format("reference: expert {} is on rank {}; ranks count from 0", negative - input.rank_of.begin(), *negative));
    }
  }
  if (input.shared != nullptr) {
    check_shared(*input.shared, input.hidden);
  }
}

}  // namespace heddle::reference
