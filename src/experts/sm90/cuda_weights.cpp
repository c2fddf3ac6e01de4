#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "experts/sm90/cuda_stage.hpp"
#include "experts/sm90/weights.hpp"
#include "experts/sm90/weights_kernels.hpp"
#include "experts/words.hpp"
#include "group/cuda_stream.hpp"
#include "heddle/error.hpp"

namespace heddle::sm90 {

using namespace loading;

using cuda::check;

namespace loading {

void check_same(const WeightMatrix& matrix, const WeightMatrix& first, const std::string& name) {
  if (matrix.kind != first.kind) {
    throw InputError(fmt::format("{}: {} weights among {} ones; the experts of a layer must be of one kind", name,
                                 kind_text(matrix.kind), kind_text(first.kind)));
  }
  if (matrix.kind == WeightKind::fp8_block && matrix.block_scale != first.block_scale) {
    throw InputError(fmt::format("{}: block scales of two formats, f32 and ue8m0; the experts of a layer must have one", name));
  }
}

bool accepted(const WeightPlan& plan, const WeightSource& host, unsigned first_fault, const std::string (&names)[2]) {
  if (first_fault == no_fault) return true;
  const int row = static_cast<int>(first_fault);
  const RowSurvey survey = survey_row(plan, host, row);
  if (plan.kind == WeightKind::mxfp4 && survey.fault == RowFault::row_span) return false;
  throw_row_fault(plan, host, row, survey, names);
  throw Error(ErrorKind::fault,
              fmt::format("{}: the GPU cannot lay out row {}, but the host can: were the stored weights changed meanwhile?",
                          names[WeightPlan::half_of(row)], plan.source_row(row)));
}

}  // namespace loading

namespace {

/// Adds the time it lived.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

struct DeviceWeights::Impl {
  DeviceWeightsOptions options;
  int hidden = 0;
  int whole = 0;  ///< intermediate size of the layer
  int count = 0;
  StoredShape gate_shape;  ///< of this rank's slice; up is alike
  StoredShape down_shape;
  std::unique_ptr<Matrix> gate_up;
  std::unique_ptr<Matrix> down;
  WeightReport report;

  Impl(std::span<const ExpertWeights> experts, int hidden_size, int intermediate, const DeviceWeightsOptions& chosen)
      : options(chosen), hidden(hidden_size), whole(intermediate), count(static_cast<int>(experts.size())) {
    if (hidden <= 0 || hidden % slab_rows != 0 || whole <= 0 || whole % slab_rows != 0) {
      throw InputError(fmt::format("expert weights of hidden size {} and intermediate size {}: both must be multiples of {}",
                                   hidden, whole, slab_rows));
    }
    if (options.slice.count == 0) options.slice.count = whole - options.slice.first;
    if (options.slice.first < 0 || options.slice.count < slab_rows || options.slice.count % slab_rows != 0 ||
        options.slice.first + options.slice.count > whole) {
      throw InputError(
          fmt::format("a slice of {} of the intermediate size {} beginning at {}: it must lie inside and be a multiple of {}",
                      options.slice.count, whole, options.slice.first, slab_rows));
    }
    const WeightMatrix first = experts.empty() ? WeightMatrix{} : experts[0].gate;
    gate_shape = {first.kind, options.slice.count, hidden, first.block_scale};
    down_shape = {first.kind, hidden, options.slice.count, first.block_scale};
    std::vector<Sources> sources;
    for (int expert = 0; expert < count; ++expert) sources.push_back(checked(expert, experts[size(expert)]));

    const cuda::DeviceScope scope(options.device);
    const Stopwatch stopwatch(report.seconds);
    bool step_exponents[2] = {};
    std::fill(step_exponents, step_exponents + 2, options.step_exponents && first.kind == WeightKind::mxfp4);
    do {
      gate_up.reset();
      down.reset();
      gate_up =
          std::make_unique<Matrix>(WeightPlan{first.kind, true, step_exponents[0], 2 * options.slice.count, hidden}, size(count));
      down = std::make_unique<Matrix>(WeightPlan{first.kind, false, step_exponents[1], hidden, options.slice.count}, size(count));
    } while (!load(sources, step_exponents));
    report.device_bytes = gate_up->bytes(size(count)) + down->bytes(size(count));
  }

  /// An expert's matrices as sources, checked in everything that does not take looking at values.
  Sources checked(int expert, const ExpertWeights& weights) const {
    const auto name = [&](const char* matrix) { return fmt::format("expert {}, {}", expert, matrix); };
    const WeightMatrix like{gate_shape.kind, 0, 0, {}, {}, gate_shape.block_scale, 1.0f};
    const auto check_one = [&](const WeightMatrix& matrix, int rows, int cols, const std::string& what) {
      check_same(matrix, like, what);
      check_weights(matrix, rows, cols, what);
    };
    check_one(weights.gate, whole, hidden, name("gate"));
    check_one(weights.up, whole, hidden, name("up"));
    check_one(weights.down, hidden, whole, name("down"));
    const Range all{0, hidden};
    const StoredMatrix down_part = stored_part(weights.down, all, options.slice, name("down"));
    return {
        {{stored_part(weights.gate, options.slice, all, name("gate")), stored_part(weights.up, options.slice, all, name("up"))}},
        {{down_part, down_part}},
        {name("gate"), name("up")},
        {name("down"), name("down")}};
  }

  Stage stage(cudaStream_t stream) const { return Stage(gate_shape, down_shape, gate_up->view.plan, down->view.plan, stream); }

  void upload_and_survey(Stage& stage, const Sources& sources, unsigned* faults, cudaStream_t stream) {
    stage.upload(sources);
    check(launch_survey(gate_up->view.plan, stage.gate_up, stage.gate_up_row_scales(), faults, stream), "survey of gate and up");
    check(launch_survey(down->view.plan, stage.down, stage.down_row_scales(), faults + 1, stream), "survey of down");
    report.stored_bytes +=
        2 * (gate_shape.value_bytes() + gate_shape.scale_bytes()) + down_shape.value_bytes() + down_shape.scale_bytes();
    ++report.experts;
  }

  static void lay_out_matrix(const Matrix& matrix, const WeightSource& source, const float* row_scales, int expert,
                             cudaStream_t stream) {
    check(launch_order(matrix.view.plan, source, row_scales, matrix.chunks_of(expert), stream), "laying weights out");
    if (matrix.row_scales == nullptr) return;
    check(cudaMemcpyAsync(matrix.row_scales_of(expert), row_scales, size(matrix.view.plan.row_scales()) * sizeof(float),
                          cudaMemcpyDeviceToDevice, stream),
          "copy of row scales");
  }
  void lay_out(const Stage& stage, int expert, cudaStream_t stream) const {
    lay_out_matrix(*gate_up, stage.gate_up, stage.gate_up_row_scales(), expert, stream);
    lay_out_matrix(*down, stage.down, stage.down_row_scales(), expert, stream);
  }

  /// Lays all experts out, then looks at what the surveys found. False: step_exponents says what has to be made again.
  bool load(const std::vector<Sources>& sources, bool (&step_exponents)[2]) {
    if (count == 0) return true;
    const cuda::OwnStream stream;
    const auto faults = allocate<unsigned>(2 * size(count), "memory for a survey of weights");
    std::vector<unsigned> found(2 * size(count));
    const std::size_t bytes = found.size() * sizeof(unsigned);
    check(cudaMemsetAsync(faults.get(), 0xFF, bytes, stream), "survey of weights");
    {
      Stage here = stage(stream);
      for (int expert = 0; expert < count; ++expert) {
        upload_and_survey(here, sources[size(expert)], faults.get() + 2 * expert, stream);
        lay_out(here, expert, stream);
      }
    }
    check(cudaMemcpyAsync(found.data(), faults.get(), bytes, cudaMemcpyDeviceToHost, stream), "survey of weights");
    check(cudaStreamSynchronize(stream), "loading expert weights");
    bool all = true;
    for (std::size_t expert = 0; expert < sources.size(); ++expert) {
      const Sources& host = sources[expert];
      const bool fits[] = {accepted(gate_up->view.plan, host.gate_up, found[2 * expert], host.gate_up_names),
                           accepted(down->view.plan, host.down, found[2 * expert + 1], host.down_names)};
      for (int i = 0; i < 2; ++i) {
        if (!fits[i]) step_exponents[i] = true;
        all = all && fits[i];
      }
    }
    return all;
  }

  void update(int expert, const Sources& sources, cudaStream_t stream) {
    const cuda::DeviceScope scope(options.device);
    const Stopwatch stopwatch(report.seconds);
    Stage here = stage(stream);
    unsigned found[2] = {};
    unsigned* faults = here.faults();
    check(cudaMemsetAsync(faults, 0xFF, sizeof found, stream), "survey of weights");
    upload_and_survey(here, sources, faults, stream);
    check(cudaMemcpyAsync(found, faults, sizeof found, cudaMemcpyDeviceToHost, stream), "survey of weights");
    check(cudaStreamSynchronize(stream), "update of expert weights");
    const auto demand = [](const Matrix& matrix, const WeightSource& host, unsigned fault, const std::string(&names)[2]) {
      const WeightPlan& plan = matrix.view.plan;
      if (accepted(plan, host, fault, names)) return;
      const int row = static_cast<int>(fault);
      throw_row_fault(plan, host, row, survey_row(plan, host, row), names);
    };
    demand(*gate_up, sources.gate_up, found[0], sources.gate_up_names);
    demand(*down, sources.down, found[1], sources.down_names);
    lay_out(here, expert, stream);
  }

  std::vector<StoredWeights> read_back(const Matrix& matrix, int expert, cudaStream_t stream) const {
    const WeightPlan& plan = matrix.view.plan;
    std::vector<std::byte> chunks(plan.bytes());
    std::vector<float> row_scales(size(plan.row_scales()));
    check(cudaMemcpyAsync(chunks.data(), matrix.chunks_of(expert), chunks.size(), cudaMemcpyDeviceToHost, stream),
          "reading weights back");
    if (!row_scales.empty()) {
      check(cudaMemcpyAsync(row_scales.data(), matrix.row_scales_of(expert), row_scales.size() * sizeof(float),
                            cudaMemcpyDeviceToHost, stream),
            "reading weights back");
    }
    check(cudaStreamSynchronize(stream), "reading weights back");
    return restore_weights(plan, chunks.data(), row_scales.data(), gate_shape.block_scale);
  }

  void check_expert(int expert) const {
    if (expert < 0 || expert >= count) throw InputError(fmt::format("expert {}: there are {} local experts here", expert, count));
  }
};

DeviceWeights::DeviceWeights(std::span<const ExpertWeights> experts, int hidden, int intermediate,
                             const DeviceWeightsOptions& options)
    : impl_(std::make_unique<Impl>(experts, hidden, intermediate, options)) {}
DeviceWeights::~DeviceWeights() = default;
DeviceWeights::DeviceWeights(DeviceWeights&&) noexcept = default;
DeviceWeights& DeviceWeights::operator=(DeviceWeights&&) noexcept = default;

int DeviceWeights::count() const { return impl_->count; }
int DeviceWeights::hidden() const { return impl_->hidden; }
int DeviceWeights::intermediate() const { return impl_->options.slice.count; }
int DeviceWeights::device() const { return impl_->options.device; }
const OrderedMatrix& DeviceWeights::gate_up() const { return impl_->gate_up->view; }
const OrderedMatrix& DeviceWeights::down() const { return impl_->down->view; }
const WeightReport& DeviceWeights::report() const { return impl_->report; }

void DeviceWeights::update(int expert, const ExpertWeights& weights, DeviceStream stream) {
  impl_->check_expert(expert);
  impl_->update(expert, impl_->checked(expert, weights), stream);
}

std::array<std::span<std::byte>, 4> DeviceWeights::memory(int expert) const {
  impl_->check_expert(expert);
  const Matrix &gate_up = *impl_->gate_up, &down = *impl_->down;
  return {gate_up.bytes_of(expert), gate_up.row_scale_bytes_of(expert), down.bytes_of(expert), down.row_scale_bytes_of(expert)};
}

StoredExpert DeviceWeights::read_back(int expert, DeviceStream stream) const {
  impl_->check_expert(expert);
  const cuda::DeviceScope scope(impl_->options.device);
  std::vector<StoredWeights> gate_up = impl_->read_back(*impl_->gate_up, expert, stream);
  std::vector<StoredWeights> down = impl_->read_back(*impl_->down, expert, stream);
  return {std::move(gate_up[0]), std::move(gate_up[1]), std::move(down[0])};
}

}  // namespace heddle::sm90
