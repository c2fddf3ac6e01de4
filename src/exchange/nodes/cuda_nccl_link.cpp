// Between nodes by NCCL's sends and receives.
#include "exchange/cuda_nccl.hpp"
#include "heddle/device_nodes.hpp"

namespace heddle {

namespace {

class NcclLink final : public DeviceNodeLink {
 public:
  explicit NcclLink(std::shared_ptr<NcclCommunicators> communicators) : communicators_(std::move(communicators)) {
    communicators_->impl().connect_pairs();
  }
  int ranks() const override { return communicators_->ranks(); }
  void swap(std::span<const DeviceSwap> swaps, DeviceStream stream) override { communicators_->impl().swap(swaps, stream); }
  void abort() noexcept override {
    try {
      communicators_->abort();
    } catch (const std::exception&) {
      // Best effort: there is nothing else to end them by.
    }
  }

 private:
  std::shared_ptr<NcclCommunicators> communicators_;
};

}  // namespace

std::shared_ptr<DeviceNodeLink> create_nccl_link(std::shared_ptr<NcclCommunicators> communicators) {
  return std::make_shared<NcclLink>(std::move(communicators));
}

}  // namespace heddle
