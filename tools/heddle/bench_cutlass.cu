#include "bench_cutlass.hpp"

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <string>

#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

using Value = cutlass::float_e4m3_t;
using Result = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Problem = cute::Shape<int, int, int>;
using Tile = cute::Shape<cute::_64, cute::_128, cute::_128>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise;
using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128, cute::GMMA::Major::K, cute::GMMA::Major::K>;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float,
    float, void, RowMajor*, 8, Result, RowMajor*, 8, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
using MainLoop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Value, cute::tuple<RowMajor*, Scales::LayoutSFA*>, 16, Value,
    cute::tuple<ColumnMajor*, Scales::LayoutSFB*>, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Problem>, MainLoop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(ErrorKind::fault, std::string(what) + ": " + cudaGetErrorString(status));
}
void check(cutlass::Status status, const char* what) {
  if (status != cutlass::Status::kSuccess)
    throw Error(ErrorKind::fault, std::string("CUTLASS, ") + what + ": " + cutlass::cutlassGetStatusString(status));
}

/// Device memory with a copy of some values.
template <class T>
class Copied {
 public:
  explicit Copied(const std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    check(cudaMalloc(&memory_, bytes), "memory for CUTLASS's arguments");
    check(cudaMemcpy(memory_, values.data(), bytes, cudaMemcpyHostToDevice), "CUTLASS's arguments");
    check(cudaDeviceSynchronize(), "CUTLASS's arguments");
  }
  ~Copied() { cudaFree(memory_); }
  Copied(const Copied&) = delete;
  Copied& operator=(const Copied&) = delete;
  T* get() const { return static_cast<T*>(memory_); }

 private:
  void* memory_ = nullptr;
};

template <class Member>
auto each(const std::vector<GroupedProblem>& problems, const Member& member) {
  std::vector<decltype(member(problems.front()))> values;
  for (const GroupedProblem& problem : problems) values.push_back(member(problem));
  return values;
}

Problem shape_of(const GroupedProblem& p) { return {p.rows, p.columns, p.cols}; }

/// The stride of a row-major matrix, whose batch does not move.
template <class Stride>
Stride pitch(int values) {
  Stride stride{};
  cute::get<0>(stride) = values;
  return stride;
}

}  // namespace

struct CutlassGrouped::Impl {
  explicit Impl(const std::vector<GroupedProblem>& problems)
      : shapes(each(problems, shape_of)),
        tokens(each(problems, [](const GroupedProblem& p) { return reinterpret_cast<const Value*>(p.tokens); })),
        weights(each(problems, [](const GroupedProblem& p) { return reinterpret_cast<const Value*>(p.weights); })),
        token_scales(each(problems, [](const GroupedProblem& p) { return p.token_scales; })),
        weight_scales(each(problems, [](const GroupedProblem& p) { return p.weight_scales; })),
        results(each(problems, [](const GroupedProblem& p) { return reinterpret_cast<Result*>(p.results); })),
        token_pitch(each(problems, [](const GroupedProblem& p) { return pitch<typename Kernel::InternalStrideA>(p.cols); })),
        weight_pitch(each(problems, [](const GroupedProblem& p) { return pitch<typename Kernel::InternalStrideB>(p.cols); })),
        result_pitch(each(problems, [](const GroupedProblem& p) { return pitch<typename Kernel::InternalStrideD>(p.columns); })),
        token_scale_layout(each(problems, [](const GroupedProblem& p) { return Scales::tile_atom_to_shape_SFA(shape_of(p)); })),
        weight_scale_layout(each(problems, [](const GroupedProblem& p) { return Scales::tile_atom_to_shape_SFB(shape_of(p)); })) {
    typename Gemm::Arguments arguments;
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.problem_shape = {static_cast<int>(problems.size()), shapes.get(), nullptr};
    arguments.mainloop = {tokens.get(),       token_pitch.get(),        weights.get(),       weight_pitch.get(),
                          token_scales.get(), token_scale_layout.get(), weight_scales.get(), weight_scale_layout.get()};
    arguments.epilogue.thread.alpha = 1.0f;
    arguments.epilogue.thread.beta = 0.0f;
    arguments.epilogue.ptr_D = results.get();
    arguments.epilogue.dD = result_pitch.get();
    check(cudaGetDevice(&arguments.hw_info.device_id), "the current device");
    arguments.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(arguments.hw_info.device_id);
    check(Gemm::can_implement(arguments), "this shape");
    const std::size_t bytes = Gemm::get_workspace_size(arguments);
    check(cudaMalloc(&workspace, bytes == 0 ? 16 : bytes), "CUTLASS's workspace");
    const cutlass::Status status = gemm.initialize(arguments, workspace);
    if (status != cutlass::Status::kSuccess) cudaFree(workspace);
    check(status, "preparation");
    check(cudaDeviceSynchronize(), "CUTLASS's preparation");
  }
  ~Impl() { cudaFree(workspace); }

  Copied<Problem> shapes;
  Copied<const Value*> tokens, weights;
  Copied<const float*> token_scales, weight_scales;
  Copied<Result*> results;
  Copied<typename Kernel::InternalStrideA> token_pitch;
  Copied<typename Kernel::InternalStrideB> weight_pitch;
  Copied<typename Kernel::InternalStrideD> result_pitch;
  Copied<Scales::LayoutSFA> token_scale_layout;
  Copied<Scales::LayoutSFB> weight_scale_layout;
  Gemm gemm;
  void* workspace = nullptr;
};

CutlassGrouped::CutlassGrouped(const std::vector<GroupedProblem>& problems) : impl_(std::make_unique<Impl>(problems)) {}
CutlassGrouped::~CutlassGrouped() = default;

void CutlassGrouped::launch(cudaStream_t stream) { check(impl_->gemm.run(stream), "launch"); }

const char* CutlassGrouped::kernel() { return "grouped, e4m3 with block scales, 64 x 128 x 128 pingpong"; }

}  // namespace heddle::tool
