#include "bench_bytes.hpp"

#include <algorithm>
#include <vector>

#include "exchange/host_exchange.hpp"
#include "heddle/plan.hpp"

namespace heddle::tool {

namespace {

/// rows[from][to]: copies that rank `from` sends to rank `to` in dispatch. As many come back.
std::vector<std::vector<double>> copies(const ExchangeOptions& options, const Batch& batch, int tokens) {
  const auto ranks = static_cast<std::size_t>(batch.ranks());
  std::vector<std::vector<double>> rows(ranks, std::vector<double>(ranks, 0.0));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (options.way == Way::gather) {
      std::fill(rows[rank].begin(), rows[rank].end(), static_cast<double>(tokens));
      continue;
    }
    const Routing& routing = batch.routing(static_cast<int>(rank));
    std::vector<bool> seen(ranks);
    for (int token = 0; token < tokens; ++token) {
      std::fill(seen.begin(), seen.end(), false);
      for (int choice = 0; choice < routing.topk; ++choice) {
        const std::int32_t id = routing.ids[static_cast<std::size_t>(token * routing.topk + choice)];
        if (id < 0) continue;
        const auto peer = static_cast<std::size_t>(options.placement.rank_of(id));
        if (options.way == Way::low_latency || !seen[peer]) rows[rank][peer] += 1;  // else one copy a rank is enough
        seen[peer] = true;
      }
    }
  }
  return rows;
}

}  // namespace

double link_rate() { return find_machine("h200").link->value; }

double word_seconds(const Lanes& lanes) { return lanes.gpus() > 1 ? 2 * find_machine("h200").word_latency->value : 0.0; }

Traffic traffic_of(const ExchangeOptions& options, const Batch& batch, int tokens) {
  const auto rows = copies(options, batch, tokens);
  const auto out_bytes = static_cast<double>(wire_format(options).reported_bytes());
  const auto back_bytes = static_cast<double>(returned_format(options).reported_bytes());
  const double memory = find_machine("h200").memory_copy->value;
  std::vector<int> devices;
  for (int rank = 0; rank < batch.ranks(); ++rank) {
    if (devices.empty() || devices.back() != batch.device_of(rank)) devices.push_back(batch.device_of(rank));
  }
  Traffic busiest;
  double dispatch_floor = 0, combine_floor = 0;
  for (const int device : devices) {
    double sent = 0, received = 0, local = 0;
    for (int from = 0; from < batch.ranks(); ++from) {
      for (int to = 0; to < batch.ranks(); ++to) {
        const double n = rows[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
        const bool from_here = batch.device_of(from) == device;
        const bool to_here = batch.device_of(to) == device;
        if (from_here && to_here) local += n;
        if (from_here && !to_here) sent += n;
        if (!from_here && to_here) received += n;
      }
    }
    const double most = std::max(sent, received);
    const auto floor = [&](double row_bytes) {
      return std::max(most * row_bytes / link_rate(), 2 * (local + most) * row_bytes / memory);
    };
    dispatch_floor = std::max(dispatch_floor, floor(out_bytes));
    combine_floor = std::max(combine_floor, floor(back_bytes));
    Traffic own;
    own.remote_rows = sent + received;  // what came is sent back
    own.remote_bytes = sent * out_bytes + received * back_bytes;
    own.local_rows = 2 * local;
    own.local_bytes = local * (out_bytes + back_bytes);
    if (own.remote_bytes > busiest.remote_bytes || (own.remote_bytes == 0 && own.local_bytes > busiest.local_bytes)) busiest = own;
  }
  busiest.floor_seconds = dispatch_floor + combine_floor;
  return busiest;
}

}  // namespace heddle::tool
