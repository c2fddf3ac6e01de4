#include "group.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <vector>

#include "rooms.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace heddle::python {

namespace {

using Pointer = std::shared_ptr<RankGroup>;

std::vector<Pointer> make_thread_group(int ranks, double deadline) {
  std::vector<Pointer> members;
  for (auto& group : create_thread_group(ranks, {deadline_of(deadline)})) {
    members.push_back(make_shared_unlocked<RankGroup>(std::move(group)));
  }
  return members;
}

Pointer join(const std::string& name, int rank, int ranks, double deadline) {
  const GroupOptions options{deadline_of(deadline)};
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<RankGroup>(join_process_group(name, rank, ranks, options));
}

void barrier(RankGroup& self, const std::string& what) {
  const RankGroup::Turn turn(self, "barrier");
  const nb::gil_scoped_release others_run;
  self.group().barrier(what);
}

std::vector<std::string> exchange(RankGroup& self, const std::string& text, const std::string& what) {
  const RankGroup::Turn turn(self, "exchange");
  const nb::gil_scoped_release others_run;
  return self.group().exchange(text, what);
}

}  // namespace

void bind_group(nb::module_& module) {
  nb::class_<RankGroup>(
      module, "Group",
      "One rank's membership of a group on the host engine (thread_group, join_group, heddle.join). barrier, "
      "exchange and everything that says it is collective is called by every live rank in the same order; each "
      "ends within the deadline or raises FaultError naming the rank that did not come. One thread at a time uses it.")
      .def_prop_ro("rank", [](RankGroup& self) { return self.group().rank(); })
      .def_prop_ro("ranks", [](RankGroup& self) { return self.group().ranks(); })
      .def_prop_rw(
          "deadline", [](RankGroup& self) { return std::chrono::duration<double>(self.group().deadline()).count(); },
          [](RankGroup& self, double seconds) { self.group().set_deadline(deadline_of(seconds)); },
          "Seconds of the longest wait on any word.")
      .def_prop_ro(
          "live", [](RankGroup& self) { return self.group().live(); }, "Which ranks go on after the last reset.")
      .def("barrier", &barrier, "what"_a = "a barrier", "Collective: waits for all live ranks; `what` names it in errors.")
      .def("exchange", &exchange, "text"_a, "what"_a = "an exchange",
           "Collective: every rank's text (at most 4,000 bytes), by rank; '' of dead ranks.");
  module.def("thread_group", &make_thread_group, "ranks"_a, "deadline"_a = 30.0,
             "A group of `ranks` threads of this process, a member each. deadline: seconds.");
  module.def(
      "join_group", &join, "name"_a, "rank"_a, "ranks"_a, "deadline"_a = 30.0,
      "Collective: joins the group of processes of this machine that is called `name`. deadline: seconds. FaultError if others "
      "do not come, InputError if the name is taken or the numbers disagree.");
}

}  // namespace heddle::python
