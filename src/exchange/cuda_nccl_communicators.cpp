#include "exchange/cuda_nccl_communicators.hpp"

#ifdef HEDDLE_NCCL

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "group/cuda_driver.hpp"

namespace heddle::nccl {

namespace {

constexpr std::size_t largest_first_call = std::size_t{1} << 22;  ///< bytes

/// A stream a device.
class Streams {
 public:
  explicit Streams(const std::vector<int>& devices) : devices_(devices) {
    for (const int device : devices) {
      const cuda::DeviceScope scope(device);
      of_device.emplace_back();
      cuda::check(cudaStreamCreateWithFlags(&of_device.back(), cudaStreamNonBlocking), "stream");
    }
  }
  ~Streams() {
    for (std::size_t i = 0; i < of_device.size(); ++i) {
      const cuda::DeviceScope scope(devices_[i]);
      if (of_device[i] != nullptr) cudaStreamDestroy(of_device[i]);
    }
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  std::vector<cudaStream_t> of_device;

 private:
  std::vector<int> devices_;
};

}  // namespace

Communicators::Communicators(const cuda::DeviceMap& ranks, int version_of_nccl, std::chrono::nanoseconds longest)
    : longest_(longest) {
  map = ranks;
  version = version_of_nccl;
}

Communicators::~Communicators() {
  if (!blocks() && !(in_use_ && finalize())) Communicators::abort();
  for (ncclComm_t communicator : *communicators_) library().destroy(communicator);
}

std::vector<int> Communicators::devices() const {
  std::vector<int> all;
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) all.push_back(map.own(gpu).device);
  return all;
}

void Communicators::init_all() {
  const std::vector<int> gpus = devices();
  std::vector<ncclComm_t> made_here(gpus.size());
  check(library().init_all(made_here.data(), static_cast<int>(gpus.size()), gpus.data()), "creation of communicators");
  *communicators_ = made_here;
}

void Communicators::init_ranks([[maybe_unused]] const std::string& id) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 0)
  ncclUniqueId unique{};
  std::memcpy(unique.internal, id.data(), std::min(id.size(), sizeof unique.internal));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  communicators_->resize(map.gpus, nullptr);
  group("creation of communicators", [&] {
    for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
      const cuda::DeviceScope scope(map.own(gpu).device);
      check(library().init_rank(&(*communicators_)[gpu], map.ranks(), unique, map.own(gpu).first_rank, &config),
            "creation of communicators");
    }
  });
#endif
}

bool Communicators::finalize() noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 0)
  try {
    for (ncclComm_t communicator : *communicators_) check(library().finalize(communicator), "end of communicators");
    wait(0, map.gpus, "end of communicators");
    return true;
  } catch (const std::exception&) {
  }
#endif
  return false;
}

void Communicators::group(const char* what, const std::function<void()>& calls) {
  begin_group(what, calls);
  if (!blocks()) wait(0, map.gpus, what);
}

void Communicators::begin_group(const char* what, const std::function<void()>& calls) {
  check(library().group_start(), "begin of a group");
  try {
    calls();
  } catch (...) {
    library().group_end();
    throw;
  }
  check(library().group_end(), what);
}

void Communicators::wait(std::size_t first, std::size_t gpus, const char* what) {
  try {
    for (std::size_t gpu = first; gpu < first + gpus; ++gpu) {
      wait_until(
          [&] {
            const std::lock_guard lock(ending_);  // somebody else may abort meanwhile
            return is_done(of(gpu), what);
          },
          longest_, what);
    }
  } catch (...) {
    abort();  // a call that is under way for ever would hold up whoever frees its memory
    throw;
  }
}

/// Within a group this waits for nothing: the call is made at its end.
void Communicators::made(std::size_t gpu, const char* what) {
  if (!blocks()) wait(gpu, 1, what);
}

void Communicators::all_gather(std::size_t gpu, const void* from, void* to, std::size_t bytes, cudaStream_t stream) {
  check(library().all_gather(from, to, bytes, ncclInt8, of(gpu), stream), "all-gather");
  made(gpu, "all-gather");
}
void Communicators::reduce_scatter(std::size_t gpu, const bf16* from, bf16* to, std::size_t values, cudaStream_t stream) {
  check(library().reduce_scatter(from, to, values, ncclBfloat16, ncclSum, of(gpu), stream), "reduce-scatter");
  made(gpu, "reduce-scatter");
}

void Communicators::make_swaps(std::span<const DeviceSwap> swaps, cudaStream_t stream) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 7, 0)
  for (const DeviceSwap& swap : swaps) {
    std::size_t gpu = 0;
    while (gpu < map.gpus && map.own(gpu).first_rank != swap.rank) ++gpu;
    if (gpu == map.gpus || swap.peer < 0 || swap.peer >= map.ranks())
      throw InputError(
          fmt::format("NCCL's communicators cannot swap between rank {} of this process and rank {}: they have {} ranks", swap.rank,
                      swap.peer, map.ranks()));
    check(library().send(swap.from, swap.bytes, ncclInt8, swap.peer, of(gpu), stream), "send");
    check(library().receive(swap.to, swap.bytes, ncclInt8, swap.peer, of(gpu), stream), "receive");
  }
#endif
}

void Communicators::swap(std::span<const DeviceSwap> swaps, cudaStream_t stream) {
  constexpr const char* what = "sends and receives";
  if (blocks()) {
    return group(what, [&] {  // the lock not until the end, which may never come and whoever aborts must not wait for
      const std::lock_guard lock(ending_);
      make_swaps(swaps, stream);
    });
  }
  {
    const std::lock_guard lock(ending_);  // somebody else may abort meanwhile
    begin_group(what, [&] { make_swaps(swaps, stream); });
  }
  wait(0, map.gpus, what);
}

void Communicators::connect_pairs() {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 7, 0)
  const bool possible = library().send != nullptr && library().receive != nullptr;
#else
  const bool possible = false;
#endif
  if (!possible)
    throw InputError(fmt::format("NCCL {} has no sends and receives; 2.7 or newer is needed, also when Heddle is built", version));
  constexpr std::size_t bytes = 16;
  const auto all = allocate(2 * bytes * static_cast<std::size_t>(map.ranks()), false);
  const Streams streams(devices());
  try {
    grouped([&] {
      for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
        const cuda::DeviceScope scope(map.own(gpu).device);
        std::vector<DeviceSwap> swaps;
        for (int peer = 0; peer < map.ranks(); ++peer) {
          auto* from = static_cast<std::byte*>((*all)[gpu]) + 2 * bytes * static_cast<std::size_t>(peer);
          if (peer != map.own(gpu).first_rank) swaps.push_back({map.own(gpu).first_rank, peer, from, from + bytes, bytes});
        }
        make_swaps(swaps, streams.of_device[gpu]);
      }
    });
    await(streams.of_device);
  } catch (...) {
    if (!blocks()) abort();  // as above
    throw;
  }
}

void Communicators::throw_if_failed() const {
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    ncclResult_t error = ncclSuccess;
    check(library().async_error(of(gpu), &error), "asking for errors");
    check(error, "noticed by a communicator");
  }
}
void Communicators::abort() {
  const std::lock_guard lock(ending_);
  for (ncclComm_t communicator : *communicators_) {
    if (communicator != nullptr) library().abort(communicator);
  }
  communicators_->clear();
}

ncclComm_t Communicators::of(std::size_t gpu) const {
  if (communicators_->empty()) throw Error(ErrorKind::fault, "NCCL's communicators were aborted; make new ones");
  return (*communicators_)[gpu];
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
namespace {

/// A window over memory of every GPU, and the memory.
class Window {
 public:
  Window(const std::shared_ptr<std::vector<ncclComm_t>>& communicators, const std::vector<int>& devices, std::size_t bytes,
         const std::function<void(const std::function<void()>&)>& grouped)
      : addresses(devices.size()), communicators_(communicators), windows_(devices.size()) {
    try {
      for (std::size_t gpu = 0; gpu < devices.size(); ++gpu) {
        const cuda::DeviceScope scope(devices[gpu]);
        check(library().allocate(&addresses[gpu], bytes), "memory");
      }
      grouped([&] {
        for (std::size_t gpu = 0; gpu < devices.size(); ++gpu) {
          const cuda::DeviceScope scope(devices[gpu]);
          check(library().register_window((*communicators_)[gpu], addresses[gpu], bytes, &windows_[gpu], NCCL_WIN_COLL_SYMMETRIC),
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
    for (std::size_t gpu = 0; gpu < windows_.size(); ++gpu) library().deregister_window((*communicators_)[gpu], windows_[gpu]);
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

}  // namespace
#endif

std::shared_ptr<std::vector<void*>> Communicators::allocate(std::size_t bytes, bool symmetric) {
  bytes = std::max<std::size_t>(bytes, 16);
  if (!symmetric) {
    const std::shared_ptr<std::vector<void*>> plain(new std::vector<void*>, [](std::vector<void*>* old) {
      for (void* address : *old) cudaFree(address);
      delete old;
    });
    for (const int device : devices()) {
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
    const auto window = std::make_shared<Window>(communicators_, devices(), bytes, [this](const auto& inside) { grouped(inside); });
    return {window, &window->addresses};
  }
#endif
  throw InputError(fmt::format("NCCL {} has no symmetric windows; 2.27 or newer is needed{}", version,
                               windows_known ? "" : ", also when Heddle is built"));
}

void Communicators::make_first_calls() {
  const auto all = allocate(largest_first_call * static_cast<std::size_t>(map.ranks()), false);
  const auto own = allocate(largest_first_call, false);
  const Streams streams(devices());
  try {
    call_everybody(*own, *all, streams.of_device);
    await(streams.of_device);
  } catch (...) {
    if (!blocks()) abort();  // or freeing memory would wait for kernels that wait for other processes
    throw;
  }
  in_use_ = true;
}

void Communicators::call_everybody(const std::vector<void*>& own, const std::vector<void*>& all,
                                   const std::vector<cudaStream_t>& streams) {
  const auto on_every_gpu = [&](const std::function<void(std::size_t)>& call) {
    grouped([&] {
      for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
        const cuda::DeviceScope scope(map.own(gpu).device);
        call(gpu);
      }
    });
  };
  for (const std::size_t bytes : {std::size_t{16}, largest_first_call}) {  // by NCCL's short protocols and by its long one
    on_every_gpu([&](std::size_t gpu) { all_gather(gpu, own[gpu], all[gpu], bytes, streams[gpu]); });
    on_every_gpu([&](std::size_t gpu) {
      reduce_scatter(gpu, static_cast<bf16*>(all[gpu]), static_cast<bf16*>(own[gpu]), bytes / sizeof(bf16), streams[gpu]);
    });
  }
}

void Communicators::await(const std::vector<cudaStream_t>& streams) const {
  constexpr const char* what = "first collectives";
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    const cuda::DeviceScope scope(map.own(gpu).device);
    if (!blocks()) wait_until([&] { return cudaStreamQuery(streams[gpu]) != cudaErrorNotReady; }, longest_, what);
    cuda::check(cudaStreamSynchronize(streams[gpu]), what);
  }
}

}  // namespace heddle::nccl

#endif
