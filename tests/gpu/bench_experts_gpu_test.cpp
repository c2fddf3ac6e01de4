// `heddle bench experts` from outside: what it refuses (no GPU needed), and that a small run measures everything it says and finds
// all results right.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>

#include "gpu/bench_command.hpp"

namespace heddle {
namespace {

class BenchExpertsGpu : public BenchCommand {
 protected:
  /// A small run; its JSON, null if there is none.
  Json run(const std::string& arguments) const {
    Json object = measured("bench experts --shape 384x256 --experts 4 --replays 2 --calls 2 " + arguments);
    if (object.is_null()) return object;
    EXPECT_GT(object["launch"]["empty_us"].get<double>(), 0.0);
    return object;
  }
};

TEST_F(BenchExpertsGpu, RefusesByName) {
  expect_refused("bench experts", {{"--shape v5", "--shape does not know 'v5'"},
                                   {"--shape 4096x100", "--shape 4096x100: both sizes are multiples of 128"},
                                   {"--weights fp7", "--weights does not know 'fp7'"},
                                   {"--product gemm3", "--product does not know 'gemm3'"},
                                   {"--blocks huge", "--blocks does not know 'huge'; it takes small, medium, large, auto"},
                                   {"--peer mkl", "--peer does not know 'mkl'"},
                                   {"--rows 4,0", "--rows 0: at least 1 is needed"},
                                   {"--rows 40000", "--rows 40000: 32 experts take at most 32768"},
                                   {"--touched 33", "--touched 33: there are 32 experts"},
                                   {"--ctas 132,0", "--ctas 0: at least 1 is needed"},
                                   {"--experts 1025", "--experts 1025: the engine takes at most 1024"},
                                   {"--replays 0", "--replays 0"},
                                   {"--tokens 64", "--trace"},
                                   {"--trace nowhere.npy", "nowhere.npy"}});
}

TEST_F(BenchExpertsGpu, EveryProductOfEveryKindIsRight) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--rows 3,70");
  if (object.is_null()) return;
  std::map<std::string, int> lines;
  int rules = 0;  // it takes one of the row blocks that there are, whichever
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(row.dump().substr(0, 300));
    const std::string by = row["by"];
    ++lines[by];
    if (by == "cublaslt" && row.count("failed") == 1) {
      std::printf("not measured: %s\n", row["failed"].get<std::string>().c_str());
      continue;
    }
    ASSERT_EQ(row.count("failed"), 0u);
    ASSERT_EQ(row.count("wrong"), 0u);
    EXPECT_EQ(row["samples_us"].size(), 2u);
    for (const char* field : {"median_us", "tflops", "weight_gbps", "floor_us", "share_of_floor"})
      EXPECT_GT(row[field].get<double>(), 0.0) << field;
    EXPECT_EQ(row["rows"].get<int>(), 4 * row["most_rows"].get<int>());
    if (by == "cutlass" || by == "cublaslt") continue;
    if (row["rule"].get<bool>()) ++rules;
    if (row["most_rows"] == 70) {
      EXPECT_EQ(row["rule"].get<bool>(), by == "large");
    }
  }
  // Five kinds, three products, two counts, medium row blocks of mxfp4 alone; CUTLASS beside fp8_block, cuBLASLt beside that and
  // bf16, in both GEMMs.
  const std::map<std::string, int> wanted{{"small", 30}, {"medium", 6}, {"large", 30}, {"cutlass", 4}, {"cublaslt", 8}};
  EXPECT_EQ(lines, wanted);
  EXPECT_EQ(rules, 30);
}

TEST_F(BenchExpertsGpu, FewTouchedExpertsAndFewerCtas) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--weights mxfp4 --product gemm2 --blocks auto --touched 1,2,4 --rows 2,40 --ctas 7");
  if (object.is_null()) return;
  EXPECT_EQ(object["rows"].size(), 6u);
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(row.dump().substr(0, 300));
    ASSERT_EQ(row.count("wrong"), 0u);
    EXPECT_EQ(row["ctas"], 7);
    EXPECT_TRUE(row["rule"].get<bool>());
    EXPECT_EQ(row["rows"].get<int>(), row["touched"].get<int>() * row["most_rows"].get<int>());
  }
  EXPECT_EQ(object["touched"].size(), 2u) << "one for each number of rows";
}

}  // namespace
}  // namespace heddle
