# The CUDA part, compiled ahead of time for CMAKE_CUDA_ARCHITECTURES (the preset `cuda`: 90a).
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25.1 (Debian 12) does not know yet that nvcc speaks C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

# The headers that claim to be one source for host and device, all of them: cuda_check.cu compiles what this list names.
file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src src/formats/*.hpp)
list(TRANSFORM headers REPLACE "(.+)" "#include \"\\1\"")
list(JOIN headers "\n" HEDDLE_SHARED_INCLUDES)
configure_file(cmake/shared_headers.hpp.in cuda/shared_headers.hpp @ONLY)

if(HEDDLE_TRACE)
  add_compile_definitions(HEDDLE_TRACE)
endif()
if(HEDDLE_RACECHECK)
  add_compile_definitions(HEDDLE_RACECHECK)
endif()

# Kernels lie beside the host code of their room; a file dropped there belongs to the library.
file(GLOB HEDDLE_CUDA_SOURCES CONFIGURE_DEPENDS src/*/*.cu src/*/*/*.cu src/*/cuda_*.cpp src/*/*/cuda_*.cpp)
add_library(heddle_cuda OBJECT ${HEDDLE_CUDA_SOURCES})
target_include_directories(heddle_cuda PRIVATE
  $<TARGET_PROPERTY:heddle,INTERFACE_INCLUDE_DIRECTORIES> ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/cuda)
# Constexpr library functions such as std::bit_cast serve both sides; products and sums are never contracted behind our back.
target_compile_options(heddle_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -fmad=false --Werror=all-warnings
  -Xcompiler=-Wall,-Wextra,-Wshadow,-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wpedantic -Werror -ffp-contract=off
  ${HEDDLE_GARBAGE_FLAGS}>)

# The host side of the CUDA part: plain C++ against the runtime, which is linked statically; the driver is found at run time.
find_package(CUDAToolkit REQUIRED)
target_link_libraries(heddle_cuda PRIVATE CUDA::cudart_static fmt::fmt ${CMAKE_DL_LIBS})

# The same as a library of its own, which the installed package has.
add_library(heddle_cuda_library STATIC $<TARGET_OBJECTS:heddle_cuda>)
add_library(heddle::cuda ALIAS heddle_cuda_library)
set_target_properties(heddle_cuda_library PROPERTIES OUTPUT_NAME heddle_cuda EXPORT_NAME cuda LINKER_LANGUAGE CXX)
target_link_libraries(heddle_cuda_library PUBLIC heddle CUDA::cudart_static PRIVATE fmt::fmt ${CMAKE_DL_LIBS})

# CuTe's atoms for the tensor cores, bulk copies and barriers: headers alone (cmake/cuda-requirements.txt; `./dev build cuda` fetches them).
find_path(CUTLASS_INCLUDE_DIR cute/arch/mma_sm90_gmma.hpp
  HINTS ${PROJECT_SOURCE_DIR}/.cutlass/cutlass_library/source/include)
mark_as_advanced(CUTLASS_INCLUDE_DIR)
if(NOT CUTLASS_INCLUDE_DIR)
  message(FATAL_ERROR "The CUDA part needs CUTLASS's headers, of which cute/arch/mma_sm90_gmma.hpp was not found. `./dev build cuda` "
    "fetches them; or set CUTLASS_INCLUDE_DIR to the include folder of the version that cmake/cuda-requirements.txt names.")
endif()
target_include_directories(heddle_cuda SYSTEM PRIVATE ${CUTLASS_INCLUDE_DIR})

# NCCL: its header where there is one, the library at run time.
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
mark_as_advanced(NCCL_INCLUDE_DIR)
if(NCCL_INCLUDE_DIR)
  target_compile_definitions(heddle_cuda PRIVATE HEDDLE_NCCL)
  target_include_directories(heddle_cuda SYSTEM PRIVATE ${NCCL_INCLUDE_DIR})
else()
  message(STATUS "nccl.h was not found: gather's option to use NCCL is left out")
endif()

if(TARGET heddle_command)
  # The benchmark's own kernels.
  file(GLOB HEDDLE_BENCH_KERNELS CONFIGURE_DEPENDS tools/heddle/bench_*.cu)
  list(FILTER HEDDLE_BENCH_KERNELS EXCLUDE REGEX "/bench_cutlass.cu$")
  add_library(heddle_bench_kernels OBJECT ${HEDDLE_BENCH_KERNELS})
  target_include_directories(heddle_bench_kernels PRIVATE $<TARGET_PROPERTY:heddle_cuda,INCLUDE_DIRECTORIES>)
  target_include_directories(heddle_bench_kernels SYSTEM PRIVATE ${CUTLASS_INCLUDE_DIR})
  target_compile_options(heddle_bench_kernels PRIVATE $<TARGET_PROPERTY:heddle_cuda,COMPILE_OPTIONS>)
  # CUTLASS's own kernel, contracted sums included: a peer is compiled as its authors do it.
  add_library(heddle_bench_cutlass OBJECT tools/heddle/bench_cutlass.cu)
  target_include_directories(heddle_bench_cutlass PRIVATE $<TARGET_PROPERTY:heddle_cuda,INCLUDE_DIRECTORIES>)
  target_include_directories(heddle_bench_cutlass SYSTEM PRIVATE ${CUTLASS_INCLUDE_DIR})
  target_compile_options(heddle_bench_cutlass PRIVATE --expt-relaxed-constexpr)
  target_compile_definitions(heddle_command PRIVATE HEDDLE_CUDA)
  target_link_libraries(heddle_command PRIVATE heddle_cuda heddle_bench_kernels heddle_bench_cutlass CUDA::cudart_static ${CMAKE_DL_LIBS})
endif()
if(HEDDLE_TESTS)
  add_subdirectory(tests/gpu)
endif()
if(HEDDLE_EXAMPLES)
  file(GLOB HEDDLE_CUDA_EXAMPLES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/cuda_*.cpp)
  foreach(file ${HEDDLE_CUDA_EXAMPLES})
    get_filename_component(name ${file} NAME_WE)
    add_executable(example_${name} ${file})
    target_link_libraries(example_${name} PRIVATE heddle::cuda)
    set_target_properties(example_${name} PROPERTIES BUILD_RPATH "$ORIGIN" RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/examples)
    list(APPEND HEDDLE_CUDA_EXAMPLE_PROGRAMS example_${name})
  endforeach()
endif()

# What the presets with CUDA build: all that uses it. Tests and benchmarks of the host are those of a build without it.
add_custom_target(cuda_part DEPENDS heddle heddle_cuda_library ${HEDDLE_CUDA_EXAMPLE_PROGRAMS})
foreach(target heddle_command gpu_tests)
  if(TARGET ${target})
    add_dependencies(cuda_part ${target})
  endif()
endforeach()
