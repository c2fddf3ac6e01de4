#include "bench_mega_batches.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bench_machine.hpp"
#include "bench_memory.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

/// A part of the comparison; what does not fit or is refused says so in its place.
Json part(const std::function<Json()>& work) {
  try {
    return work();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::check) return {{"wrong", error.what()}};
    if (error.kind() != ErrorKind::input && !for_lack_of_memory(error)) throw;
    return {{"failed", error.what()}};
  }
}

Json times_of(std::vector<double> samples, int calls) {
  for (double& sample : samples) sample /= calls;
  return summary(samples);
}

bool has_times(const Json& part) { return part.count("median_us") > 0; }

void set_ratio(Json& part, const char* field, const Json& over) {
  if (has_times(part) && has_times(over)) part[field] = part["median_us"].get<double>() / over["median_us"].get<double>();
}

std::string told(const Json& part, const char* title) {
  for (const char* what : {"failed", "wrong"}) {
    if (part.count(what) > 0) return fmt::format("{} {}: {}", title, what, part[what].get<std::string>());
  }
  return fmt::format("{} {:.2f}", title, part["median_us"].get<double>());
}

}  // namespace

BatchRouting part_of(const BatchRouting& whole, int first, int tokens) {
  BatchRouting part{{}, whole.topk, whole.note};
  const std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(first) * whole.topk;
  const std::ptrdiff_t end = begin + static_cast<std::ptrdiff_t>(tokens) * whole.topk;
  for (const Routing& rank : whole.ranks) {
    part.ranks.push_back({tokens,
                          rank.topk,
                          {rank.ids.begin() + begin, rank.ids.begin() + end},
                          {rank.weights.begin() + begin, rank.weights.begin() + end}});
  }
  return part;
}

TwoBatches::TwoBatches(Lanes& lanes, Batch& first, const BatchRouting& whole, int tokens, std::uint64_t seed)
    : lanes_(lanes),
      tokens_(tokens),
      first_(first),
      other_(lanes, part_of(whole, tokens, tokens), first.hidden(), seed + 1),
      both_(lanes, whole, first.hidden(), seed + 2) {
  other_.set_tokens(tokens);
  both_.set_tokens(2 * tokens);
}

void TwoBatches::poison() {
  first_.poison_outputs();
  other_.poison_outputs();
}

std::vector<RankOutputs> TwoBatches::outputs() {
  const unsigned long long bad = first_.bad_outputs(tokens_) + other_.bad_outputs(tokens_);
  if (bad > 0) throw Error(ErrorKind::check, fmt::format("{} outputs of the two batches were not written or are not finite", bad));
  return {outputs_of(first_, tokens_), outputs_of(other_, tokens_)};
}

void TwoBatches::attend(const TwoPlan& plan, int batches, bool second_stream) const {
  if (plan.attention == nullptr) return;
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu)
    plan.attention->queue(gpu, batches, second_stream ? lanes_.second(gpu) : lanes_.stream(gpu));
}

Json TwoBatches::timed(const TwoPlan& plan, bool is_eager, int calls, const std::function<void()>& work,
                       const std::function<void()>& check) {
  if (is_eager) return times_of(time_queued(lanes_, work, plan.replays, check, plan.give_up), calls);
  Replay replay(lanes_, work);
  return times_of(replay.run(plan.replays, check, plan.give_up), calls);
}

/// Calls of the two take turns, each with the next copy of the layer.
Json TwoBatches::in_a_row(MegaBed& bed, const TwoPlan& plan) {
  plan.begin("two batches in a row");
  poison();
  const int calls = plan.calls(bed.copies());
  const auto turns = [&] {
    for (int call = 0; call < calls; ++call) {
      attend(plan, 1, false);
      bed.queue(2 * call);
      attend(plan, 1, false);
      bed.queue_other(2 * call + 1, other_);
    }
  };
  const Json times = timed(plan, bed.is_eager(), calls, turns, [&] { bed.check(); });
  expected_ = outputs();
  return times;
}

/// Each on a stream of its own. An eager one's host begins both calls before it waits for the counts of either.
Json TwoBatches::beside(MegaBed& one, MegaBed& other, const TwoPlan& plan, int calls) {
  const auto check = [&] {
    one.check();
    other.check();
  };
  if (one.is_eager()) {
    const auto turns = [&] {
      for (int call = 0; call < calls; ++call) {
        attend(plan, 1, false);
        one.begin(call);
        attend(plan, 1, true);
        other.begin(call);
        one.end(call);
        other.end(call);
      }
    };
    return timed(plan, true, calls, turns, check);
  }
  const auto queue = [&](MegaBed& bed, bool second_stream) {
    for (int call = 0; call < calls; ++call) {
      attend(plan, 1, second_stream);
      bed.queue(call);
    }
  };
  Replay replay(
      lanes_, [&] { queue(one, false); }, [&] { queue(other, true); });
  return times_of(replay.run(plan.replays, check, plan.give_up), calls);
}

Json TwoBatches::at_once(const TwoPlan& plan) {
  const bool waits_with_products = plan.way.way == Way::mega || plan.way.way == Way::automatic;
  const auto gpus = static_cast<int>(lanes_.gpus());
  const SmShare share = share_of_two(waits_with_products, lanes_.sms(), (first_.ranks() + gpus - 1) / gpus, plan.exchange_sms);
  plan.begin("the making of two contexts");
  const int copies = (plan.copies + 1) / 2;  // both have some
  MegaBed one(lanes_, first_, plan.source, plan.way, tokens_, plan.memory, copies, {share, false});
  MegaBed other(lanes_, other_, plan.source, plan.way, tokens_, plan.memory, one.copies(), {share, true});
  plan.begin("two batches at once");
  one.call(0, false, plan.give_up);
  other.call(0, false, plan.give_up);
  poison();
  const int calls = plan.calls(std::min(one.copies(), other.copies()));
  Json entry{{"exchange_sms", share.exchange},
             {"product_ctas", waits_with_products ? Json() : Json(share.products)},
             {"layer_copies", {one.copies(), other.copies()}},
             {"weight_bytes", one.weight_bytes() + other.weight_bytes()},
             {"heap_bytes", 2 * plan.memory.heap_bytes(first_.ranks())}};
  entry.update(beside(one, other, plan, calls));
  const std::vector<RankOutputs> found = outputs();
  if (expected_.empty() || plan.way.combine == Combine::add) return entry;  // added results have some order's bits
  const std::size_t off = different(found[0], expected_[0]) + different(found[1], expected_[1]);
  entry["equals_in_a_row"] = off == 0;
  if (off > 0) throw Error(ErrorKind::check, fmt::format("{} outputs of two batches at once have other bits than in a row", off));
  return entry;
}

Json TwoBatches::as_one(const TwoPlan& plan) {
  plan.begin("the making of one batch of double size");
  MegaBed bed(lanes_, both_, plan.source, plan.way, 2 * tokens_, plan.memory_of_both, plan.copies);
  plan.begin("one batch of double size");
  both_.poison_outputs();
  bed.call(0, false, plan.give_up);
  const int calls = plan.calls(bed.copies());
  const auto work = [&] {
    for (int call = 0; call < calls; ++call) {
      attend(plan, 2, false);
      bed.queue(call);
    }
  };
  Json entry{{"tokens", 2 * tokens_}, {"layer_copies", bed.copies()}};
  entry.update(timed(plan, bed.is_eager(), calls, work, [&] { bed.check(); }));
  if (const unsigned long long bad = both_.bad_outputs(2 * tokens_); bad > 0)
    throw Error(ErrorKind::check, fmt::format("{} outputs of double size were not written or are not finite", bad));
  return entry;
}

Json TwoBatches::compare(std::unique_ptr<MegaBed> alone, const TwoPlan& plan) {
  Json two{{"graph", !alone->is_eager()}, {"attention", plan.attention == nullptr ? Json() : plan.attention->json()}};
  expected_.clear();
  two["in_a_row"] = part([&] { return in_a_row(*alone, plan); });
  alone.reset();
  two["at_once"] = part([&] { return at_once(plan); });
  two["as_one"] = part([&] { return as_one(plan); });
  set_ratio(two["at_once"], "over_in_a_row", two["in_a_row"]);
  set_ratio(two["at_once"], "over_as_one", two["as_one"]);
  if (has_times(two["at_once"]) && has_times(two["in_a_row"]))
    two["at_once"]["gained_us"] = two["in_a_row"]["median_us"].get<double>() - two["at_once"]["median_us"].get<double>();
  return two;
}

std::string two_line(const Json& two) {
  const Json& once = two["at_once"];
  const std::string attention =
      two["attention"].is_null() ? "" : fmt::format(", {} us for the attention of each", two["attention"]["us"].get<int>());
  std::string text = "two batches" + attention + ": " + told(once, "at once");
  if (has_times(once)) {
    text += fmt::format(" us (SMs each: {} for what waits", once["exchange_sms"].get<int>());
    text += once["product_ctas"].is_null() ? ")" : fmt::format(", {} for products)", once["product_ctas"].get<int>());
  }
  text += ", " + told(two["in_a_row"], "in a row");
  if (once.count("over_in_a_row") > 0) {
    text += fmt::format(" ({:.3f} of it, {:.2f} us gained)", once["over_in_a_row"].get<double>(), once["gained_us"].get<double>());
  }
  text += ", " + told(two["as_one"], "as one");
  if (once.count("over_as_one") > 0) text += fmt::format(" ({:.3f} of it)", once["over_as_one"].get<double>());
  return text;
}

std::string two_wrong(const Json& two) {
  for (const auto& [name, part] : two.items()) {
    if (part.is_object() && part.count("wrong") > 0) return name + ": " + part["wrong"].get<std::string>();
  }
  return {};
}

}  // namespace heddle::tool
