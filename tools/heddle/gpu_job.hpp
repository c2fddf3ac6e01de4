// --engine cuda: the layer on GPUs, or with --experts-engine host its rows alone. A build without CUDA has the refusals only.
#pragma once

#include <string>

#include "job_ranks.hpp"

namespace heddle::tool {

/// Throws InputError: `asked` needs the CUDA part, which this build lacks. `instead`: what else would do.
[[noreturn]] void refuse_without_cuda(const std::string& asked, const std::string& instead = "");

/// The GPUs that `--engine` and `--gpus` mean for so many ranks; 0 with the host engine. Throws InputError that says what would be
/// right where there are none, fewer, or no CUDA in this build. Leaves CUDA untouched in this process, which may fork afterwards.
int gpus_of(const LayerArguments& arguments, int ranks);

/// Do the experts stay on the host engine? Throws InputError for words that do not fit together.
bool host_experts_of(const LayerArguments& arguments);

/// Runs all ranks of the job on job.inputs.gpus GPUs, in this process or in one for each GPU. Outcomes are the ranks'; returns what
/// should be said of killed processes.
std::string run_on_gpus(const Job& job);

}  // namespace heddle::tool
