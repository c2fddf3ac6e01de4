#include "gpu_job.hpp"

#include <fmt/format.h>

#include "heddle/error.hpp"

#ifdef HEDDLE_CUDA
#include "cuda_job.hpp"
#endif

namespace heddle::tool {

namespace {

#ifdef HEDDLE_CUDA
int present() { return gpus_present(); }
#else
int present() { refuse_without_cuda("--engine cuda", ", or take --engine host"); }
#endif

}  // namespace

void refuse_without_cuda(const std::string& asked, const std::string& instead) {
  throw InputError(asked + ": this build has no CUDA part; build with the preset cuda (HEDDLE_CUDA=ON)" + instead);
}

int gpus_of(const LayerArguments& a, int ranks) {
  if (a.engine == "host") {
    if (a.gpus) throw InputError(fmt::format("--gpus {} goes with --engine cuda; the host engine uses none", *a.gpus));
    return 0;
  }
  if (a.engine != "cuda") throw InputError(fmt::format("--engine takes host or cuda, not '{}'", a.engine));
  const int there = present();
  if (there == 0) throw InputError("--engine cuda: no GPU is here; take --engine host");
  const int gpus = a.gpus.value_or(std::min(there, ranks));
  if (gpus < 1 || gpus > there) throw InputError(fmt::format("--gpus {}: 1 to {} are possible here", gpus, there));
  if (gpus > ranks) throw InputError(fmt::format("--gpus {} with --ranks {}: every GPU needs a rank", gpus, ranks));
  return gpus;
}

bool host_experts_of(const LayerArguments& a) {
  const std::string& typed = a.experts_engine;
  if (!typed.empty() && typed != "host" && typed != "cuda")
    throw InputError(fmt::format("--experts-engine takes host or cuda, not '{}'", typed));
  if (typed == "cuda" && a.engine == "host") throw InputError("--experts-engine cuda goes with --engine cuda");
  return a.engine == "host" || typed == "host";
}

#ifndef HEDDLE_CUDA
std::string run_on_gpus(const Job&) { refuse_without_cuda("--engine cuda", ", or take --engine host"); }
#endif

}  // namespace heddle::tool
