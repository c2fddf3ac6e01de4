#include "bench_cublas.hpp"

#include <fmt/format.h>

#include <vector>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#include <dlfcn.h>
#define HEDDLE_CUBLAS
#endif

namespace heddle::tool {

#ifdef HEDDLE_CUBLAS

namespace {

constexpr std::size_t workspace_bytes = 64 << 20;
constexpr int most_algorithms = 4;

struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtGetVersion) version = nullptr;
  decltype(&cublasLtMatmul) multiply = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) propose = nullptr;
  decltype(&cublasLtMatmulDescCreate) create_product = nullptr;
  decltype(&cublasLtMatmulDescDestroy) destroy_product = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_product = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
};

template <class Function>
void find(void* file, Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(file, name));
  if (function == nullptr) throw InputError(fmt::format("libcublasLt has no {}; is it CUDA 12 or newer?", name));
}

Library load() {
  void* file = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
    if (file == nullptr) file = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (file == nullptr)
    throw InputError(fmt::format("cuBLASLt is not there: {}; name the folder of libcublasLt.so.13 in LD_LIBRARY_PATH", dlerror()));
  Library library;
  find(file, library.create, "cublasLtCreate");
  find(file, library.destroy, "cublasLtDestroy");
  find(file, library.status_string, "cublasLtGetStatusString");
  find(file, library.version, "cublasLtGetVersion");
  find(file, library.multiply, "cublasLtMatmul");
  find(file, library.propose, "cublasLtMatmulAlgoGetHeuristic");
  find(file, library.create_product, "cublasLtMatmulDescCreate");
  find(file, library.destroy_product, "cublasLtMatmulDescDestroy");
  find(file, library.set_product, "cublasLtMatmulDescSetAttribute");
  find(file, library.create_layout, "cublasLtMatrixLayoutCreate");
  find(file, library.destroy_layout, "cublasLtMatrixLayoutDestroy");
  find(file, library.create_preference, "cublasLtMatmulPreferenceCreate");
  find(file, library.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  find(file, library.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  return library;
}

/// Loaded at the first use and kept.
const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const bool shape = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
  throw Error(shape ? ErrorKind::input : ErrorKind::fault, fmt::format("cuBLASLt, {}: {}", what, library().status_string(status)));
}

}  // namespace

// The library's matrices are column-major: the row-major result [rows, columns] is its columns x rows, weights^T times tokens.
struct CublasDense::Impl {
  Impl(bool fp8, int rows, int columns, int cols) {
    try {
      prepare(fp8, rows, columns, cols);
    } catch (...) {
      release();
      throw;
    }
  }
  ~Impl() { release(); }

  void prepare(bool fp8, int rows, int columns, int cols) {
    const Library& lt = library();
    check(lt.create(&handle), "handle");
    check(lt.create_product(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product");
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (fp8) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{1});
    const cudaDataType_t type = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    const auto layout = [&](cublasLtMatrixLayout_t& made, cudaDataType_t of, int high, int wide) {
      check(lt.create_layout(&made, of, static_cast<std::uint64_t>(high), static_cast<std::uint64_t>(wide), high), "layout");
    };
    layout(weights, type, cols, columns);
    layout(tokens, type, cols, rows);
    layout(results, CUDA_R_16BF, columns, rows);
    check(lt.create_preference(&preference), "preference");
    check(lt.set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes),
          "preference");
    proposals.resize(most_algorithms);
    int found = 0;
    check(lt.propose(handle, product, weights, tokens, results, results, preference, most_algorithms, proposals.data(), &found),
          "algorithms for this shape");
    proposals.resize(static_cast<std::size_t>(found));
    if (found == 0) throw InputError("cuBLASLt has no algorithm for this shape");
    cuda::check(cudaMalloc(&workspace, workspace_bytes), "cuBLASLt's workspace");
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    check(library().set_product(product, attribute, &value, sizeof value), "product");
  }
  void release() {
    if (handle == nullptr) return;  // nothing was made, perhaps for want of a library
    const Library& lt = library();
    cudaFree(workspace);
    if (preference != nullptr) lt.destroy_preference(preference);
    for (cublasLtMatrixLayout_t layout : {weights, tokens, results}) {
      if (layout != nullptr) lt.destroy_layout(layout);
    }
    if (product != nullptr) lt.destroy_product(product);
    lt.destroy(handle);
  }

  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t weights = nullptr, tokens = nullptr, results = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> proposals;
  void* workspace = nullptr;
};

CublasDense::CublasDense(bool fp8, int rows, int columns, int cols) : impl_(std::make_unique<Impl>(fp8, rows, columns, cols)) {}
CublasDense::~CublasDense() = default;

int CublasDense::algorithms() const { return static_cast<int>(impl_->proposals.size()); }

void CublasDense::launch(int algorithm, const std::byte* weights, const std::byte* tokens, bf16* results, cudaStream_t stream) {
  const float one = 1.0f;
  const float zero = 0.0f;
  const Impl& i = *impl_;
  check(library().multiply(i.handle, i.product, &one, weights, i.weights, tokens, i.tokens, &zero, results, i.results, results,
                           i.results, &i.proposals[static_cast<std::size_t>(algorithm)].algo, i.workspace, workspace_bytes, stream),
        "a dense product");
}

std::size_t CublasDense::version() { return library().version(); }

#else

struct CublasDense::Impl {};

CublasDense::CublasDense(bool, int, int, int) {
  throw InputError("cuBLASLt is not there: this build had no cublasLt.h; build where the CUDA toolkit has it");
}
CublasDense::~CublasDense() = default;
int CublasDense::algorithms() const { return 0; }
void CublasDense::launch(int, const std::byte*, const std::byte*, bf16*, cudaStream_t) {}
std::size_t CublasDense::version() { return 0; }

#endif

}  // namespace heddle::tool
