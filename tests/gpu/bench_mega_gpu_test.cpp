// `heddle bench mega` from outside: what it refuses (no GPU needed), and that small runs measure every chain, say how the fused
// layer compares and find its outputs to be low_latency's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "gpu/bench_command.hpp"

namespace heddle {
namespace {

class BenchMegaGpu : public BenchCommand {
 protected:
  /// A small run; its JSON, null if there is none.
  Json run(const std::string& arguments, int ranks = 2) const {
    Json object = measured(fmt::format("bench mega --ranks {} --gpus {} --shape 512x256 --topk 3 --replays 3 --calls 2 {}", ranks,
                                       std::min({gpus_here(), 2, ranks}), arguments));
    if (object.is_null()) return object;
    EXPECT_EQ(object["benchmark"], "mega");
    EXPECT_EQ(object["ranks"], ranks);
    EXPECT_EQ(object["stream_bytes_per_second"], 4.5e12);
    return object;
  }

  void expect_times(const Json& row) const {
    ASSERT_EQ(row.count("failed"), 0u) << row["failed"];
    ASSERT_EQ(row.count("wrong"), 0u) << row["wrong"];
    EXPECT_EQ(row["samples_us"].size(), 3u);
    for (const char* field : {"median_us", "weight_bytes", "operations", "floor_us", "times_floor", "times_stream"})
      EXPECT_GT(row[field].get<double>(), 0.0) << field;
    EXPECT_LE(row["least_us"], row["median_us"]);
    EXPECT_LE(row["median_us"], row["most_us"]);
    EXPECT_EQ(row["calls"].get<int>() % row["layer_copies"].get<int>(), 0);
    EXPECT_GE(row["calls"].get<int>(), 2);
  }

  void expect_chain(const Json& row) const {
    expect_times(row);
    for (const char* field : {"dispatch_us", "experts_us", "combine_us"}) EXPECT_GT(row[field].get<double>(), 0.0) << field;
    EXPECT_GT(row["communication_share"].get<double>(), 0.0);
    EXPECT_LT(row["communication_share"].get<double>(), 1.0);
  }

  void expect_fused(const Json& row, bool beside_chains = true) const {
    expect_times(row);
    EXPECT_TRUE(row["equals_low_latency"].get<bool>());
    ASSERT_EQ(row.count("over_best_chain"), beside_chains ? 1u : 0u);
    if (!beside_chains) return;
    EXPECT_DOUBLE_EQ(row["over_best_chain"].get<double>(), row["median_us"].get<double>() / row["best_chain_us"].get<double>());
  }
};

TEST_F(BenchMegaGpu, RefusesByName) {
  expect_refused("bench mega",
                 {{"--way fused", "--way does not know 'fused'"},
                  {"--way normal --power", "--power with --way normal"},
                  {"--weights nvfp4", "--weights does not know 'nvfp4'; it takes bf16, fp8_block, mxfp4"},
                  {"--preset v5", "unknown preset 'v5'"},
                  {"--preset kimi-k3", "--preset kimi-k3: its activation is its own"},
                  {"--shape 4096x100", "--shape 4096x100: both sizes are multiples of 128"},
                  {"--hidden 100", "positive multiples of 64, not 100"},
                  {"--experts 4", "4 experts are too few for top-6"},
                  {"--experts 64 --experts-local 32", "--experts-local"},
                  {"--experts-local 0", "--experts-local 0: at least 1 is needed"},
                  {"--tokens 8,0", "--tokens 0: at least 1 is needed"},
                  {"--tokens 9000", "--tokens 9000: a rank brings at most 8192"},
                  {"--calls 0", "--calls 0"},
                  {"--replays 0", "--replays 0"},
                  {"--stream-tbps 0", "--stream-tbps"},
                  {"--shared --preset mixtral-8x7b", "--shared: mixtral-8x7b has no shared expert"},
                  {"--shared inside,beside", "--shared does not know 'beside'"},
                  {"--shared extra --shared-weights int4", "--shared-weights does not know 'int4'"},
                  {"--seconds 2", "--seconds requires --power"},
                  {"--power --seconds 0", "--seconds 0: more than 0"},
                  {"--power --seconds 601", "--seconds 601: more than 0 and at most 600"},
                  {"--power --seconds long", "--seconds"},
                  {"--batches 3", "--batches 3: 1, or 2 in flight"},
                  {"--batches 0", "--batches 0: 1, or 2 in flight"},
                  {"--batch-sms 8", "--batch-sms requires --batches"},
                  {"--batches 2 --batch-sms 0", "--batch-sms 0: at least 1 is needed"},
                  {"--attention 50", "--attention requires --batches"},
                  {"--batches 1 --attention 50", "--attention 50: it stands before two batches in flight; give --batches 2"},
                  {"--batches 2 --attention 0", "--attention 0: at least 1 is needed"},
                  {"--batches 2 --attention 100001", "--attention 100001: at most 100000 us"},
                  {"--trace-layer 1", "--trace"}});
}

TEST_F(BenchMegaGpu, EveryChainAndKindOfWeights) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--experts-local 4 --tokens 1,33");
  if (object.is_null()) return;
  EXPECT_EQ(object["rows"].size(), 3u * 2 * 6) << "stream, four chains and mega, for each kind and size";
  for (const Json& row : object["rows"]) {
    SCOPED_TRACE(row.dump().substr(0, 300));
    EXPECT_EQ(row["experts"], 8);
    EXPECT_EQ(row["topk"], 3);
    EXPECT_TRUE(row["shared"].is_null());
    EXPECT_LE(row["touched"].get<int>(), gpus_here() > 1 ? 4 : 8);
    if (row["way"] == "stream") {
      expect_times(row);
    } else if (row["way"] == "mega") {
      expect_fused(row);
    } else {
      expect_chain(row);
    }
  }
}

TEST_F(BenchMegaGpu, OneRankWithItsSharedExpert) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--experts-local 8 --tokens 20 --weights mxfp4 --way elastic --shared", 1);
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 3u);
  for (const Json& row : object["rows"]) EXPECT_EQ(row["shared"], "fp8_block");
  // All 60 pairs and 20 tokens of the shared expert, six operations for each of hidden x intermediate.
  EXPECT_EQ(object["rows"][0]["operations"].get<double>(), 80.0 * 6 * 512 * 256);
  expect_chain(object["rows"][1]);
  EXPECT_GT(object["rows"][1]["shared_us"].get<double>(), 0.0);
  expect_fused(object["rows"][2]);
}

TEST_F(BenchMegaGpu, EveryPlaceOfASharedExpertInOneRun) {
  SKIP_WITHOUT_GPU();
  const Json object =
      run("--experts-local 4 --tokens 20,70 --weights mxfp4 --way none --shared inside,module,extra,none --shared-weights mxfp4");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 2u * 5) << "stream and four places, for each size";
  for (std::size_t size = 0; size < 2; ++size) {
    const auto row = [&](std::size_t i) { return object["rows"][5 * size + i]; };
    constexpr const char* places[] = {"inside", "module", "extra", "none"};
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(row(1 + i)["way"], "mega");
      EXPECT_EQ(row(1 + i)["shared_place"], places[i]);
      EXPECT_EQ(row(1 + i)["shared"].is_null(), i == 3);
      ASSERT_EQ(row(1 + i).count("failed"), 0u) << row(1 + i)["failed"];
      ASSERT_EQ(row(1 + i).count("wrong"), 0u) << row(1 + i)["wrong"];
      EXPECT_TRUE(row(1 + i)["equals_low_latency"].get<bool>());
      ASSERT_EQ(row(1 + i).count("over_inside"), i == 0 ? 0u : 1u);
      if (i > 0) {
        EXPECT_DOUBLE_EQ(row(1 + i)["over_inside"].get<double>(),
                         row(1 + i)["median_us"].get<double>() / row(1)["median_us"].get<double>());
      }
    }
    EXPECT_LT(row(4)["weight_bytes"].get<double>(), row(1)["weight_bytes"].get<double>());
  }
}

// As an extra expert it has to be of the routed experts' kind, and is refused by name; the others are measured.
TEST_F(BenchMegaGpu, AnExtraExpertOfAnotherKindIsRefusedInItsPlace) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--experts-local 4 --tokens 20 --weights mxfp4 --way none --shared inside,extra", 1);
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 3u);
  EXPECT_EQ(object["rows"][1]["shared"], "fp8_block");
  expect_times(object["rows"][1]);
  EXPECT_NE(object["rows"][2]["failed"].get<std::string>().find("of another kind"), std::string::npos);
}

TEST_F(BenchMegaGpu, SkewedRoutingAndNoChain) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--experts 8 --tokens 20 --weights bf16 --way none --routing hot:1");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 2u) << "low_latency gives outputs to compare with and no line";
  EXPECT_NE(object["rows"][1]["routing"].get<std::string>().find("hot:1"), std::string::npos);
  EXPECT_EQ(object["rows"][1]["touched"], 4) << "of the hot rank";
  expect_fused(object["rows"][1], false);
}

TEST_F(BenchMegaGpu, LongLoopsSayPowerOrWhyNot) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--experts-local 4 --tokens 20 --weights mxfp4 --way one_sided --power --seconds 0.3");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 3u);
  EXPECT_EQ(object["rows"][0].count("sustained"), 0u) << "a stream is no way";
  expect_chain(object["rows"][1]);
  expect_fused(object["rows"][2]);
  for (std::size_t i = 1; i < 3; ++i) {
    const Json& loop = object["rows"][i]["sustained"];
    EXPECT_GE(loop["seconds"].get<double>(), 0.3);
    EXPECT_GT(loop["median_us"].get<double>(), 0.0);
    EXPECT_GT(loop["calls"].get<long long>(), 0);
    EXPECT_DOUBLE_EQ(loop["over_short"].get<double>(),
                     loop["median_us"].get<double>() / object["rows"][i]["median_us"].get<double>());
    if (loop.count("no_power") > 0) continue;
    EXPECT_EQ(loop["gpus"].size(), object["machine"]["gpus"].get<std::size_t>());
    for (const Json& gpu : loop["gpus"]) EXPECT_GE(gpu["samples"]["seconds"].size(), 2u);
    if (loop["energy_j"].is_null()) continue;
    EXPECT_GT(loop["energy_per_call_j"].get<double>(), 0.0);
    EXPECT_DOUBLE_EQ(loop["energy_per_token_j"].get<double>(), loop["energy_per_call_j"].get<double>() / (2 * 20));
  }
}

TEST_F(BenchMegaGpu, TwoBatchesInFlightHaveTheBitsOfTwoInARow) {
  SKIP_WITHOUT_GPU();
  const Json object =
      run("--experts-local 4 --tokens 20,200 --weights mxfp4 --way gather,low_latency,elastic,one_sided --shared --batches 2");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 2u * 6);
  for (const Json& row : object["rows"]) {
    if (row["way"] == "stream") continue;
    SCOPED_TRACE(row["way"].get<std::string>());
    ASSERT_EQ(row.count("two_batches"), 1u) << row;
    const Json& two = row["two_batches"];
    for (const char* part : {"in_a_row", "at_once", "as_one"}) {
      ASSERT_EQ(two[part].count("failed"), 0u) << part << ": " << two[part]["failed"];
      ASSERT_EQ(two[part].count("wrong"), 0u) << part << ": " << two[part]["wrong"];
      EXPECT_GT(two[part]["median_us"].get<double>(), 0.0) << part;
    }
    const Json& once = two["at_once"];
    EXPECT_TRUE(once["equals_in_a_row"].get<bool>());
    EXPECT_GT(once["weight_bytes"].get<double>(), 0.0);
    EXPECT_EQ(once["product_ctas"].is_null(), row["way"] == "mega");
    EXPECT_EQ(two["as_one"]["tokens"], 2 * row["tokens"].get<int>());
    EXPECT_DOUBLE_EQ(once["over_in_a_row"].get<double>(),
                     once["median_us"].get<double>() / two["in_a_row"]["median_us"].get<double>());
  }
}

// Every way, normal included, whose calls are no graph.
TEST_F(BenchMegaGpu, TwoBatchesBehindAttentionHaveTheBitsOfTwoInARow) {
  SKIP_WITHOUT_GPU();
  const Json object = run(
      "--experts-local 4 --tokens 20 --weights mxfp4 --way gather,normal,low_latency,elastic,one_sided --batches 2 --attention 40");
  if (object.is_null()) return;
  ASSERT_EQ(object["rows"].size(), 7u);
  for (const Json& row : object["rows"]) {
    if (row["way"] == "stream") continue;
    SCOPED_TRACE(row["way"].get<std::string>());
    ASSERT_EQ(row.count("two_batches"), 1u) << row;
    const Json& two = row["two_batches"];
    EXPECT_EQ(row["graph"], row["way"] != "normal");
    EXPECT_EQ(two["graph"], row["graph"]);
    EXPECT_EQ(two["attention"]["us"], 40);
    EXPECT_GT(two["attention"]["alone"]["median_us"].get<double>(), 0.0);
    for (const char* part : {"in_a_row", "at_once", "as_one"}) {
      ASSERT_EQ(two[part].count("failed"), 0u) << part << ": " << two[part]["failed"];
      ASSERT_EQ(two[part].count("wrong"), 0u) << part << ": " << two[part]["wrong"];
      EXPECT_EQ(two[part]["samples_us"].size(), 3u) << part;
    }
    EXPECT_TRUE(two["at_once"]["equals_in_a_row"].get<bool>());
    EXPECT_DOUBLE_EQ(two["at_once"]["gained_us"].get<double>(),
                     two["in_a_row"]["median_us"].get<double>() - two["at_once"]["median_us"].get<double>());
  }
}

// More SMs than half are refused in their place; what needs none of them is measured.
TEST_F(BenchMegaGpu, TwoBatchesThatCouldWaitForEachOtherAreRefused) {
  SKIP_WITHOUT_GPU();
  const Json object = run("--experts-local 4 --tokens 20 --weights mxfp4 --way one_sided --batches 2 --batch-sms 100");
  if (object.is_null()) return;
  const Json& chain = object["rows"][1]["two_batches"];
  EXPECT_NE(chain["at_once"]["failed"].get<std::string>().find("--batch-sms 100: two batches in flight need 200 SMs"),
            std::string::npos);
  EXPECT_GT(chain["in_a_row"]["median_us"].get<double>(), 0.0);
  EXPECT_EQ(object["rows"][2]["two_batches"]["at_once"].count("failed"), 0u) << "mega has half";
}

}  // namespace
}  // namespace heddle
