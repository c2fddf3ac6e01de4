// The command from outside: runs it, reads what it printed and wrote.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/safetensors.hpp"
#include "layer_files.hpp"

namespace heddle::command_test {

namespace fs = std::filesystem;

struct Ran {
  int status = -1;  ///< exit status, -signal where one ended it
  std::string out, err;
};

inline std::string text_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// A tensor's bytes; empty with a failure where the file has none of that name.
inline std::vector<std::byte> bytes_of(const fs::path& file, const std::string& tensor) {
  const auto opened = checkpoint::SafetensorsFile::open(file.string());
  const auto* found = opened->find(tensor);
  EXPECT_NE(found, nullptr) << file << " has no " << tensor;
  if (found == nullptr) return {};
  return {found->bytes.begin(), found->bytes.end()};
}

inline nlohmann::json json_of(const fs::path& file) { return nlohmann::json::parse(std::ifstream(file)); }

class CommandTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef HEDDLE_COMMAND
    command_ = HEDDLE_COMMAND;
#else
    GTEST_SKIP() << "the command is not built";
#endif
  }

  Ran run(const std::string& arguments) const { return shell("\"$heddle\" " + arguments); }
  /// A script in which $heddle is the command; the status is that of its last line.
  Ran shell(const std::string& script) const {
    const std::string out = logs_.file("out");
    const std::string err = logs_.file("err");
    const int status = std::system(("heddle='" + command_ + "'\n{ " + script + "\n} >'" + out + "' 2>'" + err + "'").c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), text_of(out), text_of(err)};
  }

  void expect_done(const std::string& arguments) const {
    const Ran ran = run(arguments);
    EXPECT_EQ(0, ran.status) << arguments << "\n" << ran.err;
    EXPECT_EQ("", ran.err) << arguments;
  }

  /// One line on standard error that names `part`, and nothing new in the test's folder.
  void expect_error(int status, const std::string& arguments, const std::string& part) const {
    expect_error_of_script(status, "\"$heddle\" " + arguments, part);
  }
  void expect_error_of_script(int status, const std::string& arguments, const std::string& part) const {
    const auto before = files();
    const Ran ran = shell(arguments);
    EXPECT_EQ(status, ran.status) << arguments << "\n" << ran.err;
    EXPECT_EQ(0u, ran.err.find("heddle: ")) << ran.err;
    EXPECT_EQ(ran.err.size() - 1, ran.err.find('\n')) << "one line: " << ran.err;
    EXPECT_NE(std::string::npos, ran.err.find(part)) << arguments << "\nshould name " << part << ": " << ran.err;
    EXPECT_EQ(before, files()) << arguments;
  }

  std::string file(const std::string& name) const { return folder_.file(name); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) names.push_back(entry.path().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string command_;

 private:
  testing::TempFolder folder_, logs_;
};

/// A layer small enough for a call in milliseconds.
inline const std::string small_layer = " --preset mixtral-8x7b --hidden 128 --intermediate 64";
inline const std::string deepseek_layer = " --preset deepseek-v4-flash --hidden 128 --intermediate 64";

}  // namespace heddle::command_test
