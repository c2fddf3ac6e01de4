// What a task of the fused layer computes on the host engine: parts of its experts, in one thread's memory.
#pragma once

#include <vector>

#include "experts/row_view.hpp"
#include "heddle/experts.hpp"
#include "mega/tasks.hpp"

namespace heddle {

/// A rank's experts; `shared` is null where none runs inside.
struct MegaExperts {
  const HostExperts* routed = nullptr;
  const HostExperts* shared = nullptr;
};

class HostProducts {
 public:
  /// `hidden`: the rank's own tokens, for the shared expert.
  HostProducts(const MegaLayout& layout, const MegaExperts& experts, const bf16* hidden);

  // As MegaTasks wants them.
  ArrivedRows arrived(int rows);
  RowView gemm1(int expert, int part, int rows);
  RowView shared_gemm1(int first_token, int part, int rows);
  StepRows activations(const StepFormat& format, int rows);
  const bf16* gemm2(int expert, int part, int rows);
  const bf16* shared_gemm2(int part, int rows);

  double gemm1_seconds() const { return gemm1_seconds_; }
  double gemm2_seconds() const { return gemm2_seconds_; }
  double shared_seconds() const { return shared_seconds_; }

 private:
  RowView arrived_view(int rows);
  /// One part's activations with scales as the heap has them.
  RowView with_padded_scales(const RowView& made, const StepFormat& format, int part, int rows);
  /// A block's activations with scales as the GEMM takes them.
  RowView activation_view(const StepFormat& format, int rows);
  const bf16* results(const HostExperts& experts, const StepFormat& format, int expert, int part, int rows);

  const MegaLayout& layout_;
  MegaExperts experts_;
  const bf16* hidden_;
  RowFormat format_;  ///< in which rows enter the GEMMs
  std::vector<std::byte> rows_, converted_, scales_, activations_, activation_scales_, packed_scales_;
  std::vector<float> weights_;
  std::vector<bf16> results_;
  double gemm1_seconds_ = 0;
  double gemm2_seconds_ = 0;
  double shared_seconds_ = 0;
};

}  // namespace heddle
