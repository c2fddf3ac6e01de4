// The command's frame: every subcommand lives in a file of its own and adds itself here.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace heddle::tool {

/// Says what would be right where a whole number is wanted and something else was typed.
inline const CLI::Validator whole_number(
    [](std::string& typed) {
      int value = 0;
      return CLI::detail::lexical_cast(typed, value) ? std::string() : "'" + typed + "' is not a whole number (of 32 bits)";
    },
    "");

/// Each of these adds one subcommand. Its callback runs after parsing; it throws heddle::Error
/// (whose kind is the exit status) or sets `status`, which is 0 before.
void add_run(CLI::App& app, int& status);
void add_verify(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);

}  // namespace heddle::tool
