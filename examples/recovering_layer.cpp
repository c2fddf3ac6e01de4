// A layer that goes on when a rank is lost: three processes, of which one ends in the middle of its work. The others agree on who
// is left, take over its experts and run the step again, with the same results; then a new process takes its place. Only public
// headers; see docs/recovery.md.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <heddle/recovery.hpp>
#include <string>
#include <vector>

using namespace heddle;

constexpr int ranks = 3, experts = 6, topk = 2, hidden = 128, intermediate = 64, tokens = 4, steps = 400, lost = 1, lost_at = 5;

// Every rank can make every expert, as it could read it from a checkpoint.
struct Experts {
  std::vector<std::vector<bf16>> storage{3 * experts};
  WeightMatrix constant(int number, int rows, int cols, float value) {
    storage[number].assign(static_cast<std::size_t>(rows) * cols, to_bf16(value));
    return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(storage[number])), {}};
  }
  ExpertWeights make(int e) {
    return {constant(3 * e, intermediate, hidden, 0.01f), constant(3 * e + 1, intermediate, hidden, 0.01f),
            constant(3 * e + 2, hidden, intermediate, 0.1f * static_cast<float>(e + 1))};
  }
};

static void run_rank(const std::string& name, int rank, Entry entry) {
  const GroupOptions patient{std::chrono::milliseconds(10000)};
  const auto group =
      entry == Entry::together ? join_process_group(name, rank, ranks, patient) : rejoin_process_group(name, rank, ranks, patient);
  Experts weights;
  LayerSource source;
  source.shape = {hidden, intermediate, experts, topk, {}};
  source.expert = [&](int e) { return weights.make(e); };
  LayerOptions options;
  options.way = Way::low_latency;  // its sums are slots: the bits do not depend on who holds which expert
  options.cap = tokens;
  RecoveringLayers layers(*group, {{&source, Placement::contiguous(experts, ranks), options}}, {}, entry);
  group->set_deadline(std::chrono::milliseconds(1000));  // how long a silent rank is waited for

  const std::vector<bf16> input(tokens * hidden, to_bf16(1.0f));
  std::vector<bf16> output(tokens * hidden);
  std::vector<std::int32_t> ids;
  for (int t = 0; t < tokens; ++t) ids.insert(ids.end(), {t % experts, (t + 3) % experts});
  const std::vector<float> choice_weights(tokens * topk, 0.5f);
  std::size_t told = 0;
  while (layers.steps() < steps) {
    if (rank == lost && entry == Entry::together && layers.steps() == lost_at) _exit(0);
    layers.forward({tokens, input.data(), ids.data(), choice_weights.data()}, {tokens, Phase::decode}, output.data());
    usleep(5000);  // the rest of a model
    for (; told < layers.interruptions().size(); ++told) {
      const Interruption& one = layers.interruptions()[told];
      std::string live;
      for (int other = 0; other < ranks; ++other)
        live += one.members.live[static_cast<std::size_t>(other)] ? std::to_string(other) : "-";
      std::printf("rank %d, step %u: ranks %s in generation %u, %d experts moved here, token 0 is %g (%s)\n", rank, layers.steps(),
                  live.c_str(), one.members.generation, one.experts_moved, to_float(output[0]), one.reason.c_str());
      std::fflush(stdout);
    }
  }
}

static pid_t start(const std::string& name, int rank, Entry entry) {
  const pid_t child = fork();
  if (child != 0) return child;
  int status = 0;
  try {
    run_rank(name, rank, entry);
  } catch (const Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    status = 1;
  }
  std::fflush(nullptr);
  _exit(status);
}

int main() {
  const std::string name = "recovering_layer." + std::to_string(getpid());
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) children.push_back(start(name, rank, Entry::together));
  int failed = 0, status = 0;
  waitpid(children[lost], &status, 0);
  children[lost] = start(name, lost, Entry::late);
  for (const pid_t child : children) {
    waitpid(child, &status, 0);
    failed += status == 0 ? 0 : 1;
  }
  return failed;
}
