// heddle bench all: the flags, and one measurement after the other.
#include "suite.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <new>

#include "bench.hpp"
#include "command.hpp"
#include "gpu_job.hpp"
#include "heddle/error.hpp"
#include "provenance.hpp"
#include "suite_file.hpp"

namespace heddle::tool {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Those of `list` that were asked for. Throws InputError that lists the names.
std::vector<Measurement> wanted(const std::vector<Measurement>& list, const std::vector<std::string>& only) {
  std::vector<Measurement> some;
  for (const Measurement& one : list) {
    if (only.empty() || std::find(only.begin(), only.end(), one.name) != only.end()) some.push_back(one);
  }
  for (const std::string& name : only) {
    if (std::any_of(list.begin(), list.end(), [&](const Measurement& one) { return one.name == name; })) continue;
    std::vector<std::string> names;
    for (const Measurement& one : list) names.push_back(one.name);
    throw InputError(fmt::format("--only: there is no measurement '{}' here; there are {}", name, fmt::join(names, ", ")));
  }
  return some;
}

/// One run of the suite.
class Suite {
 public:
  Suite(const SuiteArguments& a, SuiteFile& file, std::map<std::string, Runner> runners)
      : a_(a), file_(file), runners_(std::move(runners)) {}

  void all(const std::vector<Measurement>& list) {
    const std::vector<Measurement> todo = in_order(list);
    print_line(fmt::format("{}, {} of them there already; about {:.0f} s",
                           count_of(static_cast<std::int64_t>(list.size()), "measurement"), list.size() - todo.size(),
                           seconds_of(todo, 0)));
    for (std::size_t i = 0; i < todo.size(); ++i) {
      const double left = a_.budget ? *a_.budget - seconds_since(begin_) : 0;
      if (a_.budget && todo[i].seconds > left) {
        print_line(fmt::format("\n[{}/{}] {}: about {:.0f} s, but {:.0f} s of the budget are left; not now", i + 1, todo.size(),
                               todo[i].name, todo[i].seconds, std::max(0.0, left)));
        ++postponed_;
        continue;
      }
      print_line(fmt::format("\n[{}/{}] {}: {} {} (about {:.0f} s; {:.0f} s for all that is left{})", i + 1, todo.size(),
                             todo[i].name, todo[i].benchmark, todo[i].arguments, todo[i].seconds, seconds_of(todo, i),
                             a_.budget ? fmt::format(", {:.0f} s of the budget", left) : ""));
      measure(todo[i]);
    }
    print_line(fmt::format("\n{} measured in {:.0f} s, {} not possible here, {} failed, {} left for another call{}", measured_,
                           seconds_since(begin_), impossible_, failed_.size(), postponed_,
                           file_.is_there() ? "; what " + a_.out + " has is shown by heddle report " + a_.out : ""));
  }

  /// Throws what the exit status should tell.
  void conclude() const {
    if (!failed_.empty()) throw Error(ErrorKind::fault, fmt::format("these measurements failed: {}", fmt::join(failed_, ", ")));
    if (!wrong_.empty())
      throw Error(ErrorKind::check, fmt::format("these measurements found wrong outputs: {}", fmt::join(wrong_, ", ")));
  }

 private:
  /// What is not there yet; what an earlier call did not come back from comes last.
  std::vector<Measurement> in_order(const std::vector<Measurement>& list) const {
    std::vector<Measurement> todo;
    for (const Measurement& one : list) {
      if (!file_.has(one)) todo.push_back(one);
    }
    std::stable_partition(todo.begin(), todo.end(), [&](const Measurement& one) { return !file_.was_interrupted(one); });
    return todo;
  }

  static double seconds_of(const std::vector<Measurement>& list, std::size_t from) {
    double sum = 0;
    for (; from < list.size(); ++from) sum += list[from].seconds;
    return sum;
  }

  void measure(const Measurement& what) {
    file_.begin(what);
    const auto begin = Clock::now();
    try {
      const Measured measured = runners_.at(what.benchmark)(what.arguments, a_.commit);
      file_.finish(what, measured, seconds_since(begin));
      if (measured.wrong) wrong_.push_back(what.name);
      if (measured.failed.empty()) {
        ++measured_;
      } else {
        print_line("failed: " + measured.failed);
        failed_.push_back(what.name);
      }
      print_line(fmt::format("{}: {:.1f} s", what.name, seconds_since(begin)));
    } catch (const InputError& error) {
      print_line(fmt::format("not measured here: {}", error.what()));
      file_.skip(what, error.what());
      ++impossible_;
    } catch (const std::bad_alloc&) {
      file_.skip(what, "not enough memory");
      ++impossible_;
    } catch (const std::exception& error) {
      print_line(fmt::format("failed: {}", error.what()));
      file_.skip(what, error.what());
      failed_.push_back(what.name);
    }
  }

  const SuiteArguments& a_;
  SuiteFile& file_;
  std::map<std::string, Runner> runners_;
  Clock::time_point begin_ = Clock::now();
  int measured_ = 0, impossible_ = 0, postponed_ = 0;
  std::vector<std::string> failed_, wrong_;
};

void print_list(const std::vector<Measurement>& list) {
  print_line(fmt::format("{:<14} {:>6}  {:<11} {}", "name", "about", "benchmark", "serves"));
  for (const Measurement& one : list)
    print_line(fmt::format("{:<14} {:>4.0f} s  {:<11} {}", one.name, one.seconds, one.benchmark, one.serves));
}

void bench_all(const SuiteArguments& a) {
  if (a.engine != "host" && a.engine != "cuda")
    throw InputError(fmt::format("--engine does not know '{}'; it takes host, cuda", a.engine));
  if (a.recordings.find_first_of(" \t\n\"'`") != a.recordings.npos)  // it is read as if it had been typed
    throw InputError(fmt::format("--recordings '{}': a folder without spaces and quotes in its name is needed", a.recordings));
  if (a.budget && *a.budget < 1) throw InputError(fmt::format("--budget {}: 1 second or more", *a.budget));
  const bool on_gpus = a.engine == "cuda";
  if (!on_gpus && a.gpus) throw InputError("--gpus goes with --engine cuda");
  const SuiteMachine machine = on_gpus ? gpu_machine(a.gpus) : SuiteMachine{host_machine_json(), 0};
  const std::vector<Measurement> list = wanted(on_gpus ? gpu_list(a, machine.gpus) : host_list(a), a.only);
  if (a.list) return print_list(list);
  if (a.out.empty()) throw InputError("give --out FILE for what is measured (or --list)");
  SuiteFile file(a.out, a, machine.json);
  Suite suite(a, file, on_gpus ? gpu_runners() : host_runners());
  suite.all(list);
  suite.conclude();
}

}  // namespace

void add_bench_all(CLI::App& bench) {
  auto a = std::make_shared<SuiteArguments>();
  auto* command = bench.add_subcommand(
      "all", "all that the report shows, as far as this machine can, into one file; a second call measures what is missing");
  command->add_option("--engine", a->engine, "host, cuda")->capture_default_str();
  command->add_option("--gpus", a->gpus, "GPUs to use (default: all)")->check(whole_number);
  command->add_option("--only", a->only, "measurements by name (--list)")->delimiter(',');
  command->add_option("--budget", a->budget, "seconds; what would not fit is left for another call")->check(whole_number);
  command->add_option("--recordings", a->recordings, "folder with recorded routing (*.ids.npy)")->capture_default_str();
  command->add_option("--commit", a->commit, "what the file says was measured; what is of another one is measured again");
  command->add_option("--out", a->out, "the file; what it has of this machine and commit stays");
  command->add_flag("--list", a->list, "only say what there is to measure");
  command->callback([a] { bench_all(*a); });
}

#ifndef HEDDLE_CUDA
SuiteMachine gpu_machine(const std::optional<int>&) { refuse_without_cuda("--engine cuda", ", or take --engine host"); }
std::map<std::string, Runner> gpu_runners() { return {}; }
#endif

}  // namespace heddle::tool
