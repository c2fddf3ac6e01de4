// One run of `heddle bench exchange`: every configuration that was asked for, a line of a table and an entry of the JSON each.
#pragma once

#include "bench_arguments.hpp"

namespace heddle::tool {

/// Throws InputError for what cannot be asked for, FaultError or Error if something went wrong on the GPUs; what had been measured
/// until then is written. A configuration that does not fit the memory is reported in its place.
void bench_exchange(const BenchArguments& arguments);

}  // namespace heddle::tool
