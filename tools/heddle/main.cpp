// heddle: the command. Exit status 0 done, 1 a check failed, 2 bad arguments or files, 3 a run-time
// fault; every error is one line on standard error that begins with "heddle: ".
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench.hpp"
#include "command.hpp"
#include "heddle/error.hpp"
#include "heddle/version.hpp"

namespace {

using heddle::ErrorKind;

int report(ErrorKind kind, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "heddle: {}\n", message);
  return static_cast<int>(kind);
}

std::string command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

/// Changes of a letter that make one word of the other: put in, left out, or another.
std::size_t distance(const std::string& from, const std::string& to) {
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t before = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t same = before + (from[i] == to[j] ? 0 : 1);
      before = std::exchange(row[j + 1], std::min({same, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

/// The option that a misspelt one is nearest to, as a question; empty where none is near.
std::string suggestion(const CLI::App& command, const std::string& given) {
  std::string nearest;
  std::size_t least = 3;
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    const std::size_t apart = distance(given, name);
    if (apart < least) least = apart, nearest = name;
  }
  return nearest.empty() ? nearest : fmt::format("; did you mean {}?", nearest);
}

/// The command that the line ends in: of `bench exchange` the second.
const CLI::App& last_of(const CLI::App& command) {
  const auto used = command.get_subcommands();
  return used.empty() ? command : last_of(*used.front());
}

int run(CLI::App& app, int argc, char** argv, const int& status) {
  try {
    app.parse(argc, argv);
    return status;
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::ParseError& error) {
    if (const auto used = app.get_subcommands(); !used.empty()) {
      std::string what = error.what();
      if (const std::vector<std::string> extras = app.remaining(true); !extras.empty())
        what = fmt::format("not expected: {}{}", fmt::join(extras, " "), suggestion(last_of(*used.front()), extras.front()));
      return report(ErrorKind::input, fmt::format("{} (see heddle {} --help)", what, used.front()->get_name()));
    }
    const std::string given = argc > 1 ? fmt::format("unknown command '{}'", argv[1]) : std::string("no command");
    return report(ErrorKind::input, fmt::format("{}; known are {} (see heddle --help)", given, command_names(app)));
  } catch (const heddle::Error& error) {
    return report(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    return report(ErrorKind::input, "not enough memory for these sizes; take fewer tokens, ranks or experts, or a smaller --cap");
  } catch (const std::length_error&) {
    return report(ErrorKind::input, "these sizes are beyond any memory; take fewer tokens");
  } catch (const std::exception& error) {
    return report(std::ferror(stdout) != 0 ? ErrorKind::input : ErrorKind::fault, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file or heap above the shell's limit (ulimit -f) is an error of one line, no death
  CLI::App app{"Heddle: one expert-parallel Mixture-of-Experts layer, by every known way of the round trip.", "heddle"};
  app.set_version_flag("--version", fmt::format("heddle {}", heddle::version), "print the version and exit");
  app.set_help_flag("-h,--help", "print this and exit");
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 done, 1 a check failed, 2 bad arguments or files, 3 a run-time fault.\n`heddle COMMAND --help` says more.");

  int status = 0;
  heddle::tool::add_run(app, status);
  heddle::tool::add_verify(app, status);
  heddle::tool::add_plan(app, status);
  heddle::tool::add_tune(app, status);
  heddle::tool::add_trace(app, status);
  heddle::tool::add_replay(app, status);
  heddle::tool::add_doctor(app, status);
  heddle::tool::add_bench(app, status);
  heddle::tool::add_report(app, status);

  status = run(app, argc, argv, status);
  const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (lost && status == 0) {
    return report(ErrorKind::input, "cannot write to standard output; is the disk full, or the pipe closed?");
  }
  return status;
}
