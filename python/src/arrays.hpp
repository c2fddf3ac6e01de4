// Arrays that Python lends for the length of a call, by DLPack and without a copy: NumPy's (bfloat16 of ml_dtypes too), torch's,
// and anything else with __dlpack__.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "heddle/formats.hpp"

namespace heddle::python {

namespace nb = nanobind;

enum class Element : std::uint8_t { bf16, float32, int32, uint8 };
enum class Access : std::uint8_t { read, write };

/// One size that is asked for: a number, or any, named as people know it ("tokens").
struct Size {
  Size(std::int64_t wanted) : number(wanted) {}
  Size(const char* any) : name(any) {}
  std::int64_t number = 0;
  const char* name = nullptr;  ///< null: exactly `number`
};

/// What kernels ask of the first byte of rows and results on a GPU.
constexpr std::size_t row_alignment = 16;

/// What an argument has to be, in C order.
struct Wanted {
  const char* name;  ///< of the argument
  Element element;
  std::vector<Size> sizes;
  Access access = Access::read;
  std::optional<int> gpu = {};  ///< the CUDA device; none: host memory
  std::size_t alignment = 1;    ///< of its first byte
};

/// Holds what was lent until it goes out of scope.
class Lent {
 public:
  /// Throws InputError that says what was expected and what came; TypeError where it is no array.
  Lent(nb::handle object, const Wanted& wanted);

  std::int64_t size(std::size_t dimension) const { return static_cast<std::int64_t>(array_.shape(dimension)); }
  template <class T>
  T* data() const {
    return static_cast<T*>(const_cast<void*>(array_.data()));  // writable where Access::write was asked for
  }

 private:
  nb::ndarray<nb::ro> array_;
};

/// An array of NumPy over memory that `owner` keeps; None where there is none. Nobody may write to it.
template <class T>
nb::object view_of(const T* data, std::initializer_list<std::size_t> shape, nb::handle owner) {
  if (data == nullptr) return nb::none();
  return nb::cast(nb::ndarray<nb::numpy, const T>(data, shape, owner));
}

/// Once, when the module is loaded: imports NumPy and ml_dtypes. Not at first use, where a thread that imports lets the interpreter
/// go while others come here.
void prepare_arrays();

/// Where any array's memory begins, for tests of copies.
std::size_t address_of(nb::handle object);

}  // namespace heddle::python
