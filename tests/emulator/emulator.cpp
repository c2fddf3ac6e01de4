#include "emulator/emulator.hpp"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/device.hpp"

namespace heddle::emulator {
namespace {

constexpr std::size_t stack_bytes = 256 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(stack_bytes);
  bool done = false;
  const char* where = "its beginning";
};

struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};

/// What the threads of a group brought to their last exchange and to the one before, which slower ones may still be reading.
struct Group {
  std::vector<std::uint64_t> brought[2];
  std::vector<unsigned> exchanges;  ///< by thread
};

/// One CTA while it runs.
struct Machine {
  std::mt19937 random;
  Products products = Products::at_wait;
  std::vector<Fiber> fibers;
  std::vector<std::function<void()>> delayed;
  std::map<std::uintptr_t, Meeting> meetings;
  std::map<std::pair<int, int>, Group> groups;
  const std::function<void()>* kernel = nullptr;
  ucontext_t scheduler;
  int current = 0;
  bool moved = false;
};

Machine* machine = nullptr;

void run_fiber() {
  (*machine->kernel)();
  Fiber& fiber = machine->fibers[static_cast<std::size_t>(machine->current)];
  fiber.done = true;
  machine->moved = true;
  swapcontext(&fiber.context, &machine->scheduler);
}

void run_some_delayed() {
  std::vector<std::function<void()>> chosen;
  for (std::size_t i = 0; i < machine->delayed.size();) {
    if (machine->random() % 3 == 0) {
      chosen.push_back(std::move(machine->delayed[i]));
      machine->delayed.erase(machine->delayed.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  for (const auto& work : chosen) work();
  if (!chosen.empty() || !machine->delayed.empty()) machine->moved = true;
}

std::string where_all_are() {
  std::map<std::string, int> places;
  for (const Fiber& fiber : machine->fibers) places[fiber.done ? "the end" : fiber.where] += 1;
  std::string text = "no thread of the CTA gets any further:";
  for (const auto& [place, count] : places) text.append(" ").append(std::to_string(count)).append(" at ").append(place).append(";");
  return text;
}

void switch_to(int index) {
  machine->current = index;
  threadIdx.x = static_cast<unsigned>(index);
  swapcontext(&machine->scheduler, &machine->fibers[static_cast<std::size_t>(index)].context);
}

void run_cta() {
  std::vector<int> order(machine->fibers.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  while (true) {
    machine->moved = false;
    // Warps in random order, the threads of a warp in theirs: as diverging threads may run, but cheaper than all at random.
    std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(machine->random() % order.size()), order.end());
    bool all_done = true;
    for (const int index : order) {
      if (machine->fibers[static_cast<std::size_t>(index)].done) continue;
      all_done = false;
      switch_to(index);
    }
    if (all_done) return;
    run_some_delayed();
    if (!machine->moved) throw std::runtime_error(where_all_are());
  }
}

}  // namespace

namespace {
void launch_cta(const Launch& launch, int cta, const std::function<void()>& kernel) {
  Machine one;
  one.random.seed(launch.seed + static_cast<unsigned>(cta));
  one.products = launch.products;
  one.kernel = &kernel;
  one.fibers.resize(static_cast<std::size_t>(launch.threads));
  machine = &one;
  blockIdx = {static_cast<unsigned>(cta), 0, 0};
  gridDim = {static_cast<unsigned>(launch.ctas), 1, 1};
  blockDim = {static_cast<unsigned>(launch.threads), 1, 1};
  for (Fiber& fiber : one.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  run_cta();
  machine = nullptr;
}
}  // namespace

void launch(const Launch& launch, const std::function<void()>& kernel) {
  for (int cta = 0; cta < launch.ctas; ++cta) launch_cta(launch, cta, kernel);
}

void yield(const char* what) {
  Fiber& fiber = machine->fibers[static_cast<std::size_t>(machine->current)];
  fiber.where = what;
  swapcontext(&fiber.context, &machine->scheduler);
}

void progress() { machine->moved = true; }

void arrive(std::uintptr_t barrier, int threads) {
  Meeting& meeting = machine->meetings[barrier];
  progress();
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.generation;
  }
}

void meet(std::uintptr_t barrier, int threads, const char* what) {
  const Meeting& meeting = machine->meetings[barrier];
  const unsigned generation = meeting.generation;
  arrive(barrier, threads);
  while (meeting.generation == generation) yield(what);
}

int thread() { return machine->current; }
Products products() { return machine->products; }

const std::uint64_t* exchange(std::uint64_t mine, int size) {
  const int number = thread() / size;
  const auto place = static_cast<std::size_t>(thread() % size);
  Group& group = machine->groups[{size, number}];
  if (group.exchanges.empty()) {
    group.exchanges.resize(static_cast<std::size_t>(size));
    for (auto& values : group.brought) values.resize(static_cast<std::size_t>(size));
  }
  auto& values = group.brought[group.exchanges[place]++ % 2];
  values[place] = mine;
  meet(static_cast<std::uintptr_t>(number) * 1024 + static_cast<std::uintptr_t>(size), size,
       "an exchange within a group of threads");
  return values.data();
}

void later(std::function<void()> work) {
  machine->delayed.push_back(std::move(work));
  progress();
}

}  // namespace heddle::emulator
