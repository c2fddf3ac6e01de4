// From the results of a token's pairs to its output (docs/numerics.md, "The token's output").
#pragma once

#include <cstddef>
#include <span>

#include "heddle/formats.hpp"
#include "reference/reference.hpp"

namespace heddle::reference {

/// One token: its choices, and its row of every result.
struct TokenResults {
  std::span<const std::int32_t> ids;  ///< [k]
  std::span<const float> weights;     ///< [k]
  std::span<const bf16> pairs;        ///< [k, H]; rows of choices -1 are not read
  std::span<const bf16> hidden;       ///< [H]
  std::span<const bf16> shared;       ///< [H], empty without a shared expert
};

/// Sums a token's results as options.sum says, adds the shared expert's and rounds once to out, [H].
void token_output(const TokenResults& token, const ReferenceInput& input, const ReferenceOptions& options, std::span<bf16> out);

}  // namespace heddle::reference
