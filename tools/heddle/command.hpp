// The command's frame: every subcommand lives in a file of its own and adds itself here.
#pragma once

#include <CLI/CLI.hpp>

namespace heddle::tool {

/// Each of these adds one subcommand. Its callback runs after parsing; it throws heddle::Error
/// (whose kind is the exit status) or sets `status`, which is 0 before.
void add_plan(CLI::App& app, int& status);

}  // namespace heddle::tool
