# heddle_options: how every source of this project is compiled. It stays inside the project and is not exported.

# Exact arithmetic everywhere: a fused multiply-add stands only where it is written.
set(HEDDLE_EXACT_FLAGS -ffp-contract=off)
set(HEDDLE_WARNING_FLAGS -Wall -Wextra -Wshadow -Wpedantic)
# GCC leaves its own garbage up to 512 MiB: about 8% less time, 0.1 GiB more memory a job. Nothing of what it makes changes.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(HEDDLE_GARBAGE_FLAGS --param=ggc-min-heapsize=524288)
endif()

add_library(heddle_options INTERFACE)
target_compile_options(heddle_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${HEDDLE_WARNING_FLAGS};${HEDDLE_EXACT_FLAGS};${HEDDLE_GARBAGE_FLAGS}>")

if(HEDDLE_SANITIZE)
  # Instrumented code draws false warnings from the compiler's flow analysis: shown there, errors only in plain builds.
  target_compile_options(heddle_options INTERFACE
    -fsanitize=${HEDDLE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(heddle_options INTERFACE -fsanitize=${HEDDLE_SANITIZE})
  target_compile_definitions(heddle_options INTERFACE HEDDLE_SANITIZED=1)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(heddle_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

# What only calls the library has nothing to gain from a long optimisation: a third of its compile time.
set(HEDDLE_CALLER_FLAGS "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>")
# Likewise under the address sanitizer, where what is optimised before it is instrumented takes another third.
if(HEDDLE_SANITIZE MATCHES "address")
  list(APPEND HEDDLE_CALLER_FLAGS "$<$<COMPILE_LANGUAGE:CXX>:-Og>")
endif()

# What HEDDLE_PRECOMPILE precompiles: headers of others that most sources include.
set(HEDDLE_COMMON_HEADERS <algorithm> <array> <atomic> <chrono> <cstring> <functional> <map> <memory> <mutex> <optional> <set>
  <span> <string> <thread> <unordered_map> <vector> <fmt/format.h>)

# The fuzzer needs to see which branches of the library an input takes.
if(HEDDLE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "HEDDLE_FUZZ needs clang++ (libFuzzer); this compiler is ${CMAKE_CXX_COMPILER_ID}. Use: cmake --preset fuzz")
  endif()
  target_compile_options(heddle_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
