#include "trace/chrome.hpp"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "trace/words.hpp"

namespace heddle::trace {

namespace {

using Json = nlohmann::ordered_json;

double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }

Json args_of(const Span& span) {
  Json args = Json::object();
  if (span.task.product != Product::none) {
    args["product"] = name(span.task.product);
    args["expert"] = span.task.expert;
    args["block"] = span.task.block;
    args["part"] = span.task.part;
    args["rows"] = span.task.rows;
  }
  if (span.kind == Kind::wait) {
    args["phase"] = word_text(span.word.kind).phase;
    if (span.word.peer >= 0) args["rank"] = span.word.peer;
    if (span.word.index >= 0) args["index"] = span.word.index;
  }
  const auto waits = waits_of(span.kind);
  for (int which = 0; which < summed_waits; ++which) {
    const char* what = waits[static_cast<std::size_t>(which)];
    if (what != nullptr && span.waited[which] > 0) args[fmt::format("waited for {}", what)] = microseconds(span.waited[which]);
  }
  return args;
}

class Writer {
 public:
  explicit Writer(int ctas) : ctas_(ctas) {}

  void add(const TracedCall& call) {
    for (int rank = 0; rank < call.ranks; ++rank)
      name_it("process_name", "process_sort_index", first_ + rank, 0, fmt::format("{}, rank {}", call.title, rank), first_ + rank);
    std::map<std::tuple<int, LaneName>, int> threads;
    for (const Lane& lane : call.lanes) {
      if (!is_shown(lane, ctas_)) continue;
      const int process = first_ + lane.name.rank;
      const auto [found, is_new] = threads.try_emplace({process, lane.name}, static_cast<int>(threads.size()) + 1);
      const std::string kernel = lane.kernel == nullptr ? "" : std::string(lane.kernel) + ": ";
      if (is_new) name_it("thread_name", "thread_sort_index", process, found->second, kernel + text_of(lane.name), found->second);
      for (const Span& span : lane.spans) add(span, process, found->second);
    }
    first_ += call.ranks;
  }

  std::string text(const Json& other) const {
    return "{\"displayTimeUnit\": \"ns\",\n\"otherData\": " + dump(other) + ",\n\"traceEvents\": [" + events_ + "\n]}\n";
  }

 private:
  static std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

  void put(const Json& event) {
    events_ += events_.empty() ? "\n" : ",\n";
    events_ += dump(event);
  }
  void name_it(const char* what, const char* order, int process, int thread, const std::string& text, int place) {
    put({{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", text}}}});
    put({{"ph", "M"}, {"name", order}, {"pid", process}, {"tid", thread}, {"args", {{"sort_index", place}}}});
  }
  void add(const Span& span, int process, int thread) {
    put({{"ph", "X"},
         {"name", text_of(span)},
         {"cat", name(span.kind)},
         {"pid", process},
         {"tid", thread},
         {"ts", microseconds(span.begin)},
         {"dur", microseconds(span.length())},
         {"args", args_of(span)}});
  }

  int ctas_;
  int first_ = 0;  ///< process of the call's first rank
  std::string events_;
};

}  // namespace

std::string chrome_trace(std::span<const TracedCall> calls, int ctas, const Json& other) {
  Writer writer(ctas);
  for (const TracedCall& call : calls) writer.add(call);
  return writer.text(other);
}

}  // namespace heddle::trace
