// Refuses what the rules do not allow before anything is computed.
#pragma once

#include "reference/reference.hpp"

namespace heddle::reference {

/// Throws InputError for sizes, ids, ranks or options outside docs/numerics.md. Weights are checked as they are fetched.
void check_input(const ReferenceInput& input, const ReferenceOptions& options);

}  // namespace heddle::reference
