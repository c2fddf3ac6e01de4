// How much room the experts of a rank are given before any call, against what every way hands over.
#include <gtest/gtest.h>

#include "exchange_support.hpp"
#include "layer/room.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

ExchangeOptions options_of(Way way, ArrivedLayout layout) {
  ExchangeOptions options;
  options.way = way;
  options.hidden = 128;
  options.topk = 4;
  options.cap = 10;
  options.placement = Placement::contiguous(6, 3);
  options.arrived = layout;
  return options;
}

TEST(LayerRoom, BoundsByHand) {
  // Three ranks of ten tokens; a token has at most two pairs on a rank of two experts, whatever k is.
  for (const ArrivedLayout layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
    const RankRoom room = room_of(options_of(Way::elastic, layout), 2);
    EXPECT_EQ(room.own_tokens, 10);
    EXPECT_EQ(room.arrived_tokens, 30);
    EXPECT_EQ(room.pairs, 60);
    const std::size_t rows[] = {384, 60, 30};  // runs of 128 behind each other: 60 + 2 * 127, rounded up; two blocks of 30; tokens
    EXPECT_EQ(room.rows, rows[static_cast<int>(layout)]);
    EXPECT_EQ(room.results, room.rows);
  }
  ExchangeOptions slots = options_of(Way::elastic, ArrivedLayout::routed);
  slots.reduce = Reduce::home;
  EXPECT_EQ(room_of(slots, 2).rows, 30u);
  EXPECT_EQ(room_of(slots, 2).results, 120u) << "a result a choice";
  ExchangeOptions whole = options_of(Way::gather, ArrivedLayout::routed);
  whole.gather = GatherMode::tensor_parallel;
  EXPECT_EQ(room_of(whole, 2).own_tokens, 30) << "every rank has the whole batch";
  EXPECT_EQ(room_of(whole, 0).pairs, 0) << "a rank without experts";
}

TEST(LayerRoom, WhatCannotBeIsNamedWithACapThatFits) {
  ExchangeOptions options = options_of(Way::gather, ArrivedLayout::routed);
  options.cap = 8'000'000;
  try {
    room_of(options, 2);
    FAIL() << "48 million pairs were accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("a cap of 5592405 fits"), std::string::npos) << error.what();
  }
  options.cap = 5'592'405;
  EXPECT_EQ(room_of(options, 2).pairs, 33'554'430);
}

/// Every arrival of a case on the host engine fits the room that options alone gave.
void expect_arrivals_fit(const Case& c, int round) {
  run_ranks(c.ranks(), {}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    const auto exchange = create_exchange(workspace, c.options, memory);
    const RankData data = draw(c, group.rank(), round);
    const Arrived arrived = exchange->dispatch(data.input(c.tokens_of(group.rank())), {c.most_tokens(), Phase::decode});
    const RankRoom room = room_of(c.options, static_cast<int>(c.options.placement.experts_of(group.rank()).size()));
    EXPECT_LE(static_cast<std::size_t>(arrived.room), room.rows) << title(c.options) << " " << name(c.options.arrived);
    EXPECT_LE(arrived.real, room.pairs) << title(c.options) << " " << name(c.options.arrived);
    workspace.close();
  });
}

TEST(LayerRoom, EveryArrivalFits) {
  for (int round = 0; round < 6; ++round) {
    for (const ExchangeOptions& options : every_way(128, 7, 3, 3, 9)) {
      for (const ArrivedLayout layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
        if (!allows_layout(options.way, layout)) continue;
        Case c;
        c.options = options;
        c.options.arrived = layout;
        c.tokens = {9, 3, 9};
        c.hot = round % 2 == 0 ? 1 : -1;
        expect_arrivals_fit(c, round);
      }
    }
  }
}

}  // namespace
}  // namespace heddle
