// The parts of the module, a function each.
#pragma once

#include <nanobind/nanobind.h>

namespace heddle::python {

void bind_group(nanobind::module_& module);
void bind_source(nanobind::module_& module);
void bind_exchange(nanobind::module_& module);
void bind_experts(nanobind::module_& module);
void bind_layer(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_formats(nanobind::module_& module);
void bind_reference(nanobind::module_& module);
void bind_device(nanobind::module_& module);           // with HEDDLE_CUDA
void bind_device_experts(nanobind::module_& module);   // with HEDDLE_CUDA
void bind_device_exchange(nanobind::module_& module);  // with HEDDLE_CUDA
void bind_grouped_product(nanobind::module_& module);  // with HEDDLE_CUDA

}  // namespace heddle::python
