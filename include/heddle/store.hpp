// What a group knows although ranks come and go: a few words that outlive any rank and change by compare-and-set. Ranks that lost
// another one agree here (docs/recovery.md); nothing of a call lies here.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace heddle {

/// Which word. All are 0 when a group begins.
struct StoreKey {
  enum class Kind : std::uint8_t {
    called,    ///< the roll call that all ranks are called to
    asked,     ///< the roll call that a rank which is out asks for
    mask,      ///< who is live: index n has ranks [32 n, 32 n + 32)
    here,      ///< of rank `index`: the roll call that it came to
    finished,  ///< of rank `index`: steps that it has finished
    unheard,   ///< of rank `index`: nodes that it did not hear when it met the others
  };
  Kind kind = Kind::called;
  int index = 0;
};

/// Words of 64 bits that all ranks of a group read and write. Reads and changes of all words have one order on which ranks agree,
/// and what a rank wrote to memory before a change is there for who sees the change. No rank that stops or dies, wherever it is in
/// a call, keeps another one from its own. One handle a rank, used by one thread.
class Store {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Store() = default;
  virtual std::uint64_t get(const StoreKey& key) const = 0;
  /// Sets the word if it holds `expected`. Otherwise returns false, and `expected` is what it held.
  virtual bool compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) = 0;
  /// Asks `there` now and whenever a word may have changed, until it says true; false where `end` came first.
  virtual bool wait(const std::function<bool()>& there, Clock::time_point end) = 0;
};

/// A store for a group of so many ranks in a directory that all of them reach, such as one on a shared file system
/// (docs/recovery.md says how that must be mounted). The directory is new or empty when the first of a group's ranks opens it, and
/// is the caller's to remove; its parent is there. The store may be used by several threads. Throws InputError where no store can
/// be made there, or where there is one for another number of ranks; later, where the directory cannot be reached, calls throw
/// Error of kind fault.
std::shared_ptr<Store> open_directory_store(const std::string& directory, int ranks);

}  // namespace heddle
