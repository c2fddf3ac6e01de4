// Layers on GPUs that go on when processes are lost: recovery.hpp for DeviceLayer, with the same agreement. Built with HEDDLE_CUDA
// only.
#pragma once

#include <memory>
#include <vector>

#include "heddle/device_layer.hpp"
#include "heddle/recovery.hpp"

namespace heddle {

/// A context of layers on the GPUs of one process, made anew whenever the mask changes. Members are the processes of a host group:
/// a process is lost with all its ranks. All bring as many ranks, numbered by process; survivors number theirs anew in each
/// workspace, without gaps.
class RecoveringDeviceLayers {
 public:
  /// As RecoveringLayers. `layers` have placements over all ranks of all processes. `processes` and the sources must outlive this.
  RecoveringDeviceLayers(Group& processes, const DeviceGroupOptions& mine, std::vector<ContextLayer> layers,
                         const RecoveryOptions& options = {}, const DeviceLayerOptions& device = {}, Entry entry = Entry::together);
  ~RecoveringDeviceLayers();
  RecoveringDeviceLayers(RecoveringDeviceLayers&&) noexcept;
  RecoveringDeviceLayers& operator=(RecoveringDeviceLayers&&) noexcept;

  /// As RecoveringLayers::step. `body` queues calls of the layers here, waits for its streams and asks every layer
  /// (throw_if_failed); graphs that it has captured are of no use after a recovery, which members() tells.
  void step(const std::function<void()>& body);
  void rejoin();

  /// On GPU number `gpu` of this process. Valid until the step ends or throws; so is the workspace.
  DeviceLayer& layer(std::size_t number, std::size_t gpu = 0);
  DeviceWorkspace& workspace();
  /// As it is now, over the ranks that there are now.
  const Placement& placement(std::size_t number) const;
  const Members& members() const;  ///< processes
  std::uint32_t steps() const;
  const std::vector<Interruption>& interruptions() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
