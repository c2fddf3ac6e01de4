#include "experts/sm90/host_weights.hpp"

#include <cstring>

#include <fmt/format.h>

#include "heddle/error.hpp"

namespace heddle::sm90 {
namespace {

constexpr int block = 128;

std::size_t size(int value) { return static_cast<std::size_t>(value); }
int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }

void check_range(const Range& range, int limit, int unit, const char* what, const std::string& name) {
  if (range.first < 0 || range.count < 0 || range.first + range.count > limit) {
    throw InputError(fmt::format("{}: {} [{}, {}) are asked for, but the matrix has {}", name, what, range.first,
                                 range.first + range.count, limit));
  }
  if (range.count % slab_rows != 0) {
    throw InputError(
        fmt::format("{}: {} {} are asked for; the tile engine takes multiples of {}", name, range.count, what, slab_rows));
  }
  if (range.first % unit != 0) {
    throw InputError(
        fmt::format("{}: a part that begins at {} {}; with these weights parts begin at multiples of {}, where scales do", name,
                    what, range.first, unit));
  }
}

/// The words for a fault, without where it is.
std::string fault_text(WeightKind kind, const RowSurvey& survey) {
  switch (survey.fault) {
    case RowFault::none:
      break;
    case RowFault::scale_nan:
      return "the scale is not a number";
    case RowFault::scale_negative:
      return "the scale is negative; nvfp4 scales are magnitudes";
    case RowFault::value_nan:
      return "the value is not a number";
    case RowFault::tensor_scale:
      return "the tensor scale is not finite, or so large that 256 times it is not; it must be below 2^120";
    case RowFault::row_span:
      return fmt::format("the group's scale is {} binades below the largest of its row; {}", survey.span,
                         kind == WeightKind::mxfp4 ? "without step exponents up to 11 can be held" : "up to 124 can be held");
    case RowFault::step_span:
      return fmt::format(
          "scales of groups that are not zero differ by {} binades within 128 columns; weights are widened to e4m3, which "
          "holds differences of up to 11",
          survey.span);
    case RowFault::step_factor_span:
      return fmt::format("scales are {} binades below the largest of their row, up to 126 can be held", survey.span);
  }
  return "nothing is wrong";
}

template <WeightKind kind>
void order_data(const WeightPlan& plan, const WeightSource& source, int slab, int step, std::byte* data) {
  for (int vector = 0; vector < slab_shape(kind).vectors; ++vector) {
    for (int thread = 0; thread < slab_threads; ++thread) {
      const Vector value = ordered_vector<kind>(plan, source, slab, step, vector, thread);
      std::memcpy(data + vector * vector_stride + thread * vector_bytes, &value, sizeof value);
    }
  }
}

template <WeightKind kind>
void restore_data(const WeightPlan& plan, const std::byte* data, int slab, int step, const WeightTarget& target) {
  for (int vector = 0; vector < slab_shape(kind).vectors; ++vector) {
    for (int thread = 0; thread < slab_threads; ++thread) {
      Vector value;
      std::memcpy(&value, data + vector * vector_stride + thread * vector_bytes, sizeof value);
      restore_vector<kind>(plan, value, target, slab, step, vector, thread);
    }
  }
}

/// visit(slab, step, data offset, scales offset) for every slab and step, offsets from the first chunk.
template <class Visit>
void for_each_slab(const WeightPlan& plan, const Visit& visit) {
  for (int slab = 0; slab < plan.slabs(); ++slab) {
    for (int step = 0; step < plan.steps(); ++step) {
      visit(slab, step, plan.slab_data(slab, step), plan.slab_scales(slab, step));
    }
  }
}

StoredShape shape_of(const WeightMatrix& matrix) { return {matrix.kind, matrix.rows, matrix.cols, matrix.block_scale}; }

StoredBytes<std::byte> target_of(StoredWeights& weights) {
  const StoredShape shape = shape_of(weights.view);
  return {shape.block_scale,
          weights.view.tensor_scale,
          weights.values.data(),
          shape.value_pitch(),
          weights.scales.data(),
          shape.scale_pitch(),
          0,
          0};
}

}  // namespace

std::size_t StoredShape::value_pitch() const { return size(cols) * size(value_bits(kind)) / 8; }

std::size_t StoredShape::scale_pitch() const {
  if (kind == WeightKind::bf16) return 0;
  const int width = kind == WeightKind::fp8_block && block_scale == ScaleFormat::f32 ? 4 : 1;
  return size(ceil_div(cols, detail::scale_group(kind)) * width);
}

int StoredShape::scale_rows() const {
  if (kind == WeightKind::bf16) return 0;
  return kind == WeightKind::fp8_block ? ceil_div(rows, block) : rows;
}

StoredMatrix stored_part(const WeightMatrix& matrix, const Range& rows, const Range& cols, const std::string& name) {
  const int unit = matrix.kind == WeightKind::fp8_block ? block : slab_rows;
  check_range(rows, matrix.rows, unit, "rows", name);
  check_range(cols, matrix.cols, unit, "columns", name);
  const StoredShape shape = shape_of(matrix);
  const StoredShape before{matrix.kind, rows.first, cols.first, matrix.block_scale};  // what is left out at the top and on the left
  StoredMatrix part{matrix.block_scale,   matrix.tensor_scale, matrix.values.data(), shape.value_pitch(),
                    matrix.scales.data(), shape.scale_pitch(), rows.first,           cols.first};
  part.values += size(rows.first) * shape.value_pitch() + before.value_pitch();
  part.scales += size(before.scale_rows()) * shape.scale_pitch() + before.scale_pitch();
  return part;
}

void throw_row_fault(const WeightPlan& plan, const WeightSource& source, int row, const RowSurvey& survey,
                     const std::string (&names)[2]) {
  if (survey.fault == RowFault::none) return;
  const int half = WeightPlan::half_of(row);
  const StoredMatrix& matrix = source.half[half];
  throw InputError(fmt::format("{}, row {}, column {}: {}", names[half], matrix.first_row + plan.source_row(row),
                               matrix.first_col + survey.column, fault_text(plan.kind, survey)));
}

OrderedWeights order_weights(const WeightPlan& plan, const WeightSource& source, const std::string (&names)[2]) {
  OrderedWeights ordered;
  ordered.chunks.resize(plan.bytes());
  ordered.row_scales.resize(size(plan.row_scales()));
  for (int row = 0; row < plan.row_scales(); ++row) {
    const RowSurvey survey = survey_row(plan, source, row);
    throw_row_fault(plan, source, row, survey, names);
    ordered.row_scales[size(row)] = survey.scale;
  }
  with_kind(plan.kind, [&]<WeightKind kind>() {
    for_each_slab(plan, [&](int slab, int step, std::size_t data, std::size_t scales) {
      order_data<kind>(plan, source, slab, step, ordered.chunks.data() + data);
      for (int row = 0; row < slab_rows; ++row) {
        const float row_scale = plan.row_scales() == 0 ? 1.0f : ordered.row_scales[size(slab * slab_rows + row)];
        order_scales(plan, source, row_scale, slab, step, row, ordered.chunks.data() + scales);
      }
    });
  });
  return ordered;
}

StoredWeights::StoredWeights(const StoredShape& shape)
    : values(shape.value_bytes()), scales(shape.scale_bytes()), view{shape.kind, shape.rows,        shape.cols, values,
                                                                     scales,     shape.block_scale, 1.0f} {}

std::vector<StoredWeights> restore_weights(const WeightPlan& plan, const std::byte* chunks, const float* row_scales,
                                           ScaleFormat block_scale) {
  std::vector<StoredWeights> stored;
  for (int i = 0; i < (plan.paired ? 2 : 1); ++i) {
    stored.emplace_back(StoredShape{plan.kind, plan.paired ? plan.rows / 2 : plan.rows, plan.cols, block_scale});
    // Row 0 and row 8 of the first slab are rows of the two halves.
    if (plan.kind == WeightKind::nvfp4) stored.back().view.tensor_scale = row_scales[8 * i] / 256.0f;
  }
  const WeightTarget target{{target_of(stored.front()), target_of(stored.back())}};
  with_kind(plan.kind, [&]<WeightKind kind>() {
    for_each_slab(plan, [&](int slab, int step, std::size_t data, std::size_t scales) {
      restore_data<kind>(plan, chunks + data, slab, step, target);
      for (int row = 0; row < slab_rows; ++row) {
        const float row_scale = plan.row_scales() == 0 ? 1.0f : row_scales[slab * slab_rows + row];
        restore_scales(plan, chunks + scales, row_scale, slab, step, row, target);
      }
    });
  });
  return stored;
}

}  // namespace heddle::sm90
