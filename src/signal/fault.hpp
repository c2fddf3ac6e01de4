// From the fault record in the heap to the error a person reads.
#pragma once

#include "heddle/error.hpp"
#include "heddle/group.hpp"
#include "signal/words.hpp"

namespace heddle {

Fault describe(const FaultRecord& record);

/// Writes this rank's fault record, then the abort word of every rank (the first fault stays), and
/// wakes all. `record.rank` is the rank that gives up.
void raise_abort(const HeapView& heap, const FaultRecord& record);

/// Throws the FaultError that this rank's abort word points to, if it is set.
void throw_if_aborted(const HeapView& heap);

}  // namespace heddle
