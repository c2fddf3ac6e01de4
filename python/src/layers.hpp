// What the layers that share a workspace need of it.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "heddle/exchange.hpp"
#include "source.hpp"

namespace heddle::python {

struct LayerNeeds {
  ExchangeMemory memory;
  std::string configuration;  ///< all that ranks must agree on
  int ranks = 0;
  int count = 0;
};

/// layers: (RankWeights, LayerOptions) of each.
LayerNeeds needs_of(const nanobind::list& layers);

}  // namespace heddle::python
