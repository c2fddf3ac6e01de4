// The tables of `heddle bench exchange` that are not round trips.
#include <fmt/format.h>

#include <algorithm>

#include "bench_machine.hpp"
#include "bench_run.hpp"
#include "bench_studies.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

void Run::layout_cost(Batch& batch, const Row& row, double& routed_dispatch) {
  const std::string label = label_of(row) + fmt::format(" {:<10}", name(row.configuration.arrived));
  Json entry = entry_of(batch, row);
  attempt(layouts_, entry, label, [&] {
    Setup setup(row.configuration, batch, lanes_);
    const bool eager = row.configuration.is_eager();
    const Times times = eager ? time_eager(setup, a_.replays) : time_replays(setup, a_.round_trips, a_.replays);
    entry["dispatch_us"] = median(times.dispatch);
    entry["combine_us"] = median(times.combine);
    entry["results_in_place"] = setup.results_in_place();
    std::string line = fmt::format("{} {:>9.2f} {:>9.2f}", label, median(times.dispatch), median(times.combine));
    if (row.configuration.arrived == ArrivedLayout::routed) routed_dispatch = median(times.dispatch);
    if (eager) {  // its halves cannot be taken apart
      entry["layout_us"] = median(times.dispatch) - routed_dispatch;
      line += fmt::format(" {:>9} {:>9} {:>9} {:>9.2f}", "", "", "", median(times.dispatch) - routed_dispatch);
    } else {
      const Traffic traffic = traffic_of(setup.options(), batch, row.configuration.tokens);
      const ReceiveTimes halves = time_receiving(setup, 2e6 * traffic.floor_seconds, a_.round_trips, std::min(a_.replays, 10));
      entry["receive_us"] = halves.receive;
      entry["collect_us"] = halves.collect;
      entry["empty_us"] = halves.empty;
      entry["layout_us"] = halves.receive - halves.empty;
      line += fmt::format(" {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f}", halves.receive, halves.collect, halves.empty,
                          halves.receive - halves.empty);
    }
    print_line(line);
    layouts_.push_back(entry);
  });
}

void Run::layout_costs(Batch& batch) {
  print_line(fmt::format(
      "\nhidden {}: layouts. receive: dispatch_receive when all rows are there; collect: combine_receive likewise; empty: a launch "
      "that does nothing, taken alike\ncost: receive without empty; normal: dispatch without that of its routed layout\n"
      "{} {:<10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
      batch.hidden(), label_title(), "layout", "dispatch", "combine", "receive", "collect", "empty", "cost"));
  for (Row row : rows(a_.ways)) {
    double routed_dispatch = 0;
    for (const ArrivedLayout layout : {ArrivedLayout::routed, ArrivedLayout::masked, ArrivedLayout::contiguous}) {
      if (!allows_layout(row.configuration.way, layout)) continue;
      row.configuration.arrived = layout;
      layout_cost(batch, row, routed_dispatch);
    }
  }
}

void Run::sweeps(Batch& batch) {
  std::vector<int> sms{0};
  sms.insert(sms.end(), a_.sweep.begin(), a_.sweep.end());
  std::string title = fmt::format("\nhidden {}: by CTAs a GPU\n{} {:>8}", batch.hidden(), label_title(), "rule");
  for (const int ctas : a_.sweep) title += fmt::format(" {:>8}", ctas);
  print_line(title + fmt::format(" {:>14}", "rule over best"));
  for (const Row& row : rows(a_.ways)) {
    const std::string label = label_of(row);
    if (row.configuration.is_eager()) {
      print_line(label + " not swept: it is not captured in a graph");
      continue;
    }
    Json entry = entry_of(batch, row);
    attempt(sweeps_, entry, label, [&] {
      Setup setup(row.configuration, batch, lanes_);
      const std::vector<double> medians = time_sweep(setup, sms, a_.round_trips, a_.replays);
      std::string line = label;
      for (const double value : medians) line += fmt::format(" {:>8.2f}", value);
      const double ratio = medians.front() / *std::min_element(medians.begin(), medians.end());
      print_line(line + fmt::format(" {:>14.3f}", ratio));
      entry["rule_us"] = medians.front();
      entry["ctas"] = a_.sweep;
      entry["median_us"] = std::vector<double>(medians.begin() + 1, medians.end());
      entry["rule_over_best"] = ratio;
      entry["results_in_place"] = setup.results_in_place();
      sweeps_.push_back(entry);
    });
  }
}

void Run::overlaps(Batch& batch) {
  print_line(fmt::format(
      "\nhidden {}: halves of low_latency around other work, us a round trip (the work comes twice)\n"
      "{} {:>5} {:>9} {:>9} {:>9} {:>11} {:>7} {:>11} {:>7}",
      batch.hidden(), label_title(), "CTAs", "work CTAs", "work", "exchange", "one stream", "hidden", "two streams", "hidden"));
  for (Row row : rows({"low_latency"})) {
    for (const int ctas : a_.overlap_sms) {
      const int work_ctas = a_.work_sms > 0 ? a_.work_sms : std::max(1, lanes_.sms() - ctas);
      row.configuration.sms = ctas;
      const std::string label = label_of(row) + fmt::format(" {:>5} {:>9}", ctas, work_ctas);
      for (const int microseconds : a_.overlap) {
        Json entry = entry_of(batch, row);
        attempt(overlaps_, entry, label, [&] {
          Setup setup(row.configuration, batch, lanes_);
          const OverlapTimes times = time_overlap(setup, microseconds, work_ctas, a_.round_trips, a_.replays);
          const double one = times.work + times.exchange - times.one_stream;
          const double two = times.work + times.exchange - times.two_streams;
          print_line(fmt::format("{} {:>9.2f} {:>9.2f} {:>11.2f} {:>7.2f} {:>11.2f} {:>7.2f}", label, times.work, times.exchange,
                                 times.one_stream, one, times.two_streams, two));
          entry["work_ctas"] = work_ctas;
          entry["work_us"] = times.work;
          entry["exchange_us"] = times.exchange;
          entry["one_stream_us"] = times.one_stream;
          entry["one_stream_hidden_us"] = one;
          entry["two_streams_us"] = times.two_streams;
          entry["two_streams_hidden_us"] = two;
          overlaps_.push_back(entry);
        });
      }
    }
  }
}

}  // namespace heddle::tool
