#include "group/cuda_kernels.hpp"
#include "signal/device_faults.cuh"
#include "signal/ptx.cuh"

namespace heddle::cuda {

namespace {

constexpr int lanes = 32;

__global__ void write_word(Word* word, Word value) {
  if (threadIdx.x == 0) ptx::store_release_system(word, value);
}

__global__ void add_to_word(Word* word, Word value) {
  for (int i = 0; i < adds_a_launch / lanes; ++i) atomicAdd_system(reinterpret_cast<unsigned long long*>(word), value);
}

__global__ void read_words(const Word* from, int count, Word* to) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += lanes) to[i] = ptx::load_acquire_system(from + i);
}

__global__ void give_up(DeviceTeam team, FaultRecord record) {
  if (threadIdx.x == 0) heddle::give_up(team, team.heap.rank, record);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), cudaStream_t stream, Arguments... arguments) {
  kernel<<<1, lanes, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t load_small_kernels() {
  cudaFuncAttributes attributes{};
  for (const void* kernel : {reinterpret_cast<const void*>(write_word), reinterpret_cast<const void*>(add_to_word),
                             reinterpret_cast<const void*>(read_words), reinterpret_cast<const void*>(give_up)}) {
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_write(Word* word, Word value, cudaStream_t stream) { return launch(write_word, stream, word, value); }
cudaError_t launch_add(Word* word, Word value, cudaStream_t stream) { return launch(add_to_word, stream, word, value); }
cudaError_t launch_read(const Word* from, int count, Word* to, cudaStream_t stream) {
  return launch(read_words, stream, from, count, to);
}
cudaError_t launch_give_up(const DeviceTeam& team, const FaultRecord& record, cudaStream_t stream) {
  return launch(give_up, stream, team, record);
}

}  // namespace heddle::cuda
