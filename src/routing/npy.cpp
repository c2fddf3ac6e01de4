#include "routing/npy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "heddle/error.hpp"
#include "heddle/formats.hpp"
#include "routing/file_bytes.hpp"

namespace heddle {

static_assert(std::endian::native == std::endian::little, "values are read as they lie in the file");

namespace {

constexpr std::size_t largest_header = std::size_t{1} << 20;

/// Reads the header's Python dictionary, of which only three keys exist.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  void parse(NpyArray& array) {
    std::optional<bool> fortran;
    bool has_shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string_view key = quoted();
      expect(':');
      if (key == "descr") {
        array.type = little_endian(quoted());
      } else if (key == "fortran_order") {
        fortran = boolean();
      } else if (key == "shape") {
        array.shape = tuple();
        has_shape = true;
      } else {
        fail(fmt::format("unknown key '{}'", key));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    if (array.type.empty() || !fortran.has_value() || !has_shape) fail("descr, fortran_order or shape is missing");
    if (*fortran) throw InputError(fmt::format("{}: values in Fortran order; save it in C order", path_));
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("{}: damaged .npy header: {}", path_, what));
  }

  void skip_spaces() {
    while (!text_.empty() && (text_.front() == ' ' || text_.front() == '\n')) text_.remove_prefix(1);
  }
  bool accept(std::string_view word) {
    skip_spaces();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  bool accept(char c) { return accept(std::string_view(&c, 1)); }
  void expect(char c) {
    if (!accept(c)) fail(fmt::format("'{}' is missing {} characters before its end", c, text_.size()));
  }
  std::string_view quoted() {
    expect('\'');
    const std::size_t end = text_.find('\'');
    if (end == std::string_view::npos) fail("a string does not end");
    const std::string_view word = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    return word;
  }
  bool boolean() {
    if (accept("True")) return true;
    if (!accept("False")) fail("fortran_order is neither True nor False");
    return false;
  }
  std::vector<std::size_t> tuple() {
    std::vector<std::size_t> sizes;
    expect('(');
    while (!accept(')')) {
      skip_spaces();
      std::size_t size = 0;
      const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), size);
      if (error != std::errc{}) fail("the shape is not a tuple of numbers");
      sizes.push_back(size);
      text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return sizes;
  }
  std::string little_endian(std::string_view type) const {
    for (const std::string_view known : {"|u1", "<i2", "<i4", "<i8", "<u2", "<f2", "<f4"}) {
      if (type == known) return std::string(known.substr(1));
    }
    throw InputError(
        fmt::format("{}: values of type '{}'; ids may be little-endian int16, int32, int64, uint8 or uint16, weights uint16, "
                    "float16 or float32",
                    path_, type));
  }

  std::string_view text_;
  const std::string& path_;
};

std::size_t bytes_a_value(const NpyArray& array) { return static_cast<std::size_t>(array.type.back() - '0'); }

/// Bytes of the values, or nothing if the product does not fit.
std::optional<std::size_t> data_bytes(const NpyArray& array) {
  std::size_t bytes = bytes_a_value(array);
  for (const std::size_t size : array.shape) {
    if (size != 0 && bytes > std::numeric_limits<std::size_t>::max() / size) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

/// The header's text, and where the values begin.
std::string_view header_of(std::span<const char> file, const std::string& path, std::size_t& data_begin) {
  constexpr std::string_view magic = "\x93NUMPY";
  const std::string_view all(file.data(), file.size());
  if (!all.starts_with(magic)) throw InputError(fmt::format("{}: not a .npy file: it does not begin with NumPy's mark", path));
  const std::size_t version_at = magic.size();
  const int version = file.size() > version_at ? file[version_at] : 0;
  const std::size_t length_bytes = version == 1 ? 2 : 4;
  const std::size_t text_begin = version_at + 2 + length_bytes;
  if (version < 1 || version > 3) throw InputError(fmt::format("{}: .npy version {}; 1, 2 and 3 are known", path, version));
  if (file.size() < text_begin) throw InputError(fmt::format("{}: damaged .npy file: {} bytes", path, file.size()));
  std::uint32_t length = 0;
  std::memcpy(&length, file.data() + version_at + 2, length_bytes);
  if (length > largest_header || length > file.size() - text_begin) {
    throw InputError(fmt::format("{}: damaged .npy file: a header of {} bytes in a file of {}", path, length, file.size()));
  }
  data_begin = text_begin + length;
  return all.substr(text_begin, length);
}

template <class Value>
Value value_at(const NpyArray& array, std::size_t index) {
  Value value;
  std::memcpy(&value, array.data.data() + index * sizeof value, sizeof value);
  return value;
}

float from_half(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31)
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
}

}  // namespace

std::size_t NpyArray::size() const { return data.size() / bytes_a_value(*this); }

std::string NpyArray::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

NpyArray read_npy(const std::string& path) { return parse_npy(read_file(path), path); }

NpyArray parse_npy(std::span<const char> file, const std::string& path) {
  NpyArray array;
  array.path = path;
  std::size_t begin = 0;
  HeaderParser(header_of(file, path, begin), path).parse(array);
  const std::optional<std::size_t> bytes = data_bytes(array);
  if (bytes != file.size() - begin) {
    throw InputError(fmt::format("{}: damaged .npy file: {} bytes of values, shape {} of {} needs {}", path, file.size() - begin,
                                 array.shape_text(), array.type, bytes ? std::to_string(*bytes) : "more than any file has"));
  }
  array.data.resize(*bytes);
  if (*bytes != 0) std::memcpy(array.data.data(), file.data() + begin, *bytes);
  return array;
}

std::vector<std::int64_t> integers(const NpyArray& array) {
  std::vector<std::int64_t> out(array.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (array.type == "u1") {
      out[i] = value_at<std::uint8_t>(array, i);
    } else if (array.type == "i2") {
      out[i] = value_at<std::int16_t>(array, i);
    } else if (array.type == "i4") {
      out[i] = value_at<std::int32_t>(array, i);
    } else if (array.type == "i8") {
      out[i] = value_at<std::int64_t>(array, i);
    } else if (array.type == "u2") {
      out[i] = value_at<std::uint16_t>(array, i);
    } else {
      throw InputError(fmt::format("{}: ids of type {}; int16, int32, int64, uint8 or uint16 are needed", array.path, array.type));
    }
  }
  return out;
}

std::vector<float> weights_of(const NpyArray& array) {
  std::vector<float> out(array.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (array.type == "f2") {
      out[i] = from_half(value_at<std::uint16_t>(array, i));
    } else if (array.type == "f4") {
      out[i] = value_at<float>(array, i);
    } else if (array.type == "b2") {
      out[i] = to_float(bf16{value_at<std::uint16_t>(array, i)});
    } else if (array.type == "u2") {
      out[i] = static_cast<float>(value_at<std::uint16_t>(array, i)) / 10000.0f;
    } else {
      throw InputError(fmt::format("{}: weights of type {}; uint16, float16 or float32 are needed", array.path, array.type));
    }
  }
  return out;
}

}  // namespace heddle
