// Errors on their way from C++ to Python (python/heddle/errors.py).
#pragma once

namespace heddle::python {

/// InputError and FaultError of the library become the exceptions of heddle.errors, fields of the fault as attributes.
void translate_errors();

}  // namespace heddle::python
