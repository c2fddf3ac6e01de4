// heddle report: hands the files of heddle bench all to the Python program that draws them (tools/report).
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "command.hpp"
#include "heddle/error.hpp"

extern char** environ;

namespace heddle::tool {

namespace {

namespace fs = std::filesystem;

struct ReportArguments {
  std::vector<std::string> files;
  std::string out, python = "python3";
};

/// Beside an installed command, or where this one was built.
fs::path program_folder() {
  std::error_code failed;
  const fs::path here = fs::read_symlink("/proc/self/exe", failed).parent_path();
  const fs::path installed = here.parent_path() / "share" / "heddle" / "report";
  if (!failed && fs::exists(installed / "__main__.py")) return installed;
  const fs::path built = HEDDLE_REPORT_FOLDER;
  if (fs::exists(built / "__main__.py")) return built;
  throw InputError(
      fmt::format("the report's program is neither in {} nor in {}; install Heddle with its command, or keep its sources",
                  installed.string(), built.string()));
}

/// Exit status of a program that is waited for. Throws InputError where it cannot be started, Error where a signal ended it.
int run(std::vector<std::string> words) {
  std::vector<char*> typed;
  for (std::string& word : words) typed.push_back(word.data());
  typed.push_back(nullptr);
  pid_t child = 0;
  if (const int error = posix_spawnp(&child, typed.front(), nullptr, nullptr, typed.data(), environ); error != 0)
    throw InputError(fmt::format("{} cannot be started: {}; the report needs Python 3 with Matplotlib (--python names another)",
                                 words.front(), std::strerror(error)));
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) throw Error(ErrorKind::fault, fmt::format("{}: {}", words.front(), std::strerror(errno)));
  }
  if (!WIFEXITED(status)) throw Error(ErrorKind::fault, fmt::format("{} was ended by signal {}", words.front(), WTERMSIG(status)));
  return WEXITSTATUS(status);
}

}  // namespace

void add_report(CLI::App& app, int& status) {
  auto a = std::make_shared<ReportArguments>();
  auto* command =
      app.add_subcommand("report", "a page and figures from files of heddle bench all; of two files what became slower");
  command->add_option("files", a->files, "one file, or two to compare")->required()->expected(1, 2)->type_name("FILE ...");
  command->add_option("--out", a->out, "folder for report.html and figures/ (SVG, PNG)")->required();
  command->add_option("--python", a->python, "a Python 3 that has Matplotlib")->capture_default_str();
  command->callback([a, &status] {
    for (const std::string& file : a->files) {  // before anything can be wrong with Python
      if (std::error_code ignored; !fs::is_regular_file(file, ignored)) throw InputError(fmt::format("there is no file {}", file));
    }
    std::vector<std::string> words{a->python, "-B", program_folder().string()};
    words.insert(words.end(), a->files.begin(), a->files.end());
    words.insert(words.end(), {"--out", a->out});
    const int ended = run(words);
    constexpr int bad_files = 2;
    if (ended != 0 && ended != bad_files)
      throw Error(ErrorKind::fault, fmt::format("{} ended with status {}; what it said is above", a->python, ended));
    status = ended;
  });
}

}  // namespace heddle::tool
