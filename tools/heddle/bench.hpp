// heddle bench: subcommands for the parts of a layer, of which those on GPUs are only where the CUDA part is built.
#pragma once

namespace CLI {
class App;
}

namespace heddle::tool {

void add_bench(CLI::App& app, int& status);
/// heddle bench all.
void add_bench_all(CLI::App& bench);
/// Subcommands of bench, in a build with CUDA. `status` becomes 1 where results are wrong.
void add_bench_exchange(CLI::App& bench);
void add_bench_activation(CLI::App& bench);
void add_bench_experts(CLI::App& bench, int& status);
void add_bench_mega(CLI::App& bench, int& status);

}  // namespace heddle::tool
