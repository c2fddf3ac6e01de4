#include "trace/cuda_arena.hpp"

#if defined(HEDDLE_TRACE)

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "trace/cuda_clock.hpp"
#include "trace/words.hpp"

namespace heddle::trace {

using cuda::check;

namespace {

struct Names {
  Arena* arena = nullptr;
  const char* first = "kernel";
  const char* second = nullptr;
  int rank = 0;
};
Names& names() {
  thread_local Names of_this_thread;
  return of_this_thread;
}

/// A launch's part of the arena.
struct Part {
  Launch launch;
  const char* kernel = nullptr;
  std::size_t first = 0;  ///< record

  int warps() const { return launch.threads / 32; }
  std::size_t room() const { return static_cast<std::size_t>(launch.spans_a_warp + records_of_head); }
  std::size_t lanes() const {
    return static_cast<std::size_t>(launch.ranks) * static_cast<std::size_t>(launch.ctas) * static_cast<std::size_t>(warps());
  }
};

const DeviceLaneHead& head_of(const DeviceRecord* lane) { return *reinterpret_cast<const DeviceLaneHead*>(lane); }

/// Nanoseconds of an SM's cycles, by the two pairs of stamps of every lane of a CTA. All SMs of a GPU run at one rate; globaltimer
/// goes in steps, which the mean over the CTA's pairs evens out. Times are the host's.
class SmClock {
 public:
  SmClock(const std::vector<const DeviceLaneHead*>& heads, double rate, const ClockFit& host)
      : host_(host), cycle_(heads.front()->clocks[0]), nanosecond_(heads.front()->nanoseconds[0]), rate_(rate) {
    double sum = 0;
    for (const DeviceLaneHead* head : heads) {
      for (int which = 0; which < 2; ++which) {
        const auto cycles = static_cast<double>(static_cast<std::int64_t>(head->clocks[which] - cycle_));
        sum += static_cast<double>(static_cast<std::int64_t>(head->nanoseconds[which] - nanosecond_)) - cycles * rate_;
      }
    }
    offset_ = sum / static_cast<double>(2 * heads.size());
  }
  std::int64_t at(std::uint64_t cycle) const {
    const auto cycles = static_cast<double>(static_cast<std::int64_t>(cycle - cycle_));
    return host_.host_time(static_cast<std::int64_t>(nanosecond_) + std::llround(offset_ + cycles * rate_));
  }
  std::int64_t length(std::uint32_t cycles) const { return static_cast<std::int64_t>(static_cast<double>(cycles) * rate_); }

 private:
  const ClockFit& host_;
  std::uint64_t cycle_;
  std::uint64_t nanosecond_;
  double rate_;
  double offset_ = 0;
};

Span span_of(const DeviceRecord& record, const SmClock& clock, int ring_blocks) {
  Span span;
  span.kind = static_cast<Kind>(record.kind);
  span.begin = clock.at(record.end - record.ticks);
  span.end = clock.at(record.end);
  if (span.kind == Kind::wait) {
    span.word = {static_cast<WordKind>(record.what), record.expert, record.block};
    return span;
  }
  const auto waits = waits_of(span.kind);
  for (int which = 0; which < summed_waits; ++which) {
    if (waits[static_cast<std::size_t>(which)] != nullptr) span.waited[which] = clock.length(record.waited[which]);
  }
  const int block = ring_blocks == 0 ? record.block : (record.block >> 16) * ring_blocks + (record.block & 0xFFFF);
  span.task = {static_cast<Product>(record.what), record.expert, block, record.part, record.rows};
  return span;
}

Lane lane_of(const DeviceRecord* records, const Part& part, const LaneName& name, const SmClock& clock) {
  const DeviceLaneHead& head = head_of(records);
  Lane lane;
  lane.name = name;
  lane.kernel = part.kernel;
  lane.begin = clock.at(head.clocks[0]);
  lane.end = clock.at(head.clocks[1]);
  const auto kept = std::min<std::int64_t>(head.spans, part.launch.spans_a_warp);
  lane.lost = head.spans - kept;
  for (std::int64_t i = 0; i < kept; ++i)
    lane.spans.push_back(span_of(records[records_of_head + i], clock, part.launch.ring_blocks));
  return lane;
}

/// Of a GPU, in a call.
struct Rates {
  double cycle = 1.0;  ///< nanoseconds
  ClockFit host;
};

}  // namespace

struct Arena::Impl {
  int device = 0;
  DeviceRecord* records = nullptr;
  std::size_t room = 0;
  std::size_t used = 0;
  int refused = 0;  ///< launches
  std::vector<Part> parts;
  ClockOffset before;  ///< of its clock, when the arena was made

  void collect(const Part& part, int number, const DeviceRecord* all, const Rates& rates, Recorder& to) const;
  double rate(const std::vector<DeviceRecord>& all) const;
};

Arena::Arena(int device, std::size_t bytes) : impl_(std::make_unique<Impl>()) {
  impl_->device = device;
  impl_->room = bytes / sizeof(DeviceRecord);
  const cuda::DeviceScope scope(device);
  check(cudaMalloc(reinterpret_cast<void**>(&impl_->records), bytes), "memory for a trace");
  check(cudaMemset(impl_->records, 0, bytes), "zeroing of a trace");
  check(cudaDeviceSynchronize(), "zeroing of a trace");
  impl_->before = offset_of(sample_clock(device));
}
Arena::~Arena() {
  const cuda::DeviceScope scope(impl_->device);
  cudaFree(impl_->records);
}

DeviceTrace Arena::take(const Launch& launch, const char* kernel) {
  const Part part{launch, kernel, impl_->used};
  const std::size_t wanted = part.lanes() * part.room();
  if (wanted > impl_->room - impl_->used) {
    ++impl_->refused;
    return {};
  }
  impl_->used += wanted;
  impl_->parts.push_back(part);
  return {impl_->records + part.first, static_cast<std::int32_t>(part.room())};
}

/// Nanoseconds a cycle, by the lane that lasted longest.
double Arena::Impl::rate(const std::vector<DeviceRecord>& all) const {
  double longest = 0;
  double rate = 1.0;
  for (const Part& part : parts) {
    for (std::size_t i = 0; i < part.lanes(); ++i) {
      const DeviceLaneHead& head = head_of(all.data() + part.first + i * part.room());
      const auto cycles = static_cast<double>(head.clocks[1] - head.clocks[0]);
      if (head.opened == 0 || head.clocks[1] == 0 || cycles <= longest) continue;  // never closed: its clocks are no length
      longest = cycles;
      rate = static_cast<double>(head.nanoseconds[1] - head.nanoseconds[0]) / cycles;
    }
  }
  return rate;
}

void Arena::Impl::collect(const Part& part, int number, const DeviceRecord* all, const Rates& rates, Recorder& to) const {
  const auto lane_at = [&](int cta, int warp) {
    return all + part.first + static_cast<std::size_t>(cta * part.warps() + warp) * part.room();
  };
  for (int cta = 0; cta < part.launch.ranks * part.launch.ctas; ++cta) {
    std::vector<const DeviceLaneHead*> heads;
    for (int warp = 0; warp < part.warps(); ++warp) {
      const DeviceLaneHead& head = head_of(lane_at(cta, warp));
      if (head.opened != 0 && head.clocks[1] != 0) heads.push_back(&head);
    }
    if (heads.empty()) continue;
    const SmClock clock(heads, rates.cycle, rates.host);
    for (const DeviceLaneHead* head : heads) {
      const LaneName name{part.launch.first_rank + cta / part.launch.ctas, static_cast<Role>(head->role),
                          static_cast<int>(head->number), cta % part.launch.ctas, number};
      to.add(lane_of(reinterpret_cast<const DeviceRecord*>(head), part, name, clock));
    }
  }
}

void Arena::collect(Recorder& to) const {
  if (impl_->refused > 0) {
    throw InputError(
        fmt::format("the time stamps of {} kernels find no room in the {} MiB of GPU {} that are set apart for them; "
                    "trace fewer ranks a GPU",
                    impl_->refused, impl_->room * sizeof(DeviceRecord) >> 20, impl_->device));
  }
  const cuda::DeviceScope scope(impl_->device);
  std::vector<DeviceRecord> all(impl_->used);
  check(cudaMemcpy(all.data(), impl_->records, impl_->used * sizeof(DeviceRecord), cudaMemcpyDeviceToHost), "copying of a trace");
  const Rates rates{impl_->rate(all), ClockFit(impl_->before, offset_of(sample_clock(impl_->device)))};
  to.note_clock(impl_->device, rates.host.uncertainty());
  int number = 0;
  for (const Part& part : impl_->parts) impl_->collect(part, number++, all.data(), rates, to);
}

Recording::Recording(Arena* arena) : outer_(std::exchange(names().arena, arena)) {}
Recording::~Recording() { names().arena = outer_; }

void name_launches(const char* first, const char* second, int rank) {
  Names& mine = names();
  mine.first = first;
  mine.second = second == nullptr ? first : second;
  mine.rank = rank;
}

DeviceTrace next_launch(const Launch& launch) {
  const Names& mine = names();
  if (mine.arena == nullptr) return {};
  Launch named = launch;
  named.first_rank += mine.rank;
  return mine.arena->take(named, launch.second ? mine.second : mine.first);
}

}  // namespace heddle::trace

#endif
