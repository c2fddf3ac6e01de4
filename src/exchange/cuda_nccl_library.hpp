// libnccl.so.2, looked for at run time. There is nothing here where nccl.h was not found when Heddle was configured.
#pragma once

#ifdef HEDDLE_NCCL

#include <nccl.h>

#include <chrono>
#include <functional>

namespace heddle::nccl {

constexpr bool windows_known = NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0);
constexpr bool waits_known = NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 0);

/// Its functions. Those that older ones lack may be null.
struct Library {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetUniqueId) unique_id = nullptr;
  decltype(&ncclCommInitAll) init_all = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 7, 0)
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 0)
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  decltype(&ncclMemAlloc) allocate = nullptr;
  decltype(&ncclMemFree) free = nullptr;
  decltype(&ncclCommWindowRegister) register_window = nullptr;
  decltype(&ncclCommWindowDeregister) deregister_window = nullptr;
#endif
};

/// Loaded at the first use and kept: NCCL does not like to be unloaded. Throws InputError where it is not there.
const Library& library();

/// Throws Error for all but success and calls that are still being made.
void check(ncclResult_t status, const char* what);

/// Whether NCCL has begun all that was asked of a communicator, as its calls say it. Throws Error for what it noticed.
bool is_done(ncclComm_t communicator, const char* what);
/// Looks until `done` says so. Throws Error if that takes longer than `longest`; `what` is told in it.
void wait_until(const std::function<bool()>& done, std::chrono::nanoseconds longest, const char* what);

}  // namespace heddle::nccl

#endif
