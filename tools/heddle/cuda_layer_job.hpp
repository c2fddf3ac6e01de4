// A job's ranks of one process whose layers are wholly on GPUs: one thread drives them all.
#pragma once

#include "heddle/device.hpp"
#include "job_ranks.hpp"

namespace heddle::tool {

/// Loads the layers, calls them once and leaves outcomes and outputs of the workspace's own ranks. Collective over `everybody`: its
/// processes, or one member a virtual node of one GPU. Throws what keeps a rank of this process from its outputs.
void run_device_layers(const Job& job, DeviceWorkspace& workspace, const ExchangeMemory& memory, Group& everybody);

}  // namespace heddle::tool
