#include "layer/room.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "exchange/host_exchange.hpp"
#include "heddle/device_experts.hpp"
#include "heddle/error.hpp"

namespace heddle {

RankRoom room_of(const ExchangeOptions& options, int local_experts) {
  const long long ranks = options.placement.ranks();
  // Ids do not repeat within a token.
  const long long pairs_a_token = std::min(options.topk, local_experts);
  const long long tokens = ranks * options.cap;
  if (tokens * std::max(1LL, pairs_a_token) > most_device_pairs) {
    throw InputError(fmt::format(
        "a cap of {} tokens on {} ranks is up to {} pairs of a token and one of {} local experts; experts on a GPU take {}, which "
        "a cap of {} fits",
        options.cap, ranks, tokens * pairs_a_token, local_experts, most_device_pairs,
        most_device_pairs / (ranks * std::max(1LL, pairs_a_token))));
  }
  const bool tensor_parallel = options.way == Way::gather && options.gather == GatherMode::tensor_parallel;
  RankRoom room;
  room.arrived_tokens = static_cast<int>(tokens);
  room.own_tokens = tensor_parallel ? room.arrived_tokens : options.cap;
  room.pairs = static_cast<int>(tokens * pairs_a_token);
  const auto arrived = static_cast<std::size_t>(tokens);
  if (options.arrived == ArrivedLayout::routed) {
    const bool slots = options.way == Way::elastic && options.reduce == Reduce::home;
    room.rows = arrived;
    room.results = slots ? arrived * static_cast<std::size_t>(options.topk) : arrived;
  } else {
    // elastic hands over the room of the rank that has most experts.
    room.rows = expanded_room(options, std::max(1, options.placement.max_local_experts()), arrived);
    room.results = room.rows;
  }
  return room;
}

}  // namespace heddle
