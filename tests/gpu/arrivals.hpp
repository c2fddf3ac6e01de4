// What arrived on a GPU, fetched to the host, and the host engine's dispatch of the same tokens to hold it against.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "exchange_support.hpp"
#include "gpu/buffers.hpp"
#include "ranks.hpp"

namespace heddle {

/// An Arrived with its arrays copied to the host.
struct HostArrived {
  Arrived view;
  std::vector<std::byte> rows;
  std::vector<std::int32_t> begins, counts, local_ids;
  std::vector<float> row_weights, weights;
  std::vector<std::vector<std::byte>> extra;
};

inline HostArrived fetch(const Arrived& device, const ExchangeOptions& options, int local_experts) {
  const auto topk = static_cast<std::size_t>(options.topk);
  HostArrived host;
  host.view = device;
  const auto room = static_cast<std::size_t>(device.room);
  host.rows = read(device.rows, room * device.row_stride);
  host.view.rows = host.rows.data();
  if (device.layout == ArrivedLayout::routed) {
    host.local_ids = read(device.local_ids, room * topk);
    host.weights = read(device.weights, room * topk);
    host.view.local_ids = host.local_ids.data();
    host.view.weights = host.weights.data();
  } else {
    host.begins = read(device.begins, static_cast<std::size_t>(local_experts));
    host.counts = read(device.counts, static_cast<std::size_t>(local_experts));
    host.row_weights = read(device.row_weights, room);
    host.view.begins = host.begins.data();
    host.view.counts = host.counts.data();
    host.view.row_weights = host.row_weights.data();
  }
  for (std::size_t p = 0; p < device.extra.size(); ++p) {
    host.extra.push_back(read(device.extra[p], room * options.extra_payloads.at(p)));
    host.view.extra[p] = host.extra[p].data();
  }
  return host;
}

/// The same dispatch on the host engine: what arrived at every rank.
inline std::vector<HostArrived> host_arrivals(const Case& c, int round) {
  std::vector<HostArrived> all(static_cast<std::size_t>(c.ranks()));
  run_ranks(c.ranks(), {}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    const auto exchange = create_exchange(workspace, c.options, memory);
    const RankData data = draw(c, group.rank(), round);
    const Arrived arrived = exchange->dispatch(data.input(c.tokens_of(group.rank())), {c.most_tokens(), Phase::decode});
    HostArrived& mine = all[static_cast<std::size_t>(group.rank())];
    mine.view = arrived;
    const auto room = static_cast<std::size_t>(arrived.room);
    mine.rows.assign(arrived.rows, arrived.rows + room * arrived.row_stride);
    if (arrived.layout == ArrivedLayout::routed) {
      const std::size_t pairs = room * static_cast<std::size_t>(c.options.topk);
      mine.local_ids.assign(arrived.local_ids, arrived.local_ids + pairs);
      mine.weights.assign(arrived.weights, arrived.weights + pairs);
    } else {
      const std::size_t local = c.options.placement.experts_of(group.rank()).size();
      mine.begins.assign(arrived.begins, arrived.begins + local);
      mine.counts.assign(arrived.counts, arrived.counts + local);
      mine.row_weights.assign(arrived.row_weights, arrived.row_weights + room);
    }
    group.barrier("arrivals are copied");
  });
  return all;
}

/// Real rows of both engines have equal bytes, ids, weights and places.
inline void expect_same_arrival(const Case& c, const HostArrived& gpu, const HostArrived& host) {
  const std::size_t row_bytes = wire_format(c.options).row_bytes();
  const auto same_row = [&](std::size_t i, std::size_t j) {
    return std::memcmp(gpu.rows.data() + i * gpu.view.row_stride, host.rows.data() + j * host.view.row_stride, row_bytes) == 0;
  };
  ASSERT_EQ(gpu.view.layout, host.view.layout);
  if (gpu.view.layout != ArrivedLayout::routed) {
    ASSERT_EQ(gpu.counts, host.counts);
    ASSERT_EQ(gpu.begins, host.begins);
    for (std::size_t e = 0; e < gpu.counts.size(); ++e) {
      for (int i = 0; i < gpu.counts[e]; ++i) {
        const auto row = static_cast<std::size_t>(gpu.begins[e] + i);
        ASSERT_TRUE(same_row(row, row)) << "row " << i << " of local expert " << e;
        ASSERT_EQ(gpu.row_weights[row], host.row_weights[row]);
      }
    }
    return;
  }
  const auto k = static_cast<std::size_t>(c.options.topk);
  const std::size_t rows = std::min(gpu.local_ids.size(), host.local_ids.size()) / k;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t j = 0; j < k; ++j) {
      ASSERT_EQ(gpu.local_ids[row * k + j], host.local_ids[row * k + j]) << "row " << row << " choice " << j;
      if (gpu.local_ids[row * k + j] < 0) continue;
      ASSERT_EQ(gpu.weights[row * k + j], host.weights[row * k + j]);
      ASSERT_TRUE(same_row(row, row)) << "row " << row;
    }
  }
}

}  // namespace heddle
