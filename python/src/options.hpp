// Plain data between Python (python/heddle/options.py) and the library: dataclasses by their attributes, enumerations by their
// words.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "heddle/budget.hpp"
#include "heddle/layer.hpp"
#include "words.hpp"

namespace heddle::python {

namespace nb = nanobind;

/// An attribute as a C++ value; TypeError that names it where it is something else.
template <class Value>
Value field(nb::handle object, const char* name) {
  Value value{};
  const nb::object attribute = object.attr(name);
  if (nb::try_cast(attribute, value)) return value;
  throw nb::type_error(fmt::format("{}.{} cannot be {}", nb::inst_name(object).c_str(), name, nb::repr(attribute).c_str()).c_str());
}

/// The value of a word; throws InputError that lists the words.
template <class Value>
Value value_of(const std::map<std::string, Value>& words, nb::handle word, const char* what) {
  std::string text;
  if (!nb::try_cast(word, text)) throw nb::type_error(fmt::format("{} is a word: {}", what, tool::keys(words)).c_str());
  return tool::value_of(words, what, text);
}

const std::map<std::string, Way>& ways();
const std::map<std::string, ArrivedLayout>& layouts();
const std::map<std::string, Phase>& phases();

LayerShape shape_of(nb::handle shape);
nb::object to_python(const LayerShape& shape);
LayerOptions options_of(nb::handle options);
Step step_of(nb::handle step);
Quantisation quantisation_of(nb::handle quantisation);
TokenBudget budget_of(nb::handle budget);
nb::object to_python(const LayerReport& report);
nb::object to_python(const RouterOptions& router);
RouterOptions router_of(nb::handle router);

/// A class of heddle.options, or another module of the package.
nb::object python_class(const char* name, const char* module = "heddle.options");

}  // namespace heddle::python
