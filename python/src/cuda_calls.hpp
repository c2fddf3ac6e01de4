// What calls of layers and of exchanges on GPUs share: the workspace, ranks' tensors as they are lent, refusals that are told to
// the other ranks.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "arrays.hpp"
#include "exchange/cuda_exchange.hpp"
#include "group.hpp"
#include "heddle/device.hpp"
#include "layers.hpp"

namespace heddle::python {

/// A device workspace with the group it was made over, if there is one. A thread at a time uses a GPU; several GPUs of a process
/// may have threads of their own.
class DeviceContext {
 public:
  DeviceContext(std::shared_ptr<RankGroup> group, const DeviceGroupOptions& mine, LayerNeeds needs);
  DeviceWorkspace& workspace() const { return *workspace_; }
  const ExchangeMemory& memory() const { return needs_.memory; }
  Place& place(std::size_t gpu) { return places_[gpu]; }
  /// Collective of the processes that go on; live: by rank, none: those that are live now.
  void reset(const std::optional<std::vector<bool>>& live);
  /// Held while something is made on a GPU: what is made on several of them writes to what their workspace keeps of it.
  std::mutex& making() { return making_; }
  std::size_t gpu(std::size_t number) const;

 private:
  /// The group, where there is one, and all GPUs, for as long as they are held.
  struct Turns {
    std::unique_ptr<RankGroup::Turn> of_group;
    std::deque<Turn> of_gpus;
  };
  Turns all_turns(const char* what);

  std::shared_ptr<RankGroup> group_;
  LayerNeeds needs_;
  std::unique_ptr<DeviceWorkspace> workspace_;
  std::deque<Place> places_;  ///< of GPUs
  std::mutex making_;
};

/// Collective where there is a group. With the interpreter's lock, which is let go in between.
std::shared_ptr<DeviceContext> make_context(std::shared_ptr<RankGroup> group, const DeviceGroupOptions& mine, LayerNeeds needs);

/// Numbers on the GPU that calls point at, n for n tokens, so that nothing is copied and a graph can be captured. What was made
/// stays where it is, since graphs may read it.
class TokenCounts {
 public:
  TokenCounts(int device, int most) : device_(device) { make(most); }
  int most() const { return made_.back().most; }
  /// Null for more than `most`.
  const int* at(std::int64_t tokens) const;
  /// The numbers 0 to `most`. Allocates and waits, so not in a capture.
  void make(int most);

 private:
  struct Numbers {
    DeviceArray<int> there;
    int most;
  };
  int device_;
  std::vector<Numbers> made_;
};

/// Is a graph being captured that work on this stream would belong to, or break? Changes nothing.
bool is_capturing(DeviceStream stream);

inline DeviceStream stream_of(std::uintptr_t stream) { return reinterpret_cast<DeviceStream>(stream); }

/// Sizes of the tensors that a call is given.
struct CallSizes {
  int hidden = 0;
  int topk = 0;
  int most = 0;         ///< tokens of a rank
  bool splits = false;  ///< more of them are possible
  bool routes = false;  ///< ids and weights may be None: the layer chooses
};

/// Calls on one GPU of a context, for all ranks that live there.
class DeviceCalls {
 public:
  DeviceCalls(std::shared_ptr<DeviceContext> context, std::size_t gpu, const CallSizes& sizes);

  /// For what is found wrong before a call comes here. The calls themselves do it, too: the others shall not wait for a rank whose
  /// input was refused.
  void refuse(std::uintptr_t stream);

 protected:
  struct Inputs {
    std::vector<DeviceInput> of_ranks;
    std::vector<std::int64_t> rows;  ///< of each rank's hidden
  };
  /// given: (hidden, ids, weights, tokens or None) of each rank.
  Inputs inputs_of(const nb::list& given, DeviceStream stream);
  std::vector<bf16*> outputs_of(const nb::list& given, const std::vector<std::int64_t>& rows) const;
  void check_ranks(const nb::list& given, const char* what) const;

  /// What is wrong with this call is told to the others; a fault they know of.
  template <class Work>
  void or_refuse(std::uintptr_t stream, Work&& work) {
    try {
      work();
    } catch (const FaultError&) {
      throw;
    } catch (...) {
      tell_refusal(stream);
      throw;
    }
  }
  DeviceContext& context() const { return *context_; }
  Place& place() const { return context_->place(gpu_); }
  std::size_t gpu() const { return gpu_; }
  std::size_t ranks() const { return static_cast<std::size_t>(context_->workspace().ranks_on(gpu_)); }
  int device() const { return context_->workspace().device(gpu_); }
  const CallSizes& sizes() const { return sizes_; }

 private:
  void tell_refusal(std::uintptr_t stream) noexcept;
  const int* count_of(std::int64_t rows, DeviceStream stream);
  DeviceInput input_of(const Lent& states, nb::handle ids, nb::handle weights, const int* count) const;

  std::shared_ptr<DeviceContext> context_;
  std::size_t gpu_;
  CallSizes sizes_;
  TokenCounts counts_;
};

}  // namespace heddle::python
