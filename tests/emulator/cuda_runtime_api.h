// In the place of the toolkit's header where kernels are compiled for the host.
#pragma once

#include "emulator/device.hpp"

using cudaStream_t = struct CUstream_st*;
