// What the fused layer takes of an exchange's options, and the layout that follows from them.
#pragma once

#include "heddle/exchange.hpp"
#include "mega/layout.hpp"

namespace heddle {

/// Throws InputError, with the reason, for what the fused layer does not do. Part of check_options.
void check_mega(const ExchangeOptions& options);

/// The layout for `workers` that run tasks at once. Wherever the buffer's size is wanted, it is this one's.
MegaLayout make_mega_layout(const ExchangeOptions& options, int workers, const Areas& areas);

/// Where its experts live: behind those of the options' placement, with MegaOptions::extra_expert, one of each rank.
Placement mega_placement(const ExchangeOptions& options);

/// What a rank's part of the heap needs for it; without room for outputs.
ExchangeMemory memory_of(const MegaLayout& layout);

}  // namespace heddle
