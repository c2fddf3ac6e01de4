// The small kernels that a workspace runs by itself: the test of a new heap, and giving up in a rank's name. Each is one
// warp and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "signal/device_team.hpp"

namespace heddle::cuda {

/// Loads all of them on the current device: later a kernel that spins could be in the way.
cudaError_t load_small_kernels();

/// A release store of `value` at system scope.
cudaError_t launch_write(Word* word, Word value, cudaStream_t stream);
/// `adds_a_launch` atomic adds of `value` at system scope.
constexpr int adds_a_launch = 32 * 64;
cudaError_t launch_add(Word* word, Word value, cudaStream_t stream);
/// Acquire loads at system scope of `count` words into `to`, ordinary memory of this device.
cudaError_t launch_read(const Word* from, int count, Word* to, cudaStream_t stream);

/// Gives up as team.heap.rank, as DeviceWorker::fail does: the record, for the host as well, then every rank's abort word.
cudaError_t launch_give_up(const DeviceTeam& team, const FaultRecord& record, cudaStream_t stream);

}  // namespace heddle::cuda
