#include "arrays.hpp"

#include <fmt/format.h>

#include "heddle/error.hpp"

namespace heddle::python {

namespace {

/// NumPy does not lend bfloat16, a type that ml_dtypes adds to it: such arrays are lent as uint16, and known before.
struct NumpyNames {
  nb::object bfloat16 = nb::module_::import_("numpy").attr("dtype")(nb::module_::import_("ml_dtypes").attr("bfloat16"));
  nb::object uint16 = nb::module_::import_("numpy").attr("dtype")("uint16");
  nb::object array = nb::module_::import_("numpy").attr("ndarray");

  bool is_numpy(nb::handle object) const { return nb::isinstance(object, array); }
  bool is_bfloat16(nb::handle object) const {
    const nb::object dtype = nb::getattr(object, "dtype", nb::none());
    return dtype.is(bfloat16) || (is_numpy(object) && dtype.equal(bfloat16));
  }
};

// Never freed: the interpreter may be gone when statics are destroyed.
const NumpyNames* numpy_names = nullptr;

/// torch's tensors, where torch has been imported. Their __dlpack__ is Python that takes two microseconds, synchronises streams and
/// takes the current device's tensors only; to_dlpack does none of it.
struct TorchNames {
  nb::object tensor, to_dlpack;
};

/// Null until all of it has been imported. With the GIL.
const TorchNames* torch_names() {
  static const TorchNames* names = nullptr;
  if (names != nullptr) return names;
  const nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
  const nb::object utils = nb::getattr(torch, "utils", nb::none());
  const nb::object to_dlpack = nb::getattr(nb::getattr(utils, "dlpack", nb::none()), "to_dlpack", nb::none());
  const nb::object tensor = nb::getattr(torch, "Tensor", nb::none());
  if (to_dlpack.is_none() || tensor.is_none()) return nullptr;
  names = new TorchNames{tensor, to_dlpack};
  return names;
}

/// What a tensor of torch lends; invalid where there is none, and for subclasses, whose own __dlpack__ decides.
nb::object capsule_of_torch(nb::handle object) {
  const TorchNames* const torch = torch_names();
  if (torch == nullptr || !object.type().is(torch->tensor)) return {};
  try {
    return torch->to_dlpack(object);
  } catch (const nb::python_error&) {
    return {};
  }
}

std::string class_name(nb::handle object) { return nb::str(nb::inst_name(object)).c_str(); }

std::string element_name(Element element) {
  constexpr const char* names[] = {"bfloat16", "float32", "int32", "uint8"};
  return names[static_cast<int>(element)];
}

nb::dlpack::dtype dtype_of(Element element) {
  using Code = nb::dlpack::dtype_code;
  const auto make = [](Code code, std::uint8_t bits) { return nb::dlpack::dtype{static_cast<std::uint8_t>(code), bits, 1}; };
  switch (element) {
    case Element::bf16:
      return make(Code::Bfloat, 16);
    case Element::float32:
      return make(Code::Float, 32);
    case Element::int32:
      return make(Code::Int, 32);
    case Element::uint8:
      break;
  }
  return make(Code::UInt, 8);
}

std::string name_of(const nb::dlpack::dtype& dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  const char* kind = "a type of other elements, bits: ";
  if (code == nb::dlpack::dtype_code::Int) kind = "int";
  if (code == nb::dlpack::dtype_code::UInt) kind = "uint";
  if (code == nb::dlpack::dtype_code::Float) kind = "float";
  if (code == nb::dlpack::dtype_code::Bfloat) kind = "bfloat";
  if (code == nb::dlpack::dtype_code::Bool) kind = "bool";
  return fmt::format("{}{}", kind, dtype.bits);
}

std::string name_of_device(int type, int id) {
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return "host memory";
  return type == nb::device::cuda::value ? fmt::format("CUDA device {}", id) : fmt::format("device type {} ({})", type, id);
}

std::string text_of(const std::vector<Size>& sizes) {
  std::string text;
  for (const Size& size : sizes) {
    if (!text.empty()) text += ", ";
    text += size.name != nullptr ? size.name : fmt::format("{}", size.number);
  }
  return fmt::format("[{}]", text);
}

std::string shape_text(const nb::ndarray<nb::ro>& array) {
  std::string text;
  for (std::size_t i = 0; i < array.ndim(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", array.shape(i));
  return fmt::format("[{}]", text);
}

[[noreturn]] void complain(const Wanted& wanted, const std::string& got, const std::string& help = "") {
  throw InputError(fmt::format("{}: expected {} {}, C order, in {}{}; got {}{}", wanted.name, element_name(wanted.element),
                               text_of(wanted.sizes), wanted.gpu ? fmt::format("CUDA device {}", *wanted.gpu) : "host memory",
                               wanted.access == Access::write ? ", writable" : "", got, help.empty() ? "" : "; " + help));
}

/// Lends it, or says why it cannot.
nb::ndarray<nb::ro> lend(nb::handle object, const Wanted& wanted, bool& is_numpy_bf16) {
  const NumpyNames& numpy = *numpy_names;
  nb::object lender = nb::borrow(object);
  is_numpy_bf16 = numpy.is_bfloat16(object);
  if (is_numpy_bf16) {
    lender = object.attr("view")(numpy.uint16);
  } else if (!numpy.is_numpy(object)) {
    if (nb::getattr(object, "requires_grad", nb::none()).is(Py_True)) {
      complain(wanted, "a tensor that requires gradients", "there are none here: give its detach(), or call under torch.no_grad()");
    }
    if (nb::object capsule = capsule_of_torch(object); capsule.is_valid()) lender = std::move(capsule);
  }
  nb::ndarray<nb::ro> array;
  if (wanted.access == Access::write) {
    nb::ndarray<> writable;
    if (nb::try_cast(lender, writable, false)) return nb::ndarray<nb::ro>(writable);
    if (nb::try_cast(lender, array, false)) complain(wanted, "a read-only array");
  } else if (nb::try_cast(lender, array, false)) {
    return array;
  }
  const bool is_array = nb::hasattr(object, "__dlpack__") || nb::isinstance<nb::capsule>(object);
  if (is_array) {
    complain(wanted, fmt::format("{} of dtype {}, which it does not lend by DLPack", class_name(object),
                                 nb::str(nb::getattr(object, "dtype", nb::str("unknown"))).c_str()));
  }
  throw nb::type_error(fmt::format("{}: expected an array of {} {} with __dlpack__, got {}", wanted.name,
                                   element_name(wanted.element), text_of(wanted.sizes), class_name(object))
                           .c_str());
}

bool fits(const nb::ndarray<nb::ro>& array, const std::vector<Size>& sizes) {
  if (array.ndim() != sizes.size()) return false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].name == nullptr && static_cast<std::int64_t>(array.shape(i)) != sizes[i].number) return false;
  }
  return true;
}

bool is_c_order(const nb::ndarray<nb::ro>& array) {
  if (array.size() == 0) return true;  // strides of nothing are anything
  std::int64_t stride = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != stride) return false;
    stride *= static_cast<std::int64_t>(array.shape(i));
  }
  return true;
}

bool is_there(const nb::ndarray<nb::ro>& array, std::optional<int> gpu) {
  const int type = array.device_type();
  if (gpu) return type == nb::device::cuda::value && array.device_id() == *gpu;
  return type == nb::device::cpu::value || type == nb::device::cuda_host::value;
}

}  // namespace

void prepare_arrays() { numpy_names = new NumpyNames(); }

Lent::Lent(nb::handle object, const Wanted& wanted) {
  bool is_numpy_bf16 = false;
  array_ = lend(object, wanted, is_numpy_bf16);
  if (is_numpy_bf16 ? wanted.element != Element::bf16 : array_.dtype() != dtype_of(wanted.element)) {
    const std::string got = is_numpy_bf16 ? "bfloat16" : name_of(array_.dtype());
    complain(wanted, fmt::format("{} {}", got, shape_text(array_)), "nothing is converted here, since that would be a copy");
  }
  if (!is_there(array_, wanted.gpu)) complain(wanted, "an array in " + name_of_device(array_.device_type(), array_.device_id()));
  if (!fits(array_, wanted.sizes)) complain(wanted, "shape " + shape_text(array_));
  if (!is_c_order(array_)) {
    std::string strides;
    for (std::size_t i = 0; i < array_.ndim(); ++i) strides += fmt::format("{}{}", i == 0 ? "" : ", ", array_.stride(i));
    complain(wanted, fmt::format("shape {} with strides [{}]", shape_text(array_), strides), "make it contiguous first");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(array_.data());
  if (address % wanted.alignment != 0) {
    complain(wanted, fmt::format("memory at {:#x}, which is no multiple of {} bytes", address, wanted.alignment));
  }
}

std::size_t address_of(nb::handle object) {
  bool is_numpy_bf16 = false;
  return reinterpret_cast<std::size_t>(lend(object, {"array", Element::uint8, {}}, is_numpy_bf16).data());
}

}  // namespace heddle::python
