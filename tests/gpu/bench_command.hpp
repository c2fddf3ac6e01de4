// `heddle bench` from outside: what its tests share.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>

#include "gpu/buffers.hpp"
#include "gpu/command.hpp"

namespace heddle {

using Json = nlohmann::json;

/// Skipped where the command is not built. GPUs are asked for by the tests that need them.
class BenchCommand : public testing::Test {
 protected:
  struct Refusal {
    const char* arguments;
    const char* part;  ///< of what is said
  };

  void SetUp() override {
    if (!std::filesystem::exists(heddle_command())) GTEST_SKIP() << "the command is not at " << heddle_command();
  }
  void TearDown() override { std::filesystem::remove(file_); }

  std::string file() const { return file_.string(); }
  Json json() const {
    std::ifstream stream(file_);
    return Json::parse(stream);
  }

  /// Of heddle `arguments`, which is to end well, its JSON; null if there is none.
  Json measured(const std::string& arguments) const {
    std::filesystem::remove(file_);
    const Ran ran = run_heddle(fmt::format("{} --commit abc --json {}", arguments, file()));
    EXPECT_EQ(ran.status, 0) << arguments << "\n" << ran.text;
    if (!std::filesystem::exists(file_)) return nullptr;
    Json object = json();
    EXPECT_EQ(object["commit"], "abc");
    EXPECT_EQ(object.count("failed"), 0u) << object["failed"];
    return object;
  }

  /// Each behind `command`, before anything runs.
  static void expect_refused(const std::string& command, std::initializer_list<Refusal> refusals) {
    for (const auto& [arguments, part] : refusals) {
      const Ran ran = run_heddle(fmt::format("{} {}", command, arguments));
      EXPECT_EQ(ran.status, 2) << arguments << "\n" << ran.text;
      EXPECT_NE(ran.text.find(part), std::string::npos) << arguments << "\nshould name " << part << ": " << ran.text;
    }
  }

 private:
  const std::filesystem::path file_ = std::filesystem::temp_directory_path() / fmt::format("heddle-bench-{}.json", getpid());
};

}  // namespace heddle
