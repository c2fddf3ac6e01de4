#include "mega/host_products.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "formats/rows.hpp"

namespace heddle {

namespace {

std::size_t size(int value) { return static_cast<std::size_t>(value); }

/// Adds the time of its life to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(sum) {}
  ~Stopwatch() { sum_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& sum_;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

}  // namespace

HostProducts::HostProducts(const MegaLayout& layout, const MegaExperts& experts, const bf16* hidden)
    : layout_(layout),
      experts_(experts),
      hidden_(hidden),
      format_(activation_format(layout.wire.hidden, layout.activated.activation, layout.activated.quantisation)) {}

ArrivedRows HostProducts::arrived(int rows) {
  rows_.resize(size(rows) * layout_.wire.row_bytes());
  weights_.resize(size(rows));
  return {rows_.data(), weights_.data()};
}

RowView HostProducts::arrived_view(int rows) {
  const std::size_t wire = layout_.wire.row_bytes();
  if (enters_as_it_is(layout_.wire, format_)) return view_of(rows_.data(), wire, layout_.wire);
  const std::size_t stride = format_.row_bytes();
  converted_.resize(size(rows) * stride);
  for (std::size_t i = 0; i < size(rows); ++i)
    convert_row(rows_.data() + i * wire, layout_.wire, converted_.data() + i * stride, format_);
  return view_of(converted_.data(), stride, format_);
}

RowView HostProducts::gemm1(int expert, int part, int rows) {
  const Stopwatch watch(gemm1_seconds_);
  const RowView made = experts_.routed->activations(arrived_view(rows), rows, weights_.data(), expert, part);
  return with_padded_scales(made, layout_.activated, part, rows);
}

RowView HostProducts::shared_gemm1(int first_token, int part, int rows) {
  const Stopwatch watch(shared_seconds_);
  // The tokens themselves, not the input region's rows: a wire may have rounded those otherwise than the products do.
  const RowFormat plain{Wire::bf16, layout_.wire.hidden, {}, 1.0f};
  const auto* tokens = reinterpret_cast<const std::byte*>(hidden_) + size(first_token) * plain.row_bytes();
  const RowView made = experts_.shared->activations(view_of(tokens, plain.row_bytes(), plain), rows, nullptr, 0, part);
  return with_padded_scales(made, layout_.shared, part, rows);
}

RowView HostProducts::with_padded_scales(const RowView& made, const StepFormat& format, int part, int rows) {
  const std::size_t stride = format.scale_stride();
  scales_.assign(size(rows) * stride, std::byte{0});
  for (std::size_t i = 0; i < size(rows) && stride > 0; ++i)
    std::memcpy(scales_.data() + i * stride, made.scales + i * made.scale_stride, format.scale_bytes(part));
  return {made.format, made.values, made.value_stride, scales_.data(), stride};
}

StepRows HostProducts::activations(const StepFormat& format, int rows) {
  activations_.resize(size(rows) * format.row_bytes());
  activation_scales_.resize(size(rows) * format.scale_row_bytes());
  return {activations_.data(), format.row_bytes(), activation_scales_.data(), format.scale_row_bytes()};
}

RowView HostProducts::activation_view(const StepFormat& format, int rows) {
  RowView view{format.activation, activations_.data(), format.row_bytes(), nullptr, 0};
  if (format.activation == Activation::bf16) return view;
  for (int step = 0; step < format.steps(); ++step) view.scale_stride += format.scale_bytes(step);
  packed_scales_.resize(size(rows) * view.scale_stride);
  for (std::size_t i = 0; i < size(rows); ++i) {
    std::byte* to = packed_scales_.data() + i * view.scale_stride;
    const std::byte* from = activation_scales_.data() + i * format.scale_row_bytes();
    for (int step = 0; step < format.steps(); ++step, from += format.scale_stride()) {
      std::memcpy(to, from, format.scale_bytes(step));
      to += format.scale_bytes(step);
    }
  }
  view.scales = packed_scales_.data();
  return view;
}

const bf16* HostProducts::results(const HostExperts& experts, const StepFormat& format, int expert, int part, int rows) {
  const int columns = std::min(task_columns, layout_.wire.hidden - part * task_columns);
  results_.resize(size(rows) * size(columns));
  experts.results(activation_view(format, rows), rows, expert, part, {results_.data(), size(columns)});
  return results_.data();
}

const bf16* HostProducts::gemm2(int expert, int part, int rows) {
  const Stopwatch watch(gemm2_seconds_);
  return results(*experts_.routed, layout_.activated, expert, part, rows);
}

const bf16* HostProducts::shared_gemm2(int part, int rows) {
  const Stopwatch watch(shared_seconds_);
  return results(*experts_.shared, layout_.shared, 0, part, rows);
}

}  // namespace heddle
