// What commands that measure take for given, and refuse by name instead of leaving it out in silence.
#pragma once

#include <string>

#include "inputs.hpp"

namespace heddle::tool {

/// Where ways are measured as they are by default. Throws InputError for a flag that asks for something else.
void check_usual_ways(const LayerArguments& given, const std::string& command);
/// Where a layer is drawn on GPUs as `heddle bench mega` does. Throws InputError for a flag that such a run does not follow.
void check_drawn_layer(const LayerArguments& given, const std::string& command);

}  // namespace heddle::tool
