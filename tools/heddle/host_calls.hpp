// Layers of the host engine that stay and are called again and again, ranks as threads: what is measured on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "heddle/group.hpp"
#include "heddle/layer.hpp"
#include "inputs.hpp"

namespace heddle::tool {

/// One rank: some layers of the same weights and options over one workspace, and this rank's tokens of the batch.
class HostRank {
 public:
  HostRank(Group& group, const Inputs& inputs, const LayerOptions& options, int layers);

  int rank() const { return group_.rank(); }
  std::size_t heap_bytes() const { return workspace_->bytes(); }
  /// Waits for all ranks.
  void meet() { group_.barrier("start of a call"); }
  /// A call of one layer with the first `tokens` of this rank's tokens; all ranks bring as many.
  const LayerReport& call(int layer, int tokens);
  void close() { workspace_->close(); }

 private:
  Group& group_;
  LayerInput input_;  ///< all of this rank's tokens
  std::unique_ptr<Workspace> workspace_;
  std::vector<MoeLayer> layers_;
  std::vector<bf16> out_;
};

/// Runs `body` in a thread a rank of a new group, and waits for all. If one failed, throws the Error that explains it,
/// with `what` in front.
void on_thread_group(int ranks, int deadline_ms, const std::string& what, const std::function<void(Group&)>& body);
/// Likewise, every rank with its layers.
void on_host_ranks(const Inputs& inputs, const LayerOptions& options, int layers, const std::function<void(HostRank&)>& body);

}  // namespace heddle::tool
