// heddle: the command. Exit status 0 done, 1 a check failed, 2 bad arguments or files, 3 a run-time
// fault; every error is one line on standard error that begins with "heddle: ".
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
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

int run(CLI::App& app, int argc, char** argv, const int& status) {
  try {
    app.parse(argc, argv);
    return status;
  } catch (const CLI::Success& wanted) {  // --help, --version
    return app.exit(wanted);
  } catch (const CLI::ParseError& error) {
    if (const auto used = app.get_subcommands(); !used.empty()) {
      return report(ErrorKind::input, fmt::format("{} (see heddle {} --help)", error.what(), used.front()->get_name()));
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
