// Reading NumPy's .npy files: a header that says type, order and shape, then the raw values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace heddle {

/// One array in C order; `data` holds exactly the product of `shape` values of `type`.
struct NpyArray {
  std::string path;
  std::string type;  ///< NumPy's name without the byte order: u1, i2, i4, i8, u2, f2, f4; b2 for bf16, which NumPy lacks
  std::vector<std::size_t> shape;
  std::vector<std::byte> data;

  std::size_t size() const;
  std::string shape_text() const;  ///< e.g. [8222, 26, 6]
};

/// Throws InputError: no such file, not a .npy file, damaged header, Fortran or big-endian order, a
/// type that is not listed above, more or fewer bytes than the shape needs.
NpyArray read_npy(const std::string& path);
/// The same from a file's bytes; `label` stands in errors and becomes the array's path.
NpyArray parse_npy(std::span<const char> bytes, const std::string& label);

/// Integer values (u1, i2, i4, i8, u2) as 64-bit; InputError for other types.
std::vector<std::int64_t> integers(const NpyArray& array);

/// Floats (f2, f4, b2) as they are, u2 in units of 1e-4; InputError for other types.
std::vector<float> weights_of(const NpyArray& array);

}  // namespace heddle
