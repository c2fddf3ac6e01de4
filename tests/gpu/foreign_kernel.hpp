// A kernel of somebody else's that is on a GPU when ours come: SMs that it holds are free for nobody until it goes.
#pragma once

#include <cuda_runtime_api.h>

namespace heddle {

/// Of a GPU that a test may use alone.
int sms_of(int device);

/// Holds `sms` SMs of a GPU, each whole, from its construction on. It goes when it is told to, at the latest after 20 s.
class ForeignKernel {
 public:
  ForeignKernel(int device, int sms);
  ~ForeignKernel();
  ForeignKernel(const ForeignKernel&) = delete;
  ForeignKernel& operator=(const ForeignKernel&) = delete;

  /// Back when it has gone.
  void let_go();

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  volatile int* told_ = nullptr;  ///< host memory that both see: whether to go, then a flag a CTA that is there
};

}  // namespace heddle
