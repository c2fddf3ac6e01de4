// What a job's outputs are held against: the float64 reference of the same inputs, and how far they may lie from it.
#pragma once

#include <vector>

#include "inputs.hpp"
#include "reference/reference.hpp"

namespace heddle::tool {

/// Do results wait in slots, one a choice, and are summed at home? Ways of one kind have equal bits.
bool is_slots(const LayerOptions& options);

/// Bounds of docs/numerics.md, "What must agree". What the page pools has a wider one here, where there is one batch only: in a
/// few tokens a group that takes another scale weighs much, of a row on its way back or, since tensor cores keep about 14 bits of
/// an fp8 sum, of activations on a GPU.
double bound_of(const Inputs& inputs, LayerOptions options);

/// The outputs [T, H] of the reference, rounded as this way and exchange round.
std::vector<bf16> reference_of(const Inputs& inputs, const LayerOptions& options, const ExchangeOptions& exchange);

}  // namespace heddle::tool
