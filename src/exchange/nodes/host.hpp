// elastic on a host group of several nodes.
#pragma once

#include <memory>

#include "exchange/host_exchange.hpp"

namespace heddle {

std::unique_ptr<Exchange> create_elastic_nodes(Workspace& workspace, const ExchangeOptions& options, const ExchangeMemory& memory);

}  // namespace heddle
