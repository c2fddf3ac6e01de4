// The local experts' weights in the memory of one GPU, in the order of weight_order.hpp. Built with HEDDLE_CUDA only.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "experts/sm90/host_weights.hpp"
#include "experts/sm90/weight_order.hpp"
#include "heddle/device.hpp"
#include "heddle/device_experts.hpp"
#include "heddle/experts.hpp"

namespace heddle::sm90 {

struct DeviceWeightsOptions {
  int device = 0;
  /// This rank's part of every expert's intermediate size (rows of gate and up, columns of down); count 0: all of it. In
  /// multiples of 64, beginning at a multiple of 64, with fp8_block of 128.
  Range slice;
  /// mxfp4: room for a power of two a row and step, though the weights given now may not need it: for updates that might.
  bool step_exponents = false;
};

/// One expert as it was stored, or this rank's slice of it.
struct StoredExpert {
  StoredWeights gate;
  StoredWeights up;
  StoredWeights down;
};

/// A shared expert is an object of its own, with one expert.
class DeviceWeights {
 public:
  /// `experts` in local order: gate and up [intermediate, hidden], down [hidden, intermediate], both multiples of 64, all of one
  /// weight kind and scale format. No experts at all is legal. The stored bytes are read, and waited for, here. Throws InputError
  /// for shapes and kinds that do not fit, and, with expert, matrix, row and column, for weights that the order cannot hold.
  DeviceWeights(std::span<const ExpertWeights> experts, int hidden, int intermediate, const DeviceWeightsOptions& options);
  ~DeviceWeights();
  DeviceWeights(DeviceWeights&&) noexcept;
  DeviceWeights& operator=(DeviceWeights&&) noexcept;

  int count() const;
  int hidden() const;
  int intermediate() const;  ///< of the slice
  int device() const;
  /// Gate and up, paired: [2 * intermediate, hidden].
  const OrderedMatrix& gate_up() const;
  /// [hidden, intermediate].
  const OrderedMatrix& down() const;

  /// Puts other weights in an expert's place: kernels behind this call on the stream use them; those on other streams must not be
  /// reading meanwhile. `weights` has the whole intermediate size. The host waits for the stream once, to know that the weights can
  /// be laid out, and has read them when it returns; not in graph capture. Throws InputError as the constructor, then nothing has
  /// changed.
  void update(int expert, const ExpertWeights& weights, DeviceStream stream);
  /// An expert's memory: chunks and row scales of gate and up, then those of down; nothing where a kind has none. Bytes of an
  /// expert that lies in the same plans may be written there, by the rules of update().
  std::array<std::span<std::byte>, 4> memory(int expert) const;
  /// An expert's (slice of) weights byte for byte as they were stored, after what is on the stream. Waits for the stream.
  StoredExpert read_back(int expert, DeviceStream stream) const;
  const WeightReport& report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle::sm90
