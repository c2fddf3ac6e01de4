// Tuning tables for the tests of way auto.
#pragma once

#include <memory>

#include "layer_support.hpp"

namespace heddle::layer_test {

inline constexpr char machine[] = "a machine of tests";

inline TuningKey key_of(const Case& c) {
  const LayerShape& shape = c.layer.shape;
  return {machine, shape.hidden, shape.intermediate, shape.experts, shape.topk, c.ranks(), c.layer.kind, activation_of(c)};
}

/// Random times of all ways at a few sizes.
inline std::shared_ptr<const TuningTable> random_table(const Case& c, Chance& chance) {
  TuningEntry entry{key_of(c), "drawn", {}};
  for (int tokens = 1; tokens <= 2 * c.options.cap; tokens += chance.between(1, 8)) {
    TuningRow row{tokens, {}};
    for (const Way way : real_ways) row.us[way] = chance.between(1, 1000);
    entry.rows.push_back(row);
  }
  auto table = std::make_shared<TuningTable>();
  table->add(entry);
  return table;
}

}  // namespace heddle::layer_test
