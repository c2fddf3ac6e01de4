// What goes wrong in a call of the fused layer on GPUs: bad inputs, ranks that stop, GPUs that are not launched or belong to
// somebody else, masked ranks, layers that cannot be. Every call ends, the error names who missed what, and after a reset the bits
// are right.
#include <regex>

#include "exchange/numbering.hpp"
#include "gpu/foreign_kernel.hpp"
#include "gpu/mega_bed.hpp"
#include "signal/fault.hpp"

namespace heddle::layer_test {
namespace {

constexpr std::chrono::milliseconds deadline(300);

/// Four ranks with a batch each, whose calls are compared with the chain's.
struct Subject {
  Case c;
  MegaBed bed;
  Tokens tokens;
  std::vector<bf16> wanted;

  explicit Subject(const Case& given, std::chrono::milliseconds longest_wait = deadline)
      : c(given), bed(given, longest_wait), tokens(draw_tokens(given, 3)), wanted(bed.chain(c, tokens)) {}
  void expect_right(const char* when) {
    EXPECT_EQ(different_bits(bed.call(0, c, tokens), wanted), 0u) << when;
    EXPECT_EQ(different_bits(bed.chain(c, tokens), wanted), 0u) << when << ", by the chain";
  }
  void reset_and_expect_right() {
    bed.workspace().reset();
    for (int i = 0; i < 2; ++i) expect_right("after a reset");
  }
};

Case four_ranks(WeightKind kind) {
  Case c = with_ring(with_shared(fused_case(4, kind), WeightKind::bf16, true), 8, RingSize::live);
  c.tokens = {24, 7, 24, 11};
  return c;
}

/// Runs what must end in a fault, and gives it.
template <class Body>
Fault fault_of(const Body& body) {
  try {
    body();
  } catch (const FaultError& error) {
    std::printf("%s\n", error.what());
    return error.fault();
  }
  ADD_FAILURE() << "nobody noticed";
  return {};
}

// A bad id ends the call on all ranks, and so do one that a token has twice and more tokens than the step says.
TEST(MegaFaultsGpu, BadInputsAreFaultsAndAResetHeals) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    Subject subject(four_ranks(kind), std::chrono::seconds(5));
    const Case& c = subject.c;
    const auto second_id = static_cast<std::size_t>(c.first(2)) * 4 + 1;
    Tokens out_of_range = subject.tokens, twice = subject.tokens;
    out_of_range.routing.ids[second_id] = c.layer.shape.experts;
    twice.routing.ids[second_id - 1] = twice.routing.ids[second_id] = 5;
    for (const Tokens* bad : {&out_of_range, &twice}) {
      const Fault fault = fault_of([&] { subject.bed.call(0, c, *bad); });
      EXPECT_EQ(fault.rank, 2);
      EXPECT_EQ(fault.phase, "input check");
      EXPECT_EQ(fault.expected, 13u);
      EXPECT_EQ(fault.seen, bad == &twice ? 5u : 13u);
      subject.reset_and_expect_right();
    }
    subject.bed.bed().load(c, subject.tokens);
    const Fault fault = fault_of([&] {
      subject.bed.bed().begin(0, {23, Phase::decode});
      subject.bed.bed().end(0);
      subject.bed.bed().wait(0);
    });
    EXPECT_EQ(fault.phase, "input check");
    EXPECT_EQ(fault.expected, 23u);
    EXPECT_EQ(fault.seen, 24u);
    subject.reset_and_expect_right();
    if (HasFailure()) return;
  }
}

void write_word(Word* where, Word value) {
  check(cudaMemcpy(where, &value, sizeof value, cudaMemcpyHostToDevice), "writing of a word");
  check(cudaStreamSynchronize(nullptr), "writing of a word");
}

HeapHeader* header_of(MegaBed& bed, int rank) { return bed.workspace().view(0).at<HeapHeader>(rank, 0); }

/// The epoch of the next call.
std::uint32_t next_epoch(MegaBed& bed) { return static_cast<std::uint32_t>(read(&header_of(bed, 0)->epoch, 1)[0]) + 1; }

/// The rank's part of the kernel finds its own abort word when it begins, and leaves without a word to anybody.
void silence(MegaBed& bed, int victim) { write_word(&header_of(bed, victim)->abort, static_cast<Word>(victim) + 1); }

/// The victim's announcement to all others, in its name. What it announced in the call before is still there.
void announce_in_the_name_of(MegaBed& bed, int victim) {
  const MegaLayout layout = bed.layout(0);
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim) continue;
    write_word(bed.workspace().view(0).at<Word>(rank, layout.announced_word(victim)), pack_word(next_epoch(bed), 1));
  }
}

/// The fault is somebody's who missed `kind` of the victim in that call.
void expect_missed(const Fault& fault, WordKind kind, int victim, std::uint32_t epoch) {
  const std::string text = FaultError(fault).what();
  EXPECT_TRUE(fault.rank >= 0 && fault.rank < 4 && fault.rank != victim) << text;
  EXPECT_EQ(fault.peer, victim) << text;
  EXPECT_EQ(fault.phase, word_text(kind).phase) << text;
  EXPECT_EQ(fault.word, word_text(kind).word) << text;
  EXPECT_EQ(word_tag(fault.expected), epoch) << text;
  EXPECT_NE(fault.expected, fault.seen) << text;
  EXPECT_NE(text.find("from rank " + std::to_string(victim)), std::string::npos) << text;
}

TEST(MegaFaultsGpu, ASilentRankIsNamedWithItsWord) {
  SKIP_WITHOUT_GPU();
  Subject subject(four_ranks(WeightKind::mxfp4));
  for (int victim = 0; victim < 4; ++victim) {
    for (const WordKind missing : {WordKind::mega_announced, WordKind::mega_ready}) {
      SCOPED_TRACE(testing::Message() << "rank " << victim << " does not write the " << word_text(missing).word);
      subject.bed.call(0, subject.c, subject.tokens);  // its counts and rows stay
      subject.bed.bed().load(subject.c, subject.tokens);
      const std::uint32_t epoch = next_epoch(subject.bed);
      if (missing == WordKind::mega_ready) announce_in_the_name_of(subject.bed, victim);
      silence(subject.bed, victim);
      expect_missed(fault_of([&] { subject.bed.bed().call(subject.c, 0); }), missing, victim, epoch);
      subject.reset_and_expect_right();
      if (HasFailure()) return;
    }
  }
}

// A deadline set after the capture holds for replays; graphs outlive faults.
TEST(MegaFaultsGpu, ASilentRankInAReplay) {
  SKIP_WITHOUT_GPU();
  Subject subject(four_ranks(WeightKind::fp8_block), std::chrono::seconds(30));
  LayerBed& bed = subject.bed.bed();
  const LayerGraphs graphs = bed.capture({24, Phase::decode}, 0);
  const LayerGraphs of_twelve = bed.capture({12, Phase::decode}, 0);
  const auto expect_right_replay = [&] {
    bed.load(subject.c, subject.tokens);
    EXPECT_EQ(different_bits(bed.replay(graphs, subject.c, 0), subject.wanted), 0u) << "replayed";
  };
  for (int victim = 0; victim < 4; victim += 3) {
    expect_right_replay();
    bed.workspace().set_deadline(deadline);
    bed.load(subject.c, subject.tokens);
    const std::uint32_t epoch = next_epoch(subject.bed);
    silence(subject.bed, victim);
    expect_missed(fault_of([&] { bed.replay(graphs, subject.c, 0); }), WordKind::mega_announced, victim, epoch);
    bed.workspace().reset();
    bed.workspace().set_deadline(std::chrono::seconds(30));
    expect_right_replay();
    const Fault fault = fault_of([&] { bed.replay(of_twelve, subject.c, 0); });
    EXPECT_EQ(fault.phase, "input check");
    EXPECT_EQ(fault.expected, 12u);
    bed.workspace().reset();
  }
  expect_right_replay();
  subject.expect_right("after all");
}

TEST(MegaFaultsGpu, AGpuThatIsNotLaunchedIsNamed) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  Subject subject(four_ranks(WeightKind::bf16));
  for (const std::size_t there : {0, 1}) {
    subject.bed.bed().load(subject.c, subject.tokens);
    const Fault fault = fault_of([&] {
      subject.bed.bed().call_on(there, 0, step_of(subject.c));
      subject.bed.bed().wait(0);
    });
    EXPECT_EQ(fault.rank / 2, static_cast<int>(there)) << FaultError(fault).what();
    EXPECT_EQ(fault.peer / 2, 1 - static_cast<int>(there)) << FaultError(fault).what();
    EXPECT_EQ(fault.word, word_text(WordKind::mega_announced).word) << FaultError(fault).what();
    subject.reset_and_expect_right();
    if (HasFailure()) return;
  }
}

/// One rank with so few pairs that each squad numbers all of them, and with so many that each numbers its share.
std::vector<Case> few_and_many_pairs() {
  const Case few = with_ring(fused_case(1, WeightKind::mxfp4), 128, RingSize::live);
  Case many = few;
  many.options.cap = 2300;
  many.tokens = {2300};
  EXPECT_LE(few.most_tokens() * few.layer.shape.topk, few_kinds);
  EXPECT_GT(many.most_tokens() * many.layer.shape.topk, few_kinds);
  return {few, many};
}
constexpr int sms_left_free = 4;

/// What a call is told that somebody else's kernel leaves too few SMs until it has ended.
std::string told_beside_a_foreign_kernel(LayerBed& bed, const Case& c) {
  ForeignKernel foreign(0, sms_of(0) - sms_left_free);
  bed.begin(0, step_of(c));
  bed.end(0);
  // The launch ends when the other kernel has gone; the fault is in host memory before.
  const auto end = std::chrono::steady_clock::now() + 20 * deadline;
  while (std::chrono::steady_clock::now() < end) {
    try {
      bed.workspace().throw_if_aborted();
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().rank, 0) << error.what();
      return error.what();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "nobody noticed";
}

// Some of the fused kernel's CTAs never begin: the rest say how many are there. CTAs of the announcement wait for nobody, so those
// that find an SM do all of its work.
TEST(MegaFaultsGpu, ACallThatFindsTooFewSmsSaysHowManyCtasAreThere) {
  SKIP_WITHOUT_GPU();
  for (const Case& c : few_and_many_pairs()) {
    Subject subject(c);
    subject.expect_right("alone");
    LayerBed& bed = subject.bed.bed();
    bed.load(c, subject.tokens);
    const std::string told = told_beside_a_foreign_kernel(bed, c);
    std::printf("%s\n", told.c_str());
    std::smatch parts;
    ASSERT_TRUE(std::regex_search(told, parts, std::regex("rank 0 .* ([0-9]+) of ([0-9]+)"))) << told;
    EXPECT_LE(std::stoi(parts[1]), sms_left_free) << told;
    EXPECT_EQ(std::stoi(parts[2]), sms_of(0)) << told;
    EXPECT_THROW(bed.wait(0), FaultError);
    subject.reset_and_expect_right();
    if (HasFailure()) return;
  }
}

TEST(MegaFaultsGpu, ACallWaitsForSmsThatAreFreeInTime) {
  SKIP_WITHOUT_GPU();
  for (const Case& c : few_and_many_pairs()) {
    Subject subject(c, std::chrono::seconds(30));
    LayerBed& bed = subject.bed.bed();
    bed.load(c, subject.tokens);
    {
      ForeignKernel foreign(0, sms_of(0) - sms_left_free);
      bed.begin(0, step_of(c));
      bed.end(0);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_NO_THROW(bed.workspace().throw_if_aborted());
    }
    bed.wait(0);
    EXPECT_EQ(different_bits(bed.fetch(c), subject.wanted), 0u);
    subject.expect_right("afterwards");
    if (HasFailure()) return;
  }
}

// Masked ranks are skipped as the chain skips them, and come back.
TEST(MegaFaultsGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    Case c = four_ranks(kind);
    c.tokens = {24, 0, 24, 7};
    Subject subject(c, std::chrono::seconds(30));
    for (const std::vector<bool>& live : {std::vector<bool>{true, false, true, true}, {true, true, true, true}}) {
      subject.bed.workspace().reset(live);
      for (int call = 0; call < 2; ++call) {
        const std::vector<bf16> chain = subject.bed.chain(c, subject.tokens);
        EXPECT_EQ(different_bits(subject.bed.call(0, c, subject.tokens), chain), 0u) << "rank 1 live: " << live[1];
        EXPECT_EQ(different_bits(chain, subject.wanted) == 0, live[1]) << "do the experts of rank 1 count?";
      }
    }
    if (HasFailure()) return;
  }
}

void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  std::printf("%s\n", text.c_str());
  for (const char* part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" should say \"" << part << "\"";
}

TEST(MegaFaultsGpu, WhatTheKernelDoesNotComputeIsRefusedByName) {
  SKIP_WITHOUT_GPU();
  const auto changed = [](WeightKind kind, auto change) {
    Case c = fused_case(2, kind);
    change(c.options);
    return refusal_of(c);
  };
  const auto as_it_is = [](LayerOptions&) {};
  expect_parts(changed(WeightKind::nvfp4, as_it_is), {"mega", "take"});
  expect_parts(changed(WeightKind::mxfp8, as_it_is), {"mega", "take"});
  const auto with_activation = [](Activation activation) { return [activation](LayerOptions& o) { o.activation = activation; }; };
  expect_parts(changed(WeightKind::mxfp4, with_activation(Activation::bf16)), {"take", "fp8"});
  expect_parts(changed(WeightKind::fp8_block, with_activation(Activation::bf16)), {"take", "fp8"});
  expect_parts(changed(WeightKind::bf16, with_activation(Activation::fp8)), {"take", "bf16"});
  const auto with_wire = [](Wire wire) { return [wire](LayerOptions& o) { o.wire = wire; }; };
  for (const Wire wire : {Wire::bf16, Wire::nvfp4})
    expect_parts(changed(WeightKind::mxfp4, with_wire(wire)), {"wire", "take", "fp8"});
  for (const Wire wire : {Wire::fp8, Wire::nvfp4})
    expect_parts(changed(WeightKind::bf16, with_wire(wire)), {"wire", "take", "bf16"});
  const auto added_and_quantised = [](LayerOptions& o) {
    o.combine = Combine::add;
    o.combine_wire = Wire::fp8;
  };
  expect_parts(changed(WeightKind::mxfp4, added_and_quantised), {"take combine_wire = bf16, or combine = slots"});
  expect_parts(changed(WeightKind::mxfp4, [](LayerOptions& o) { o.weight_at = WeightAt::combine; }),
               {"take weight_at = activation"});
  expect_parts(changed(WeightKind::mxfp4, [](LayerOptions& o) { o.block_rows = 12; }), {"multiples of 8 from 8 to 256"});
  expect_parts(changed(WeightKind::mxfp4, [](LayerOptions& o) { o.runner = RunnerKind::masked; }), {"masked layout"});
}

TEST(MegaFaultsGpu, CallsThatCannotBeAreRefusedBeforeALaunch) {
  SKIP_WITHOUT_GPU();
  Case c = fused_case(2, WeightKind::mxfp4);
  expect_parts(refusal_of(c, [](LayerBed& bed) { bed.begin(0, {1000, Phase::decode}); }), {"the cap is 24"});
  expect_parts(refusal_of(c, [](LayerBed& bed) { bed.layer(0, 0).begin({}, {1, Phase::decode}, nullptr); }), {"0 inputs"});
  expect_parts(refusal_of(c, [](LayerBed& bed) { bed.layer(0, 0).seconds(); }), {"was not timed"});
  make_tensor_parallel(c);
  expect_parts(refusal_of(c, [](LayerBed& bed) { bed.begin(0, {1000, Phase::decode}); }), {"the cap is 24"});
  // None of them needs a reset.
  MegaBed bed(fused_case(2, WeightKind::mxfp4));
  EXPECT_THROW(bed.bed().begin(0, {25, Phase::decode}), InputError);
  bed.expect_equal(fused_case(2, WeightKind::mxfp4));
}

TEST(MegaFaultsGpu, NoExchangeIsMadeOfIt) {
  SKIP_WITHOUT_GPU();
  MegaBed bed(fused_case(1, WeightKind::mxfp4));
  const ExchangeOptions options = bed.bed().layer(0, 0).exchange_options();
  EXPECT_EQ(options.way, Way::mega);
  try {
    create_device_exchange(bed.workspace(), 0, options, bed.bed().memory());
    ADD_FAILURE() << "an exchange of way mega was made";
  } catch (const InputError& error) {
    expect_parts(error.what(), {"mega is a whole layer"});
  }
}

}  // namespace
}  // namespace heddle::layer_test
