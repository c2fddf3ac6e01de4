// The judges of findings.hpp, one a part of the machine. Each adds at least one finding where its part is there.
#pragma once

#include <vector>

#include "doctor/findings.hpp"

namespace heddle::doctor {

using Findings = std::vector<Finding>;

void judge_host(const MachineFacts& facts, Findings& out);         ///< cpu, memory, shm, limits
void judge_driver(const MachineFacts& facts, Findings& out);       ///< driver, build
void judge_gpu(const GpuFacts& gpu, Findings& out);                ///< gpu N
void judge_links(const MachineFacts& facts, Findings& out);        ///< links
void judge_environment(const MachineFacts& facts, Findings& out);  ///< nccl, mps, environment

}  // namespace heddle::doctor
