// The driver's calls for virtual memory and tensor copies, found at run time so that nothing links against the driver, and
// error checks that name the call.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

namespace heddle::cuda {

/// Throws Error (kind fault) naming `what` and the runtime's reason.
void check(cudaError_t status, const char* what);
/// The same for driver calls.
void check(CUresult status, const char* what);

struct Driver {
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuTensorMapEncodeTiled) encode_tiled = nullptr;
};
/// Throws InputError where there is no driver.
const Driver& driver();

/// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

}  // namespace heddle::cuda
