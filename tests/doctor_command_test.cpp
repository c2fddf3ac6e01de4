// `heddle doctor` from outside, on whatever machine this is.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

class DoctorCommand : public CommandTest {};

TEST_F(DoctorCommand, ExitStatusLinesAndJsonSayTheSame) {
  const Ran ran = run("doctor --json " + file("d.json"));
  ASSERT_EQ("", ran.err);
  const auto json = json_of(file("d.json"));
  EXPECT_FALSE(json.at("findings").empty());
  bool fit = true;
  for (const auto& finding : json.at("findings")) {
    EXPECT_NE(std::string::npos, ran.out.find(finding.at("what"))) << finding;
    const std::string severity = finding.at("severity");
    if (severity == "failed") fit = false;
    EXPECT_TRUE(finding.at("advice").is_string() || severity == "ok" || severity == "note") << finding;
  }
  EXPECT_EQ(json.at("fit"), fit);
  EXPECT_EQ(ran.status, fit ? 0 : 1) << ran.out;
}

TEST_F(DoctorCommand, TheHostEngineIsTried) {
  run("doctor --json " + file("d.json"));
  std::vector<std::string> names;
  const auto json = json_of(file("d.json"));
  for (const auto& test : json.at("facts").at("tests")) {
    names.push_back(test.at("name"));
    EXPECT_TRUE(names.back().find("host:") != 0 || test.at("state") == "passed") << test;
  }
  names.resize(3);
  EXPECT_EQ(names, (std::vector<std::string>{"host: heap", "host: words", "host: layer"}));
}

TEST_F(DoctorCommand, LooksWithoutTesting) {
  const Ran ran = run("doctor --no-test");
  EXPECT_NE(std::string::npos, ran.out.find("left out: --no-test")) << ran.out;
  EXPECT_EQ(std::string::npos, ran.out.find("host: layer")) << ran.out;
}

TEST_F(DoctorCommand, ASmallLimitIsNamed) {
  const Ran ran = shell("ulimit -n 40; \"$heddle\" doctor --no-test");
  EXPECT_EQ(1, ran.status) << ran.out;
  EXPECT_NE(std::string::npos, ran.out.find("a process may open 40 files")) << ran.out;
}

TEST_F(DoctorCommand, NothingAppearsWhereSomethingIsWrong) {
  expect_error(2, "doctor --json " + file("no_folder/d.json"), "no_folder");
  expect_error(2, "doctor --way mega", "--way");
}

}  // namespace
}  // namespace heddle::command_test
