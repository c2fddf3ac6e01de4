#include <fmt/format.h>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // what was reported is taken
  throw Error(ErrorKind::fault, fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

void check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  throw Error(ErrorKind::fault, fmt::format("{}: CUDA driver error {}", what, static_cast<int>(status)));
}

namespace {

template <class Function>
void find(Function& function, const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    throw InputError(
        fmt::format("the CUDA driver has no {}: {}; a driver of CUDA 12 or newer is needed", name, cudaGetErrorString(status)));
  }
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  Driver driver;
  find(driver.create, "cuMemCreate");
  find(driver.release, "cuMemRelease");
  find(driver.reserve, "cuMemAddressReserve");
  find(driver.free, "cuMemAddressFree");
  find(driver.map, "cuMemMap");
  find(driver.unmap, "cuMemUnmap");
  find(driver.set_access, "cuMemSetAccess");
  find(driver.granularity, "cuMemGetAllocationGranularity");
  find(driver.export_handle, "cuMemExportToShareableHandle");
  find(driver.import_handle, "cuMemImportFromShareableHandle");
  find(driver.encode_tiled, "cuTensorMapEncodeTiled");
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

DeviceScope::DeviceScope(int device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() { cudaSetDevice(before_); }

}  // namespace heddle::cuda
