#include "doctor_tests.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>

#include "against_reference.hpp"
#include "children.hpp"
#include "heddle/error.hpp"
#include "heddle/group.hpp"
#include "host_calls.hpp"
#include "job.hpp"
#include "routing/file_bytes.hpp"
#include "signal/host_worker.hpp"

#ifdef HEDDLE_CUDA
#include "cuda_job.hpp"
#endif

namespace heddle::tool {

namespace {

using doctor::TestFacts;
using Clock = std::chrono::steady_clock;

constexpr int deadline_ms = 5000;

/// Runs `body`, whose text is what there is to say of a success.
TestFacts attempt_test(const std::string& name, const std::function<std::string()>& body) {
  TestFacts test{name, TestFacts::State::passed, 0, ""};
  const auto since = Clock::now();
  try {
    test.message = body();
  } catch (const std::exception& error) {
    test.state = TestFacts::State::failed;
    test.message = error.what();
  }
  test.seconds = std::chrono::duration<double>(Clock::now() - since).count();
  return test;
}

/// Every rank writes its part, and reads all parts.
std::string test_heap() {
  constexpr int ranks = 4;
  constexpr std::size_t words = 1 << 15;
  const auto written = [](int rank, std::size_t i) { return static_cast<std::uint64_t>(rank) << 32 ^ i * 0x9E3779B97F4A7C15; };
  on_thread_group(ranks, deadline_ms, "ranks as threads", [&](Group& group) {
    const HeapMapping heap = group.create_heap(words * sizeof(std::uint64_t));
    for (std::size_t i = 0; i < words; ++i) heap.view.mine<std::uint64_t>(0)[i] = written(group.rank(), i);
    group.barrier("written");
    for (int rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = 0; i < words; ++i) {
        const std::uint64_t seen = heap.view.at<std::uint64_t>(rank, 0)[i];
        if (seen != written(rank, i))
          throw Error(ErrorKind::check, fmt::format("rank {} reads {:#x} at word {} of rank {}, which wrote {:#x}", group.rank(),
                                                    seen, i, rank, written(rank, i)));
      }
    }
    group.barrier("read");
    group.release_heap(heap);
  });
  return fmt::format("{} ranks, {} KiB each", ranks, words * sizeof(std::uint64_t) / 1024);
}

/// A word goes around a ring of ranks, as the protocols publish and acquire them.
std::string test_words() {
  constexpr int ranks = 4, rounds = 250;
  on_thread_group(ranks, deadline_ms, "ranks as threads", [&](Group& group) {
    Workspace workspace(group, 8192, "heddle doctor");
    const HostTeam team{workspace.view(), 1, group.deadline(), nullptr, 0, nullptr};
    HostWorker worker(team, 0);
    worker.start(CallPart::dispatch_send);
    const int before = (group.rank() + ranks - 1) % ranks, next = (group.rank() + 1) % ranks;
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      std::uint32_t seen = 0;
      const bool first = group.rank() == 0;
      if (first) worker.publish(workspace.view().at<Word>(next, 4096), round);
      if (!worker.acquire_at_least(workspace.view().mine<Word>(4096), {WordKind::team, before, -1}, round, seen))
        workspace.throw_if_aborted();
      if (!first) worker.publish(workspace.view().at<Word>(next, 4096), round);
    }
    worker.start(CallPart::combine);
    workspace.close();
  });
  return fmt::format("{} rounds of {} ranks", rounds, ranks);
}

LayerArguments small_layer(int ranks, int tokens) {
  LayerArguments layer;
  layer.preset = "deepseek-v4-flash";
  layer.hidden = 512;
  layer.intermediate = 256;
  layer.experts = 32;
  layer.ranks = ranks;
  layer.tokens = tokens;
  layer.routing = "uniform";
  layer.seed = 1;
  layer.deadline_ms = deadline_ms;
  return layer;
}

/// One way that moves rows and computes apart, and the one that does both at once.
std::string test_layer(const LayerArguments& arguments) {
  const Inputs inputs = load_inputs(arguments);
  std::string text;
  for (const Way way : {Way::low_latency, Way::mega}) {
    LayerOptions options = inputs.options;
    options.way = way;
    const JobResult result = run_job(inputs, options);
    const double error = compare(result.output, reference_of(inputs, result.options, result.exchange)).relative_error;
    const double bound = bound_of(inputs, options);
    const std::string one = fmt::format("{} {:.1e} off the reference (at most {:.1e})", name(way), error, bound);
    if (!(error <= bound)) throw Error(ErrorKind::check, one);
    text += (text.empty() ? "" : ", ") + one;
  }
  return text;
}

/// A test of some GPUs in a process of its own, which tells its result through a pipe.
class GpuTest {
 public:
  explicit GpuTest(std::vector<int> gpus) : gpus_(std::move(gpus)), child_(1) {
    int ends[2];
    if (pipe(ends) != 0) throw InputError("cannot make a pipe for a test");
    from_ = ends[0];
    std::fflush(nullptr);
    child_.start(0, [&] { run(ends[1]); });
    close(ends[1]);
  }
  ~GpuTest() { close(from_); }
  GpuTest(const GpuTest&) = delete;

  /// Waits for the end of the test, and ends it where it takes too long, counted from its start: others may have been waited for
  /// meanwhile.
  TestFacts result() {
    constexpr std::chrono::milliseconds patience(30000);
    TestFacts test{title(), TestFacts::State::failed, 0, ""};
    std::string told;
    pollfd wait{from_, POLLIN, 0};
    char part[512];
    bool in_time = true;
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(begin_ + patience - Clock::now()).count();
      in_time = poll(&wait, 1, static_cast<int>(std::max<std::int64_t>(left, 0))) > 0;
      if (!in_time) break;
      const ssize_t bytes = read(from_, part, sizeof part);
      if (bytes <= 0) break;
      told.append(part, static_cast<std::size_t>(bytes));
    }
    if (told.size() <= sizeof test.seconds) {
      test.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
      test.message = fmt::format("the test's process {} after {:.1f} s", in_time ? "ended without a word" : "was ended: it hung",
                                 test.seconds);
      return test;
    }
    if (told.front() == '+') test.state = TestFacts::State::passed;
    test.seconds = value_in<double>(told, 1);
    test.message = told.substr(1 + sizeof test.seconds);
    return test;
  }

 private:
  std::string title() const {
    std::string text = gpus_.size() == 1 ? "gpu" : "gpus";
    for (const int gpu : gpus_) text += fmt::format(" {}", gpu);
    return text + ": layer";
  }

  /// In the child, which sees these GPUs only: they are the first ones there, whatever they are to others.
  void run(int to) const {
    setenv("CUDA_VISIBLE_DEVICES", visible().c_str(), 1);
    LayerArguments arguments = small_layer(static_cast<int>(gpus_.size()), 128 * static_cast<int>(gpus_.size()));
    arguments.engine = "cuda";
    arguments.gpus = arguments.ranks;
    const TestFacts test = attempt_test("", [&] { return test_layer(arguments); });
    std::string text(1, test.state == TestFacts::State::passed ? '+' : '-');
    text.append(reinterpret_cast<const char*>(&test.seconds), sizeof test.seconds);
    text += test.message;
    [[maybe_unused]] const ssize_t bytes = write(to, text.data(), text.size());
  }

  /// By the names that CUDA_VISIBLE_DEVICES gives them, where it is set.
  std::string visible() const {
    std::vector<std::string> names;
    if (const char* given = std::getenv("CUDA_VISIBLE_DEVICES")) {
      for (const char* at = given; *at != '\0'; ++at) {
        if (at == given || *at == ',') names.emplace_back();
        if (*at != ',') names.back() += *at;
      }
    }
    std::vector<std::string> wanted;
    for (const int gpu : gpus_) {
      const auto number = static_cast<std::size_t>(gpu);
      wanted.push_back(number < names.size() ? names[number] : fmt::format("{}", gpu));
    }
    return fmt::format("{}", fmt::join(wanted, ","));
  }

  std::vector<int> gpus_;
  Children child_;
  Clock::time_point begin_ = Clock::now();
  int from_ = -1;
};

int gpus_to_test() {
#ifdef HEDDLE_CUDA
  return gpus_present();
#else
  return 0;
#endif
}

}  // namespace

std::vector<TestFacts> test_host() {
  return {attempt_test("host: heap", test_heap), attempt_test("host: words", test_words),
          attempt_test("host: layer", [] { return test_layer(small_layer(4, 64)); })};
}

std::vector<TestFacts> test_gpus() {
  const int count = gpus_to_test();
  std::vector<TestFacts> results;
  std::vector<std::unique_ptr<GpuTest>> alone;
  std::vector<int> all;
  for (int gpu = 0; gpu < count; ++gpu) {
    alone.push_back(std::make_unique<GpuTest>(std::vector{gpu}));
    all.push_back(gpu);
  }
  for (const auto& test : alone) results.push_back(test->result());
  if (count < 2) return results;
  results.push_back(GpuTest(all).result());
  if (count == 2 || results.back().state == TestFacts::State::passed) return results;
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) results.push_back(GpuTest({a, b}).result());
  }
  return results;
}

}  // namespace heddle::tool
