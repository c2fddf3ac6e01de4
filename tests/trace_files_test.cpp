// The recorder by itself, and a trace's ways out: totals, the Chrome trace, the strips. Lanes made by hand, with CTAs, too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "trace/chrome.hpp"
#include "trace/recorder.hpp"
#include "trace/segments.hpp"
#include "trace/strips.hpp"
#include "trace/totals.hpp"
#include "trace/words.hpp"

namespace heddle::trace {
namespace {

Span span(std::int64_t begin, std::int64_t end, Kind kind, const TaskNote& task = {}) {
  Span made;
  made.begin = begin;
  made.end = end;
  made.kind = kind;
  made.task = task;
  return made;
}

Span wait(std::int64_t begin, std::int64_t end, const WordName& word) {
  Span made = span(begin, end, Kind::wait);
  made.word = word;
  return made;
}

/// A math warp and a loader of a CTA.
TracedCall fused_call(int ctas) {
  TracedCall call{"mega", 1, {}};
  for (int cta = 0; cta < ctas; ++cta) {
    const TaskNote task{Product::gemm1, 2, 5, cta, 7};
    Lane math{{0, Role::math, 0, cta, 1}, "fused kernel", 0, 10000, {}, 0};
    math.spans = {span(0, 1000, Kind::next_task), span(1000, 8000, Kind::products, task), span(8000, 9000, Kind::epilogue, task)};
    math.spans[1].waited[0] = 2000;
    math.spans[1].waited[1] = 500;
    Lane rows{{0, Role::rows, 0, cta, 1}, "fused kernel", 0, 10000, {}, 0};
    rows.spans = {wait(100, 900, {WordKind::mega_filled, 0, 5}), span(0, 4000, Kind::rows, task)};  // the inner one ends first
    call.lanes.push_back(math);
    call.lanes.push_back(rows);
  }
  return call;
}

TracedCall chain_call() {
  TracedCall call{"low_latency", 2, {}};
  for (int rank = 0; rank < 2; ++rank) {
    Lane lane{{rank, Role::rank}, nullptr, 0, 20000, {}, 0};
    lane.spans = {span(0, 5000, Kind::dispatch), span(5000, 15000, Kind::products, {Product::gemm2, 1, 0, 0, 3}),
                  span(15000, 20000, Kind::combine)};
    call.lanes.push_back(lane);
  }
  return call;
}

TEST(TraceRecorder, AThreadRecordsWhileItIsAttached) {
  Recorder recorder;
  { const Recorded lost(Kind::sum); }
  {
    const Attached outer(recorder, {3, Role::rank});
    const Recorded layer(Kind::dispatch);
    const Context mine = context();
    std::thread([&] {
      { const Recorded lost(Kind::sum); }
      const Attached inner(mine, Role::worker, 1);
      const Recorded moved(Kind::move);
    }).join();
    {
      const Attached inner(mine, Role::worker, 0);
      const Recorded waited(WordName{WordKind::gather_arrived, 2, -1});
    }
    const Recorded back(Kind::regroup);
  }
  { const Recorded lost(Kind::sum); }
  const Trace lanes = recorder.take();
  ASSERT_EQ(lanes.size(), 3u);
  EXPECT_EQ(lanes[0].name, (LaneName{3, Role::rank}));
  EXPECT_EQ(lanes[1].name, (LaneName{3, Role::worker, 0}));
  EXPECT_EQ(lanes[2].name, (LaneName{3, Role::worker, 1}));
  ASSERT_EQ(lanes[0].spans.size(), 2u);
  EXPECT_EQ(lanes[0].spans[0].kind, Kind::regroup);  // ended first
  ASSERT_EQ(lanes[1].spans.size(), 1u);
  EXPECT_EQ(lanes[1].spans[0].word.peer, 2);
  EXPECT_EQ(lanes[2].spans.size(), 1u);
  EXPECT_EQ(lanes[0].begin, 0);
  EXPECT_TRUE(recorder.take().empty());
}

TEST(TraceTotals, SpansThatOverlapInPartAreRefused) {
  Lane lane;
  lane.spans = {span(0, 5, Kind::rows), span(3, 8, Kind::products)};
  EXPECT_THROW(own_times(lane), std::logic_error);
  lane.spans = {span(0, 5, Kind::rows), span(5, 8, Kind::products), span(0, 8, Kind::sum)};
  EXPECT_EQ(own_times(lane), (std::vector<std::int64_t>{5, 3, 0}));
}

TEST(TraceTotals, WaitsAreTakenOffWhatTheyHeldUp) {
  const Totals totals = totals_of(fused_call(3).lanes);
  ASSERT_EQ(totals.roles.size(), 2u);
  const auto line = [&](Role role, const std::string& what, const std::string& during) {
    for (const RoleTotals& one : totals.roles) {
      for (const Line& found : one.lines) {
        if (one.role == role && found.what == what && found.during == during) return found;
      }
    }
    ADD_FAILURE() << "no " << what << " during " << during;
    return Line{};
  };
  EXPECT_EQ(line(Role::math, "products of gemm1", "").nanoseconds, 3 * 4500);
  EXPECT_EQ(line(Role::math, "weights", "products of gemm1").nanoseconds, 3 * 2000);
  EXPECT_TRUE(line(Role::math, "rows", "products of gemm1").is_wait);
  EXPECT_TRUE(line(Role::math, "next task", "").is_wait);
  EXPECT_EQ(line(Role::rows, "arrived rows of ring block", "rows of gemm1").nanoseconds, 3 * 800);
  EXPECT_EQ(line(Role::rows, "rows of gemm1", "").nanoseconds, 3 * 3200);
  EXPECT_EQ(totals.roles[0].kernel, "fused kernel");
  for (const RoleTotals& role : totals.roles) {
    std::int64_t sum = role.idle;
    for (const Line& found : role.lines) sum += found.nanoseconds;
    EXPECT_EQ(sum, role.nanoseconds);
    EXPECT_EQ(role.lanes, 3);
  }
}

TEST(TraceSegments, TheInnermostSpanCounts) {
  Lane lane;
  lane.spans = {span(2, 5, Kind::products), span(5, 6, Kind::activation), span(1, 9, Kind::shared), span(10, 12, Kind::combine)};
  std::vector<std::tuple<std::int64_t, std::int64_t, Kind, bool>> found;
  for (const Segment& one : segments_of(lane)) found.emplace_back(one.begin, one.end, one.span->kind, one.of_shared);
  EXPECT_THAT(found, testing::ElementsAre(std::tuple(1, 2, Kind::shared, true), std::tuple(2, 5, Kind::products, true),
                                          std::tuple(5, 6, Kind::activation, true), std::tuple(6, 9, Kind::shared, true),
                                          std::tuple(10, 12, Kind::combine, false)));
}

TEST(TraceFiles, TheChromeTraceHasEverySpan) {
  const std::vector<TracedCall> calls{fused_call(4), chain_call()};
  const auto json = nlohmann::json::parse(chrome_trace(calls, 2, {{"heddle", "1"}}));
  EXPECT_EQ(json.at("otherData").at("heddle"), "1");
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::map<std::pair<int, int>, int> spans;
  for (const auto& event : json.at("traceEvents")) {
    const std::pair<int, int> thread(event.at("pid"), event.at("tid"));
    if (event.at("name") == "process_name") processes[thread.first] = event.at("args").at("name");
    if (event.at("name") == "thread_name") threads[thread] = event.at("args").at("name");
    if (event.at("ph") != "X") continue;
    ++spans[thread];
    EXPECT_GE(event.at("dur").get<double>(), 0);
    EXPECT_TRUE(event.at("cat").is_string());
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "mega, rank 0"}, {1, "low_latency, rank 0"}, {2, "low_latency, rank 1"}}));
  std::set<std::string> names;
  for (const auto& [thread, name] : threads) names.insert(name);
  EXPECT_EQ(names, (std::set<std::string>{"fused kernel: CTA 0 math 0", "fused kernel: CTA 0 rows 0", "fused kernel: CTA 1 math 0",
                                          "fused kernel: CTA 1 rows 0", "rank"}));
  int all = 0;
  for (const auto& [thread, count] : spans) all += count;
  EXPECT_EQ(all, 2 * 5 + 2 * 3);
}

TEST(TraceFiles, EventsTellTheirTaskAndTheirWaits) {
  const std::vector<TracedCall> calls{fused_call(1)};
  const auto json = nlohmann::json::parse(chrome_trace(calls, 1, {}));
  nlohmann::json products;
  nlohmann::json waited;
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("name") == "products of gemm1") products = event;
    if (event.at("name") == "arrived rows of ring block") waited = event;
  }
  EXPECT_EQ(products.at("ts"), 1.0);
  EXPECT_EQ(products.at("dur"), 7.0);
  EXPECT_EQ(products.at("args").at("expert"), 2);
  EXPECT_EQ(products.at("args").at("block"), 5);
  EXPECT_EQ(products.at("args").at("rows"), 7);
  EXPECT_EQ(products.at("args").at("waited for weights"), 2.0);
  EXPECT_EQ(products.at("args").at("waited for rows"), 0.5);
  EXPECT_EQ(waited.at("args").at("index"), 5);
  EXPECT_EQ(waited.at("args").at("phase"), "mega tasks");
}

TEST(TraceFiles, StripsHaveARowALaneAndTwoOfTheWhole) {
  const std::vector<TracedCall> calls{fused_call(4), chain_call()};
  const std::string svg = strips(calls, 3);
  EXPECT_EQ(svg.find("<svg "), 0u);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
  const auto count = [&](const std::string& what) {
    int found = 0;
    for (std::size_t at = svg.find(what); at != std::string::npos; at = svg.find(what, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count(">tensor cores<"), 2);
  EXPECT_EQ(count(">rows between ranks<"), 2);
  EXPECT_EQ(count("rank 0 CTA"), 6);
  EXPECT_LT(svg.find(">mega: 10.0 us<"), svg.find(">low_latency: 20.0 us<"));
  EXPECT_EQ(count("<rect"), count("/>"));
}

TEST(TraceFiles, NothingRecordedIsDrawnToo) {
  const std::vector<TracedCall> calls{{"mega", 2, {}}};
  EXPECT_EQ(nlohmann::json::parse(chrome_trace(calls, 1, {})).at("traceEvents").size(), 4u);
  EXPECT_NE(strips(calls, 1).find(">mega: 0.0 us<"), std::string::npos);
  EXPECT_TRUE(totals_of({}).roles.empty());
}

TEST(TraceWords, EverythingHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int kind = 0; kind < kinds; ++kind) names.insert(name(static_cast<Kind>(kind)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kinds));
  EXPECT_EQ(names.count("unknown"), 0u);
}

}  // namespace
}  // namespace heddle::trace
