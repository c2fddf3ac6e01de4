#include "exchange/cuda_nccl.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "group/cuda_driver.hpp"

#ifdef HEDDLE_NCCL
#include <dlfcn.h>
#include <nccl.h>
#endif

namespace heddle {

namespace {

#ifdef HEDDLE_NCCL

constexpr bool windows_known = NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0);

/// The functions of libnccl.so.2. Those that older ones lack may be null.
struct Library {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclCommInitAll) init_all = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  decltype(&ncclMemAlloc) allocate = nullptr;
  decltype(&ncclMemFree) free = nullptr;
  decltype(&ncclCommWindowRegister) register_window = nullptr;
  decltype(&ncclCommWindowDeregister) deregister_window = nullptr;
#endif
};

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
  find(file, library.init_all, "ncclCommInitAll");
  find(file, library.destroy, "ncclCommDestroy");
  find(file, library.abort, "ncclCommAbort");
  find(file, library.async_error, "ncclCommGetAsyncError");
  find(file, library.group_start, "ncclGroupStart");
  find(file, library.group_end, "ncclGroupEnd");
  find(file, library.all_gather, "ncclAllGather");
  find(file, library.reduce_scatter, "ncclReduceScatter");
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  find(file, library.allocate, "ncclMemAlloc", false);
  find(file, library.free, "ncclMemFree", false);
  find(file, library.register_window, "ncclCommWindowRegister", false);
  find(file, library.deregister_window, "ncclCommWindowDeregister", false);
#endif
  return library;
}

/// Loaded at the first use and kept: NCCL does not like to be unloaded.
const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void check(ncclResult_t status, const char* what) {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(ErrorKind::fault, fmt::format("NCCL, {}: {}", what, library().error_string(status)));
}

class Communicators final : public NcclCommunicators::Impl {
 public:
  explicit Communicators(const std::vector<int>& gpus) {
    devices = gpus;
    check(library().get_version(&version), "version");
    std::vector<ncclComm_t> made(gpus.size());
    check(library().init_all(made.data(), static_cast<int>(gpus.size()), gpus.data()), "creation of communicators");
    *communicators_ = made;
    warm_up();
  }
  ~Communicators() override {
    for (ncclComm_t communicator : *communicators_) library().destroy(communicator);
  }

  void grouped(const std::function<void()>& calls) override {
    check(library().group_start(), "begin of a group");
    try {
      calls();
    } catch (...) {
      library().group_end();
      throw;
    }
    check(library().group_end(), "end of a group");
  }
  void all_gather(std::size_t rank, const void* from, void* to, std::size_t bytes, cudaStream_t stream) override {
    check(library().all_gather(from, to, bytes, ncclInt8, of(rank), stream), "all-gather");
  }
  void reduce_scatter(std::size_t rank, const bf16* from, bf16* to, std::size_t values, cudaStream_t stream) override {
    check(library().reduce_scatter(from, to, values, ncclBfloat16, ncclSum, of(rank), stream), "reduce-scatter");
  }

  void throw_if_failed() const override {
    for (std::size_t rank = 0; rank < devices.size(); ++rank) {
      ncclResult_t error = ncclSuccess;
      check(library().async_error(of(rank), &error), "asking for errors");
      check(error, "noticed by a communicator");
    }
  }
  void abort() override {
    for (ncclComm_t communicator : *communicators_) library().abort(communicator);
    communicators_->clear();
  }

  std::shared_ptr<std::vector<void*>> allocate(std::size_t bytes, bool symmetric) override;

 private:
  ncclComm_t of(std::size_t rank) const {
    if (communicators_->empty()) throw Error(ErrorKind::fault, "NCCL's communicators were aborted; make new ones");
    return (*communicators_)[rank];
  }

  /// NCCL connects ranks at their first collective, and then its calls on the host wait for each other. Here one group makes them
  /// for all GPUs, so that later calls of one GPU need not be grouped with those of the others.
  void warm_up();

  /// Empty after an abort. Windows hold it, too.
  std::shared_ptr<std::vector<ncclComm_t>> communicators_ = std::make_shared<std::vector<ncclComm_t>>();
};

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
/// A window over memory of every GPU, and the memory.
class Window {
 public:
  Window(const std::shared_ptr<std::vector<ncclComm_t>>& communicators, const std::vector<int>& devices, std::size_t bytes,
         const std::function<void(const std::function<void()>&)>& grouped)
      : addresses(devices.size()), communicators_(communicators), windows_(devices.size()) {
    try {
      for (std::size_t rank = 0; rank < devices.size(); ++rank) {
        const cuda::DeviceScope scope(devices[rank]);
        check(library().allocate(&addresses[rank], bytes), "memory");
      }
      grouped([&] {
        for (std::size_t rank = 0; rank < devices.size(); ++rank) {
          const cuda::DeviceScope scope(devices[rank]);
          check(
              library().register_window((*communicators_)[rank], addresses[rank], bytes, &windows_[rank], NCCL_WIN_COLL_SYMMETRIC),
              "window");
        }
      });
    } catch (...) {
      free();
      throw;
    }
  }
  ~Window() {
    if (communicators_->empty()) return;  // aborted: what NCCL knew of the windows is gone, the memory is left to the process's end
    for (std::size_t rank = 0; rank < windows_.size(); ++rank) library().deregister_window((*communicators_)[rank], windows_[rank]);
    free();
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::vector<void*> addresses;

 private:
  void free() {
    for (void* address : addresses) {
      if (address != nullptr) library().free(address);
    }
  }
  std::shared_ptr<std::vector<ncclComm_t>> communicators_;
  std::vector<ncclWindow_t> windows_;
};
#endif

std::shared_ptr<std::vector<void*>> Communicators::allocate(std::size_t bytes, bool symmetric) {
  bytes = std::max<std::size_t>(bytes, 16);
  if (!symmetric) {
    const std::shared_ptr<std::vector<void*>> plain(new std::vector<void*>, [](std::vector<void*>* old) {
      for (void* address : *old) cudaFree(address);
      delete old;
    });
    for (const int device : devices) {
      const cuda::DeviceScope scope(device);
      void* address = nullptr;
      cuda::check(cudaMalloc(&address, bytes), "memory for NCCL");
      plain->push_back(address);
    }
    return plain;
  }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  const Library& calls = library();
  if (calls.allocate != nullptr && calls.free != nullptr && calls.register_window != nullptr &&
      calls.deregister_window != nullptr) {
    bytes = (bytes + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT * NCCL_WIN_REQUIRED_ALIGNMENT;
    const auto window = std::make_shared<Window>(communicators_, devices, bytes, [this](const auto& inside) { grouped(inside); });
    return {window, &window->addresses};
  }
#endif
  throw InputError(fmt::format("NCCL {} has no symmetric windows; 2.27 or newer is needed{}", version,
                               windows_known ? "" : ", also when Heddle is built"));
}

void Communicators::warm_up() {
  constexpr std::size_t largest = std::size_t{1} << 22;
  const auto all = allocate(largest * devices.size(), false);
  const auto own = allocate(largest, false);
  std::vector<cudaStream_t> streams;
  for (const int device : devices) {
    const cuda::DeviceScope scope(device);
    streams.emplace_back();
    cuda::check(cudaStreamCreateWithFlags(&streams.back(), cudaStreamNonBlocking), "stream");
  }
  const auto on_every_rank = [&](const std::function<void(std::size_t)>& call) {
    grouped([&] {
      for (std::size_t rank = 0; rank < devices.size(); ++rank) {
        const cuda::DeviceScope scope(devices[rank]);
        call(rank);
      }
    });
  };
  for (const std::size_t bytes : {std::size_t{16}, largest}) {  // by NCCL's short protocols and by its long one
    on_every_rank([&](std::size_t rank) { all_gather(rank, (*own)[rank], (*all)[rank], bytes, streams[rank]); });
    on_every_rank([&](std::size_t rank) {
      reduce_scatter(rank, static_cast<bf16*>((*all)[rank]), static_cast<bf16*>((*own)[rank]), bytes / sizeof(bf16), streams[rank]);
    });
  }
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    const cuda::DeviceScope scope(devices[rank]);
    cuda::check(cudaStreamSynchronize(streams[rank]), "NCCL's first collectives");
    cudaStreamDestroy(streams[rank]);
  }
}

std::unique_ptr<NcclCommunicators::Impl> make(const std::vector<int>& devices) { return std::make_unique<Communicators>(devices); }

#else

std::unique_ptr<NcclCommunicators::Impl> make(const std::vector<int>&) {
  throw InputError("this build of Heddle has no NCCL: nccl.h was not found when it was configured; gather has kernels of its own");
}

#endif

}  // namespace

NcclCommunicators::NcclCommunicators(const std::vector<int>& devices) {
  if (devices.empty()) throw InputError("NCCL's communicators need at least one GPU");
  std::vector<int> sorted = devices;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    throw InputError(fmt::format("ranks share GPU {}; NCCL needs a GPU for each rank, gather's own kernels do not", *twice));
  }
  impl_ = make(devices);
}
NcclCommunicators::~NcclCommunicators() = default;

int NcclCommunicators::ranks() const { return static_cast<int>(impl_->devices.size()); }
int NcclCommunicators::version() const { return impl_->version; }
void NcclCommunicators::throw_if_failed() const { impl_->throw_if_failed(); }
void NcclCommunicators::abort() { impl_->abort(); }

}  // namespace heddle
