// `heddle report`, on a file that the host engine measured: figures, a page that needs nothing beside it, and what it says of what
// is missing. Skipped where no Python has Matplotlib.
#include "command_support.hpp"

namespace heddle::command_test {
namespace {

const std::string measured = HEDDLE_TEST_DATA "/report/host.json";

/// The names that the three articles leave open.
const std::vector<std::string> placeholders{"agrs_total_64_8",
                                            "agrs_total_4096_8",
                                            "normal_dispatch_4096_8",
                                            "normal_combine_4096_8",
                                            "normal_dispatch_64_8",
                                            "normal_combine_64_8",
                                            "normal_host_64_8",
                                            "ll_buffer_128",
                                            "ll_buffer_1024",
                                            "ll_dispatch_64_8",
                                            "ll_combine_64_8",
                                            "fi_total_64_8",
                                            "fi_total_4096_8",
                                            "fi_workspace_4096",
                                            "v2masked_total_64_8",
                                            "v2sync_total_4096_8",
                                            "best_total_64_4",
                                            "best_step_share",
                                            "fig11_discussion_8",
                                            "layout_discussion",
                                            "s8_summary",
                                            "summary_text",
                                            "chain_us_512",
                                            "fused_us_512",
                                            "step_saved_ms",
                                            "chain_launches",
                                            "fig3_reading",
                                            "fig10_reading",
                                            "method_extra",
                                            "sec4_variants",
                                            "buffer_check",
                                            "ring_timing",
                                            "fp8_combine_result",
                                            "skew_note",
                                            "server_ab",
                                            "summary_speed",
                                            "power_note"};

class ReportCommand : public CommandTest {
 protected:
  void SetUp() override {
    CommandTest::SetUp();
    if (IsSkipped()) return;
    for (const char* python : {"python3", "/usr/bin/python3"}) {
      if (std::system((std::string(python) + " -c 'import matplotlib' >/dev/null 2>&1").c_str()) == 0) python_ = python;
    }
    if (python_.empty()) GTEST_SKIP() << "no Python here has Matplotlib (apt-get install python3-matplotlib)";
  }

  Ran report(const std::string& files) const { return run("report " + files + " --out " + file("r") + " --python " + python_); }
  std::string page() const { return text_of(file("r/report.html")); }

  std::string python_;
};

/// What would make a page or a picture ask for something beside it.
std::vector<std::string> references(const std::string& text) {
  std::vector<std::string> found;
  for (const char* bad : {"src=\"http", "href=\"http", "src=\"//", "href=\"//", "<link", "<script", "@import", "url(http",
                          "<iframe", "<!ENTITY", "DTD/svg"}) {
    if (text.find(bad) != std::string::npos) found.push_back(bad);
  }
  return found;
}

TEST_F(ReportCommand, FiguresAndAPageThatNeedsNothingBesideIt) {
  const Ran ran = report(measured);
  ASSERT_EQ(ran.status, 0) << ran.err;
  for (const char* name : {"round-trips", "copies", "layouts", "way-buffers", "chain-shares", "fused-chain", "fused-buffers",
                           "timelines", "waits", "roofline", "step", "grids"}) {
    const std::string svg = text_of(file(std::string("r/figures/") + name + ".svg"));
    EXPECT_NE(svg.find("<svg "), std::string::npos) << name;
    EXPECT_EQ(references(svg), std::vector<std::string>{}) << name;
    EXPECT_EQ(text_of(file(std::string("r/figures/") + name + ".png")).substr(1, 3), "PNG") << name;
  }
  const std::string html = page();
  EXPECT_EQ(references(html), std::vector<std::string>{});
  EXPECT_NE(html.find("host engine"), std::string::npos);
  for (const std::string& name : placeholders) EXPECT_NE(html.find("{{" + name + "}}"), std::string::npos) << name;
}

TEST_F(ReportCommand, SaysWhatIsMissingAndWhy) {
  auto json = json_of(measured);
  nlohmann::json kept = nlohmann::json::array();
  for (auto& one : json["measurements"]) {
    if (one["name"] == "step-4") {
      one.erase("result");
      one["skipped"] = "there was <no> time";
    }
    if (one["name"] != "trace-2") kept.push_back(one);
  }
  json["measurements"] = kept;
  std::ofstream(file("a.json")) << json;
  const Ran ran = report(file("a.json"));
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.out.find("no figure timelines"), std::string::npos) << ran.out;
  EXPECT_FALSE(fs::exists(file("r/figures/step.svg")));
  EXPECT_NE(page().find("there was &lt;no&gt; time"), std::string::npos);
  EXPECT_NE(page().find("no measurement of trace"), std::string::npos);
}

TEST_F(ReportCommand, TwoRunsAndWhatBecameSlower) {
  auto json = json_of(measured);
  for (auto& one : json["measurements"]) {
    if (one["name"] != "layer-8") continue;
    auto& row = one["result"]["rows"][0];
    row["median_us"] = 10 * row["median_us"].get<double>();
    for (auto& sample : row["samples_us"]) sample = 10 * sample.get<double>();
  }
  std::ofstream(file("b.json")) << json;
  const Ran ran = report(measured + " " + file("b.json"));
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(ran.out.find(", 1 clearly slower in the second"), std::string::npos) << ran.out;
  EXPECT_NE(page().find("REGRESSION"), std::string::npos);
  EXPECT_TRUE(fs::exists(file("r/figures/round-trips-2.svg")));
}

TEST_F(ReportCommand, OneLineForWhatIsWrong) {
  const std::string out = " --python " + python_ + " --out " + file("r");
  std::ofstream(file("a.json")) << "{}";
  expect_error(2, "report " + file("a.json") + out, "a.json");
  expect_error(2, "report " + file("missing.json") + out, "there is no file");
  expect_error(2, "report " + file("missing.json") + " --out " + file("r") + " --python no-such-python", "missing.json");
  std::ofstream(file("damaged.json")) << R"({"benchmark": "all", "engine": "host", "machine": {}, "measurements": [1]})";
  expect_error(2, "report " + file("damaged.json") + out, "damaged");
  auto json = json_of(measured);
  json["measurements"][0].erase("machine");
  std::ofstream(file("damaged.json")) << json;
  expect_error(2, "report " + file("damaged.json") + out, "damaged");
  expect_error(3, "report " + measured + " --out " + file("r") + " --python /bin/false", "/bin/false");
  expect_error(2, "report " + measured + " --out " + file("r") + " --python no-such-python", "no-such-python");
  fs::create_directory(file("m"));
  std::ofstream(file("m/matplotlib.py")) << "raise ImportError('as if it were not there')\n";
  expect_error_of_script(2, "PYTHONPATH='" + file("m") + "' \"$heddle\" report " + measured + out,
                         "apt-get install python3-matplotlib");
}

}  // namespace
}  // namespace heddle::command_test
