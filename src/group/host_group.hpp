// Host ranks, threads and processes alike: a group is a control segment and a memfd that grows heaps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "group/control.hpp"
#include "group/door.hpp"
#include "group/host_store.hpp"
#include "group/memory.hpp"
#include "heddle/group.hpp"

namespace heddle {

/// A group's memory with a control segment for `ranks`. Throws InputError, with what was wanted and what there is.
std::shared_ptr<HostMemory> create_group_memory(int ranks);

class HostGroup final : public Group {
 public:
  /// `memory` holds a reserved control segment of ranks * control_stride bytes at offset 0. `door`: where a process that takes the
  /// place of a lost one asks for the memory; none for threads.
  HostGroup(std::shared_ptr<HostMemory> memory, int rank, int ranks, const GroupOptions& options,
            std::unique_ptr<Door> door = nullptr);

  int rank() const override { return control_.rank; }
  int ranks() const override { return control_.ranks; }
  std::chrono::nanoseconds deadline() const override { return deadline_; }
  void set_deadline(std::chrono::nanoseconds deadline) override { deadline_ = deadline; }
  void barrier(const std::string& what) override;
  std::vector<std::string> exchange(const std::string& mine, const std::string& what) override;
  HeapMapping create_heap(std::size_t bytes) override { return create_part_of_heap(bytes, 0, ranks()); }
  /// A heap of `parts` parts, of which these ranks have those from `first` on; of the others only the headers are reserved.
  HeapMapping create_part_of_heap(std::size_t bytes, int first, int parts);
  void release_heap(const HeapMapping& heap) override;
  void reset(const std::vector<bool>& live) override;
  void begin_era(std::uint32_t era, const std::vector<bool>& live) override;
  const std::vector<bool>& live() const override { return live_; }
  Store& store() override { return store_; }
  void abandon_heap(const HeapMapping& heap) override;
  void answer_door() override;
  /// The link of the group over nodes that this one is part of: it makes progress while this rank waits for others.
  void drive(NodeLink& link) { link_ = &link; }

 private:
  using Counter = Word RankControl::*;
  RankControl& part(int rank) const { return *control_.at<RankControl>(rank, 0); }
  /// Sets this rank's counter and waits until every live rank's has reached it.
  void meet(Counter counter, Word value, const std::string& what, std::chrono::nanoseconds patience);
  void meet_anew(std::uint32_t era, const std::vector<bool>& live);
  void throw_if_left_behind(int peer, const std::string& what) const;
  int leader() const;

  std::shared_ptr<HostMemory> memory_;
  std::shared_ptr<std::byte> mapping_;
  HeapView control_;
  HostStore store_;
  std::unique_ptr<Door> door_;
  std::chrono::nanoseconds deadline_;
  std::vector<bool> live_;
  Word barriers_ = 0;
  std::size_t next_offset_;
  NodeLink* link_ = nullptr;
};

/// join_process_group and rejoin_process_group, as what they are.
std::unique_ptr<HostGroup> join_host_group(const std::string& name, int rank, int ranks, const GroupOptions& options);
std::unique_ptr<HostGroup> rejoin_host_group(const std::string& name, int rank, int ranks, const GroupOptions& options);

/// Checked bounds of a group's size, with the numbers in the error.
void check_group_size(int rank, int ranks);

}  // namespace heddle
