// The command from outside: a folder of its own for each test, exit statuses and what was printed.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

namespace heddle {

struct Ran {
  int status = -1;
  std::string text;  ///< standard error, or output, as the redirection says
};

class Command : public ::testing::Test {
 protected:
  void SetUp() override {
    command_ = std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "heddle";
    if (!std::filesystem::exists(command_)) {
      GTEST_SKIP() << command_ << " is not built";
    }
    std::string name = (std::filesystem::temp_directory_path() / "heddle-command-XXXXXX").string();
    ASSERT_NE(nullptr, ::mkdtemp(name.data()));
    folder_ = name;
  }
  void TearDown() override {
    if (!folder_.empty()) {
      std::filesystem::remove_all(folder_);
    }
  }

  /// `before`: what the shell does first.
  Ran run(const std::string& arguments, const std::string& before = "") const {
    std::FILE* pipe = ::popen((before + command_.string() + " " + arguments).c_str(), "r");
    Ran ran;
    std::array<char, 4096> block{};
    for (std::size_t read = 0; (read = std::fread(block.data(), 1, block.size(), pipe)) > 0;) {
      ran.text.append(block.data(), read);
    }
    const int status = ::pclose(pipe);
    ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return ran;
  }
  Ran errors_of(const std::string& arguments, const std::string& before = "") const {
    return run(arguments + " 2>&1 >/dev/null", before);
  }

  void expect_refused(const std::string& arguments, const std::string& part) const {
    const Ran ran = errors_of(arguments);
    EXPECT_EQ(2, ran.status) << arguments;
    EXPECT_EQ(0u, ran.text.find("heddle: ")) << ran.text;
    EXPECT_EQ(ran.text.size() - 1, ran.text.find('\n')) << "one line: " << ran.text;
    EXPECT_NE(std::string::npos, ran.text.find(part)) << ran.text;
  }

  std::filesystem::path command_, folder_;
};

}  // namespace heddle
