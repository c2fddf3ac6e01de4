// Memory of a GPU for what kernels record, and the way of their time stamps into a host's recorder. In builds without HEDDLE_TRACE
// all of it does nothing.
#pragma once

#include <cstddef>
#include <memory>

#include "trace/device.hpp"
#include "trace/recorder.hpp"

namespace heddle::trace {

/// A kernel of a call, as it is launched.
struct Launch {
  int first_rank = 0;
  int ranks = 1;
  int ctas = 1;  ///< a rank
  int threads = 32;
  int spans_a_warp = 512;  ///< for which there is room
  int ring_blocks = 0;     ///< of the fused layer: how block numbers are put together; 0: they are whole
  bool second = false;     ///< of the two names of launches
};

#if defined(HEDDLE_TRACE)

/// One GPU's. Launches take their part of it one after the other, until it is full; those behind that record nothing, and collect
/// says so.
class Arena {
 public:
  explicit Arena(int device, std::size_t bytes = std::size_t{2} << 30);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  DeviceTrace take(const Launch& launch, const char* kernel);
  /// The lanes of all launches, when the GPU is at rest. Throws InputError where some had no room.
  void collect(Recorder& to) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// While it lives, what this thread launches records into the arena.
class Recording {
 public:
  explicit Recording(Arena* arena);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  Arena* outer_;
};

/// How this thread's next launches are called: texts that live for ever. `rank`: whose they are where a launch itself does not
/// know.
void name_launches(const char* first, const char* second = nullptr, int rank = 0);
DeviceTrace next_launch(const Launch& launch);

#else

class Arena {
 public:
  explicit Arena(int, std::size_t = 0) {}
  void collect(Recorder&) const {}
};
class Recording {
 public:
  explicit Recording(Arena*) {}
};
inline void name_launches(const char*, const char* = nullptr, int = 0) {}
inline DeviceTrace next_launch(const Launch&) { return {}; }

#endif

/// Before `call` is launched: where its kernel records, if this thread is recording.
template <class Call>
void record_launch([[maybe_unused]] Call& call, [[maybe_unused]] const Launch& launch) {
  if constexpr (kernels_record) call.recorded = next_launch(launch);
}

}  // namespace heddle::trace
