#include "exchange/cuda_call.cuh"
#include "mega/sm90/call.hpp"

namespace heddle::sm90 {

namespace {

/// A worker that works out once where the bf16 rows of a sum are, a lane each, and not again for every few columns.
class SumWorker : public DeviceWorker<RowMover::plain, SpreadCta> {
 public:
  using DeviceWorker::DeviceWorker;

  template <class Terms>
  __device__ void reduce_rows(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, const RowPart& part) {
    if (n > lanes_of_warp) return DeviceWorker::reduce_rows(out, n, terms, format, last, part);
    const std::byte* mine = nullptr;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      const std::byte* row = terms(i).row;
      if (lane() == i) mine = row;
    }
    const int hidden = format.row.hidden;
    const int pieces = (hidden + row_piece_values - 1) / row_piece_values;
    const int end = min(part.end(pieces) * row_piece_values, hidden);
#pragma unroll 1
    for (int at = part.begin(pieces) * row_piece_values; at < end; at += row_piece_values)
      sum_piece(out, at + 8 * lane(), end, n, mine, format, last);
  }

 private:
  static constexpr int step = 8 * lanes_of_warp;  ///< columns that a warp reads side by side
  static constexpr int chunks = row_piece_values / step;
  static constexpr int ahead = 4;  ///< rows whose values are on their way together

  /// Columns [at, at + 8) of this lane, and those `step` on. The order of sums is RowSum's.
  __device__ void sum_piece(bf16* out, int at, int end, int n, const std::byte* mine, const SumFormat& format,
                            const LastTerm& last) const {
    float sums[chunks][8] = {};
#pragma unroll 1
    for (int first = 0; first < n; first += ahead) {
      RawEight<Wire::bf16> raw[ahead][chunks];
      bool there[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        const auto address = reinterpret_cast<unsigned long long>(mine);
        const auto* row = reinterpret_cast<const std::byte*>(__shfl_sync(all_lanes, address, (first + j) % lanes_of_warp));
        there[j] = first + j < n && row != nullptr;
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          if (there[j] && at + c * step < end) raw[j][c].load(row, at + c * step, format.row);
        }
      }
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        if (!there[j]) continue;
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[c][i] = sums[c][i] + raw[j][c].value(i, format.row);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (at + c * step < end) RowSum<true>::finish_chunk(out, at + c * step, sums[c], format, last);
    }
  }
};

/// Behind the fused kernel, whose warps have few registers left for it. It may be launched before that one has ended.
template <class W>
__global__ void __launch_bounds__(threads_a_cta, 1) sum(const __grid_constant__ MegaAnnounceCall call) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
  extern __shared__ std::byte memory[];
  W w(call.team, CallPart::combine, memory, call.squad_bytes);
  if (!w.live(w.heap().rank) || !w.begin()) return;
  const trace::WarpLane lane(trace::trace_of(call.team), trace::Role::worker, w.squad_index());
  const trace::WarpSpan span(trace::Kind::sum);
  MegaCall mine;
  mine.layout = call.layout;
  mine.input = send_input(call);
  mine.placement = call.placement;
  mega_sum(w, mine, shared_rows(call), call.ranks[blockIdx.y].output.out);
}

}  // namespace

const void* mega_sum_kernel(Wire returned) {
  return returned == Wire::bf16 ? reinterpret_cast<const void*>(&sum<SumWorker>)
                                : reinterpret_cast<const void*>(&sum<DeviceWorker<RowMover::any, SpreadCta>>);
}

}  // namespace heddle::sm90
