#include "exchange/cuda_nccl_library.hpp"

#ifdef HEDDLE_NCCL

#include <dlfcn.h>
#include <fmt/format.h>

#include <thread>

#include "heddle/error.hpp"

namespace heddle::nccl {

namespace {

template <class Function>
void find(void* library, Function& function, const char* name, bool needed = true) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && needed) throw InputError(fmt::format("libnccl.so.2 has no {}; is it NCCL 2.4 or newer?", name));
}

Library load() {
  void* file = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    throw InputError(
        fmt::format("NCCL is not here: {}; install libnccl.so.2 or name its folder in LD_LIBRARY_PATH, or leave gather to "
                    "its own kernels",
                    dlerror()));
  }
  Library library;
  find(file, library.get_version, "ncclGetVersion");
  find(file, library.error_string, "ncclGetErrorString");
  find(file, library.unique_id, "ncclGetUniqueId");
  find(file, library.init_all, "ncclCommInitAll");
  find(file, library.destroy, "ncclCommDestroy");
  find(file, library.abort, "ncclCommAbort");
  find(file, library.async_error, "ncclCommGetAsyncError");
  find(file, library.group_start, "ncclGroupStart");
  find(file, library.group_end, "ncclGroupEnd");
  find(file, library.all_gather, "ncclAllGather");
  find(file, library.reduce_scatter, "ncclReduceScatter");
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 7, 0)
  find(file, library.send, "ncclSend", false);
  find(file, library.receive, "ncclRecv", false);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 0)
  find(file, library.init_rank, "ncclCommInitRankConfig", false);
  find(file, library.finalize, "ncclCommFinalize", false);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  find(file, library.allocate, "ncclMemAlloc", false);
  find(file, library.free, "ncclMemFree", false);
  find(file, library.register_window, "ncclCommWindowRegister", false);
  find(file, library.deregister_window, "ncclCommWindowDeregister", false);
#endif
  return library;
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void check(ncclResult_t status, const char* what) {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(ErrorKind::fault, fmt::format("NCCL, {}: {}", what, library().error_string(status)));
}

bool is_done(ncclComm_t communicator, const char* what) {
  ncclResult_t state = ncclSuccess;
  check(library().async_error(communicator, &state), what);
  check(state, what);
  return state != ncclInProgress;
}

void wait_until(const std::function<bool()>& done, std::chrono::nanoseconds longest, const char* what) {
  // A call is made within some microseconds, communicators within seconds.
  constexpr int busy_looks = 2000;
  const auto since = std::chrono::steady_clock::now();
  for (int looks = 0; !done(); ++looks) {
    if (std::chrono::steady_clock::now() - since > longest) {
      throw Error(ErrorKind::fault, fmt::format("NCCL, {}: not done after {:.1f} s; is a rank missing?", what,
                                                std::chrono::duration<double>(longest).count()));
    }
    if (looks < busy_looks) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

}  // namespace heddle::nccl

#endif
