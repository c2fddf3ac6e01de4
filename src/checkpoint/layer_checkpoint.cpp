#include <utility>

#include "checkpoint/layer.hpp"
#include "heddle/checkpoint.hpp"

namespace heddle {

struct LayerCheckpoint::Impl {
  checkpoint::Layer layer;
};

LayerCheckpoint LayerCheckpoint::open(const std::string& path, const CheckpointOptions& options) {
  auto table = checkpoint::TensorTable::open(path);
  auto config = checkpoint::read_model_config(table.folder());
  return LayerCheckpoint(std::unique_ptr<Impl>(new Impl{checkpoint::Layer(std::move(table), std::move(config), options)}));
}

LayerCheckpoint::LayerCheckpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LayerCheckpoint::LayerCheckpoint(LayerCheckpoint&&) noexcept = default;
LayerCheckpoint& LayerCheckpoint::operator=(LayerCheckpoint&&) noexcept = default;
LayerCheckpoint::~LayerCheckpoint() = default;

const std::string& LayerCheckpoint::prefix() const { return impl_->layer.prefix(); }
const LayerShape& LayerCheckpoint::shape() const { return impl_->layer.shape(); }
WeightKind LayerCheckpoint::kind() const { return impl_->layer.kind(); }
ExpertWeights LayerCheckpoint::expert(int id) const { return impl_->layer.expert(id); }
const std::optional<SharedExpert>& LayerCheckpoint::shared() const { return impl_->layer.shared(); }
bool LayerCheckpoint::has_router() const { return impl_->layer.has_router(); }
std::span<const float> LayerCheckpoint::router_weights() const { return impl_->layer.router_weights(); }
std::span<const float> LayerCheckpoint::router_bias() const { return impl_->layer.router_bias(); }
const std::optional<RouterOptions>& LayerCheckpoint::router_options() const { return impl_->layer.router_options(); }

}  // namespace heddle
