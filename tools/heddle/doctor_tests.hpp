// What heddle doctor tries out: heap, words and a small layer on the host engine, and the layer on each GPU and across them.
#pragma once

#include <vector>

#include "doctor/facts.hpp"

namespace heddle::tool {

/// Takes about a second. Nothing that goes wrong throws; it is in the results.
std::vector<doctor::TestFacts> test_host();

/// The layer by low_latency and mega, on every GPU by itself at the same time, then on all of them, and where that fails on every
/// pair. Each test is a process of its own with a deadline, so that a GPU that hangs holds up nothing. To be called before this
/// process uses CUDA. Empty where this build has no CUDA part or there is no GPU.
std::vector<doctor::TestFacts> test_gpus();

}  // namespace heddle::tool
