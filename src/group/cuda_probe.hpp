// Proves a new heap by traffic: peers of other processes cannot be asked whether they are linked, and a mapping that was
// granted may still not carry native atomics.
#pragma once

#include "group/cuda_map.hpp"
#include "heddle/group.hpp"

namespace heddle::cuda {

/// Collective, before the heap is used; leaves its first words dirty. Every GPU writes a word into every part, all GPUs
/// add to one word of every part at once, and every GPU reads all of them back. Throws InputError, on all processes
/// alike, naming the pair of GPUs between which something was lost.
void probe_heap(Group& processes, const DeviceMap& map, const HeapView& heap);

}  // namespace heddle::cuda
