// heddle bench: only where the CUDA part is built.
#pragma once

#include <CLI/CLI.hpp>

namespace heddle::tool {

void add_bench(CLI::App& app, int& status);
/// A subcommand of bench.
void add_bench_activation(CLI::App& bench);

}  // namespace heddle::tool
