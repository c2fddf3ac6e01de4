#include "errors.hpp"

#include <nanobind/nanobind.h>

#include <string>

#include "heddle/error.hpp"

namespace nb = nanobind;

namespace heddle::python {

namespace {

nb::object class_of(const char* name) { return nb::module_::import_("heddle.errors").attr(name); }

void raise(const char* name, const char* message) { PyErr_SetString(class_of(name).ptr(), message); }

void raise(const FaultError& error) {
  const Fault& fault = error.fault();
  const nb::object type = class_of("FaultError");
  nb::object raised = type(error.what());
  raised.attr("rank") = fault.rank;
  raised.attr("peer") = fault.peer < 0 ? nb::none() : nb::object(nb::int_(fault.peer));
  raised.attr("phase") = nb::str(fault.phase.c_str());
  raised.attr("word") = nb::str(fault.word.c_str());
  raised.attr("expected") = fault.expected;
  raised.attr("seen") = fault.seen;
  PyErr_SetObject(type.ptr(), raised.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const FaultError& fault) {
    raise(fault);
  } catch (const InputError& input) {
    raise("InputError", input.what());
  } catch (const Error& other) {
    raise("Error", other.what());
  }
}

}  // namespace

void translate_errors() { nb::register_exception_translator(translate); }

}  // namespace heddle::python
