// heddle._core: the library as Python sees it. Thin on purpose; what people import is written in python/heddle/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "arrays.hpp"
#include "errors.hpp"
#include "heddle/version.hpp"
#include "rooms.hpp"

NB_MODULE(_core, module) {
  using namespace heddle::python;
  translate_errors();
  prepare_arrays();
  module.attr("version") = std::string(heddle::version);
  bind_group(module);
  bind_source(module);
  bind_exchange(module);
  bind_experts(module);
  bind_layer(module);
  bind_plan(module);
  bind_formats(module);
  bind_reference(module);
#ifdef HEDDLE_CUDA
  bind_device(module);
  bind_device_experts(module);
  bind_device_exchange(module);
  bind_grouped_product(module);
#endif
  module.def("address_of", &address_of, nanobind::arg("array"), "Where an array's memory begins (for tests of copies).");
}
