// Arguments of a measurement, read as if they had been typed.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

#include "heddle/error.hpp"

namespace heddle::tool {

/// `add` adds flags that fill `arguments` to an app. Throws InputError for what they do not take.
template <class Arguments, class Add>
void read_flags(const std::string& typed, Arguments& arguments, const Add& add) {
  CLI::App app;
  add(app, arguments);
  try {
    app.parse(typed);
  } catch (const CLI::ParseError& error) {
    throw InputError(fmt::format("{}: {}", typed, error.what()));
  }
}

}  // namespace heddle::tool
