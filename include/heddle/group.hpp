// A group of ranks, the symmetric heap they share, and the workspace of one context.
// On the host engine ranks are threads or processes on one memfd. GPUs have a workspace of their own (device.hpp).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/formats.hpp"
#include "heddle/store.hpp"

namespace heddle {

/// What every kernel and protocol sees of memory: all ranks' parts have one layout, so an address
/// is base + rank * stride + offset. A value type for host and device.
struct HeapView {
  std::byte* base = nullptr;
  std::size_t stride = 0;
  int rank = 0;  ///< the rank that looks
  int ranks = 0;

  template <class T>
  HEDDLE_HOST_DEVICE T* at(int of_rank, std::size_t offset) const {
    return reinterpret_cast<T*>(base + static_cast<std::size_t>(of_rank) * stride + offset);
  }
  template <class T>
  HEDDLE_HOST_DEVICE T* mine(std::size_t offset) const {
    return at<T>(rank, offset);
  }
  /// Which rank's part an address lies in; -1 for ordinary memory.
  HEDDLE_HOST_DEVICE int owner(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    if (byte < base || byte >= base + static_cast<std::size_t>(ranks) * stride) return -1;
    return static_cast<int>(static_cast<std::size_t>(byte - base) / stride);
  }
};

struct GroupOptions {
  /// Longest wait on any word, in a protocol or outside of one, before it ends in a FaultError.
  std::chrono::milliseconds deadline{30000};
};

/// The memory of one heap as one rank maps it. Unmapped when the last holder lets go.
struct HeapMapping {
  HeapView view;
  std::size_t bytes = 0;             ///< of each rank's part
  std::shared_ptr<const void> keep;  ///< the mapping itself
};

class NodeLink;

/// One rank's membership of a group. Collective calls (all of barrier, exchange, create_heap, release_heap, reset)
/// are made by every live rank in the same order; each ends within the deadline (reset: see there) or throws
/// FaultError naming the rank that did not come.
class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual std::chrono::nanoseconds deadline() const = 0;
  virtual void set_deadline(std::chrono::nanoseconds deadline) = 0;

  /// Out-of-band barrier; `what` names it in errors.
  virtual void barrier(const std::string& what) = 0;
  /// Out-of-band all-gather of a text of at most 4,000 bytes; dead ranks give "".
  virtual std::vector<std::string> exchange(const std::string& mine, const std::string& what) = 0;
  /// A zeroed symmetric heap of `bytes` a rank, pages reserved. Throws InputError with the sizes if
  /// memory does not suffice, on every rank.
  virtual HeapMapping create_heap(std::size_t bytes) = 0;
  /// Gives a heap's pages back. Collective: no rank may use it any more.
  virtual void release_heap(const HeapMapping& heap) = 0;
  /// Meets again after a fault, without the ranks that are not live (live[rank], all ranks alike). Waits up to
  /// three deadlines for the others. A reset that failed may be called again, by all live ranks.
  virtual void reset(const std::vector<bool>& live) = 0;
  virtual const std::vector<bool>& live() const = 0;

  /// reset() for a mask that ranks have agreed on (docs/recovery.md); `era` is its generation. Meets those of the same era alone: a
  /// rank that is behind gets a FaultError, here and in every collective call that it was still in.
  virtual void begin_era(std::uint32_t /*era*/, const std::vector<bool>& live) { reset(live); }

  // What else recovery needs. Not collective.
  /// Words that outlive any rank. Throws InputError where a group has none.
  virtual Store& store();
  /// After a reset, by a live rank: gives a heap's pages back that no live rank uses any more. May be called more than once. Who
  /// still has a view of it sees zeros.
  virtual void abandon_heap(const HeapMapping&) {}
  /// Lets processes in that wait at this rank's door (rejoin_process_group): they get the memory, and ask for the rest in the
  /// store.
  virtual void answer_door() {}

  /// Nodes that share the ranks equally, neighbours together (nodes.hpp). Ranks of one node share memory; of a heap, the parts of
  /// other nodes' ranks are places that nobody there sees.
  virtual int nodes() const { return 1; }
  /// Messages to ranks of other nodes; null where there is one node.
  virtual NodeLink* link() const { return nullptr; }
};

/// R ranks of this process, one handle a rank; each is used by one thread.
std::vector<std::unique_ptr<Group>> create_thread_group(int ranks, const GroupOptions& options = {});

/// Joins a group of processes on this machine. Rank 0 makes the memory and hands it to the others
/// over an abstract Unix socket that `name` identifies (nothing appears in the file system). Throws
/// FaultError if the others do not come within the deadline, InputError if the name is taken.
std::unique_ptr<Group> join_process_group(const std::string& name, int rank, int ranks, const GroupOptions& options = {});

/// Takes the place of rank `rank` in a running group of processes, after the process that was that rank has ended. Any live rank
/// that runs steps under recovery lets it in; it belongs to the group again when it has come back there (RecoveringLayers). Throws
/// FaultError if nobody answers within the deadline, InputError if the group is another one.
std::unique_ptr<Group> rejoin_process_group(const std::string& name, int rank, int ranks, const GroupOptions& options = {});

/// The heap of one context, shared by all layers that use it, one call at a time. Words, epochs and the abort
/// word live in it. Created collectively; the configuration is compared across ranks first.
class Workspace {
 public:
  /// `configuration` lists what must agree, one "name=value" a line. Throws InputError on every rank,
  /// naming the first value that differs, who has it and what the first live rank has.
  Workspace(Group& group, std::size_t bytes, const std::string& configuration);

  Group& group() const { return *group_; }
  const HeapView& view() const { return heap_.view; }
  std::size_t bytes() const { return heap_.bytes; }
  const std::vector<bool>& live() const { return group_->live(); }

  /// The FaultError of the abort word, if one stands in this rank's part.
  void throw_if_aborted() const;
  /// Tells every rank that this one refused its input, so that none waits for it. The numbers go into
  /// the others' FaultError.
  void refuse(std::uint64_t expected, std::uint64_t seen) const;
  /// After a fault, by every live rank: meet (without the dead), clear this rank's abort word and fault record, raise
  /// the epoch beyond any call that was under way, meet again. Words of old epochs satisfy nobody and stay.
  void reset(const std::vector<bool>& live);
  void reset();
  /// Collective end: waits until nobody uses the heap and gives its pages back.
  void close();
  /// Likewise without meeting anybody: for the live ranks after a reset of their group. The workspace is of no use then.
  void abandon();

 private:
  Group* group_;
  HeapMapping heap_;
};

}  // namespace heddle
