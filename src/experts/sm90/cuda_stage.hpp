// Device memory of the loader: what it holds and what it lays out from.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "experts/sm90/host_weights.hpp"
#include "experts/sm90/weights.hpp"
#include "group/cuda_driver.hpp"

namespace heddle::sm90::loading {

inline constexpr std::size_t alignment = 256;
inline std::size_t aligned(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }
inline std::size_t size(int value) { return static_cast<std::size_t>(value); }

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
template <class T>
using DeviceMemory = std::unique_ptr<T, FreeDevice>;

/// Zeros, on the current device.
template <class T>
DeviceMemory<T> allocate(std::size_t count, const char* what) {
  if (count == 0) return nullptr;
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, count * sizeof(T)), what);
  DeviceMemory<T> owned(static_cast<T*>(memory));
  cuda::check(cudaMemset(memory, 0, count * sizeof(T)), what);
  cuda::check(cudaStreamSynchronize(nullptr), what);
  return owned;
}

/// The memory behind an OrderedMatrix.
struct Matrix {
  OrderedMatrix view;
  DeviceMemory<std::byte> chunks;
  DeviceMemory<float> row_scales;

  Matrix(const WeightPlan& plan, std::size_t experts) {
    view.plan = plan;
    view.expert_stride = aligned(plan.bytes());
    chunks = allocate<std::byte>(experts * view.expert_stride, "memory for expert weights");
    row_scales = allocate<float>(experts * size(plan.row_scales()), "memory for row scales");
    view.chunks = chunks.get();
    view.row_scales = row_scales.get();
  }
  std::size_t bytes(std::size_t experts) const {
    return experts * (view.expert_stride + size(view.plan.row_scales()) * sizeof(float));
  }
  std::byte* chunks_of(int expert) const { return chunks.get() + size(expert) * view.expert_stride; }
  float* row_scales_of(int expert) const { return row_scales.get() + size(expert) * size(view.plan.row_scales()); }
  std::span<std::byte> bytes_of(int expert) const { return {chunks_of(expert), view.plan.bytes()}; }
  std::span<std::byte> row_scale_bytes_of(int expert) const {
    if (row_scales == nullptr) return {};
    return std::as_writable_bytes(std::span(row_scales_of(expert), size(view.plan.row_scales())));
  }
};

/// Throws InputError unless a matrix is stored as the first one is.
void check_same(const WeightMatrix& matrix, const WeightMatrix& first, const std::string& name);

/// Whether a matrix could be laid out, given the first row that the GPU refused. False where step exponents would help; throws
/// for everything else.
bool accepted(const WeightPlan& plan, const WeightSource& host, unsigned first_fault, const std::string (&names)[2]);

/// What an expert's two ordered matrices are made of, on the host, with the names that messages use.
struct Sources {
  WeightSource gate_up;
  WeightSource down;
  std::string gate_up_names[2];
  std::string down_names[2];
};

/// Device memory for one expert's stored bytes and what a survey finds, in the order of a stream.
class Stage {
 public:
  /// An expert's three matrices of this shape.
  Stage(const StoredShape& gate_shape, const StoredShape& down_shape, const WeightPlan& gate_up_plan, const WeightPlan& down_plan,
        cudaStream_t stream)
      : gate_shape_(gate_shape), down_shape_(down_shape), stream_(stream) {
    const std::size_t places[] = {take(gate_shape.value_bytes()), take(gate_shape.scale_bytes()), take(gate_shape.value_bytes()),
                                  take(gate_shape.scale_bytes()), take(down_shape.value_bytes()), take(down_shape.scale_bytes())};
    const std::size_t row_scales[] = {take(size(gate_up_plan.row_scales()) * sizeof(float)),
                                      take(size(down_plan.row_scales()) * sizeof(float))};
    const std::size_t faults = take(2 * sizeof(unsigned));
    void* memory = nullptr;
    cuda::check(cudaMallocAsync(&memory, bytes_, stream_), "memory to lay weights out from");
    memory_ = static_cast<std::byte*>(memory);
    for (int i = 0; i < 6; ++i) places_[i] = memory_ + places[i];
    faults_ = reinterpret_cast<unsigned*>(memory_ + faults);
    for (int i = 0; i < 2; ++i) row_scales_[i] = reinterpret_cast<float*>(memory_ + row_scales[i]);
  }
  ~Stage() { cudaFreeAsync(memory_, stream_); }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  /// Copies an expert's stored bytes here. The host may still be read until the stream is waited for.
  void upload(const Sources& host) {
    gate_up = {{copy(host.gate_up.half[0], gate_shape_, 0), copy(host.gate_up.half[1], gate_shape_, 2)}};
    const StoredMatrix one = copy(host.down.half[0], down_shape_, 4);
    down = {{one, one}};
  }

  WeightSource gate_up;  ///< in device memory, as uploaded
  WeightSource down;
  unsigned* faults() const { return faults_; }  ///< of gate and up, and of down
  float* gate_up_row_scales() const { return row_scales_[0]; }
  float* down_row_scales() const { return row_scales_[1]; }

 private:
  std::size_t take(std::size_t bytes) {
    const std::size_t at = bytes_;
    bytes_ += aligned(bytes);
    return at;
  }
  void copy_rows(std::byte* to, std::size_t width, const std::byte* from, std::size_t pitch, int rows) const {
    if (width == 0 || rows == 0) return;
    const cudaError_t status = pitch == width
                                   ? cudaMemcpyAsync(to, from, width * size(rows), cudaMemcpyHostToDevice, stream_)
                                   : cudaMemcpy2DAsync(to, width, from, pitch, width, size(rows), cudaMemcpyHostToDevice, stream_);
    cuda::check(status, "copy of expert weights");
  }
  StoredMatrix copy(const StoredMatrix& host, const StoredShape& shape, int place) const {
    StoredMatrix here = host;
    copy_rows(places_[place], shape.value_pitch(), host.values, host.value_pitch, shape.rows);
    copy_rows(places_[place + 1], shape.scale_pitch(), host.scales, host.scale_pitch, shape.scale_rows());
    here.values = places_[place];
    here.value_pitch = shape.value_pitch();
    here.scales = places_[place + 1];
    here.scale_pitch = shape.scale_pitch();
    return here;
  }

  StoredShape gate_shape_;
  StoredShape down_shape_;
  cudaStream_t stream_;
  std::size_t bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::byte* places_[6] = {};
  unsigned* faults_ = nullptr;
  float* row_scales_[2] = {};
};

}  // namespace heddle::sm90::loading
