// The command's frame: every subcommand lives in a file of its own and adds itself here.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

namespace heddle::tool {

/// Says what would be right where a whole number is wanted and something else was typed.
inline const CLI::Validator whole_number(
    [](std::string& typed) {
      int value = 0;
      return CLI::detail::lexical_cast(typed, value) ? std::string() : "'" + typed + "' is not a whole number (of 32 bits)";
    },
    "");

/// Likewise for a seed: from_chars takes neither a sign nor what is beyond 64 bits.
inline const CLI::Validator seed_number(
    [](std::string& typed) {
      std::uint64_t value = 0;
      const auto [end, error] = std::from_chars(typed.data(), typed.data() + typed.size(), value);
      const bool whole = error == std::errc() && end == typed.data() + typed.size();
      return whole ? std::string() : "'" + typed + "' is not a whole number from 0 to 2^64 - 1";
    },
    "");

/// Likewise where a number may have a fraction.
inline const CLI::Validator finite_number(
    [](std::string& typed) {
      double value = 0;
      const auto [end, error] = std::from_chars(typed.data(), typed.data() + typed.size(), value);
      const bool whole = error == std::errc() && end == typed.data() + typed.size();
      return whole && std::isfinite(value) ? std::string() : "'" + typed + "' is not a finite number";
    },
    "");

/// Each of these adds one subcommand. Its callback runs after parsing; it throws heddle::Error
/// (whose kind is the exit status) or sets `status`, which is 0 before.
void add_run(CLI::App& app, int& status);
void add_verify(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);
void add_tune(CLI::App& app, int& status);
void add_trace(CLI::App& app, int& status);
void add_replay(CLI::App& app, int& status);
void add_doctor(CLI::App& app, int& status);
void add_report(CLI::App& app, int& status);

}  // namespace heddle::tool
