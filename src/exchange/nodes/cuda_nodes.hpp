// elastic on GPUs of several nodes.
#pragma once

#include <memory>

#include "exchange/cuda_exchange.hpp"

namespace heddle {

std::unique_ptr<DeviceExchange> create_device_elastic_nodes(DeviceWorkspace& workspace, std::size_t gpu,
                                                            const ExchangeOptions& options, const ExchangeMemory& memory,
                                                            const DeviceExchangeOptions& device);

}  // namespace heddle
