#include "group/cuda_probe.hpp"

#include <fmt/format.h>

#include "group/agreement.hpp"
#include "group/cuda_driver.hpp"
#include "group/cuda_kernels.hpp"

namespace heddle::cuda {

namespace {

/// The words of a part under test: the sum of all GPUs' adds, then one written by each GPU.
class Probe {
 public:
  Probe(const DeviceMap& map, const HeapView& heap) : map_(map), heap_(heap) {}

  void clear_own_parts() const {
    for (std::size_t part = map_.first; part < map_.first + map_.gpus; ++part) {
      const DeviceScope scope(map_.parts[part].device);
      check(cudaMemset(words_of(part), 0, words() * sizeof(Word)), "test of the heap");
      check(cudaDeviceSynchronize(), "test of the heap");
      check(load_small_kernels(), "loading of kernels");
    }
  }

  /// Waits after every word, so that an error is known to be of this pair.
  void write(std::size_t from) const {
    const DeviceScope scope(map_.parts[from].device);
    for (std::size_t to = 0; to < map_.parts.size(); ++to) {
      const cudaError_t launched = launch_write(words_of(to) + 1 + from, written(from, to), nullptr);
      expect_done(launched == cudaSuccess ? cudaDeviceSynchronize() : launched, from, to, "write to");
    }
  }

  /// Does not wait: all GPUs shall add to a word at once.
  void add(std::size_t from) const {
    const DeviceScope scope(map_.parts[from].device);
    for (std::size_t to = 0; to < map_.parts.size(); ++to) {
      expect_done(launch_add(words_of(to), from + 1, nullptr), from, to, "add to a word in");
    }
  }
  void finish(std::size_t from) const {
    const DeviceScope scope(map_.parts[from].device);
    check(cudaDeviceSynchronize(), "test of the heap's atomics");
  }

  void read(std::size_t by) const {
    const DeviceScope scope(map_.parts[by].device);
    Word* copy = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&copy), words() * sizeof(Word)), "test of the heap");
    const std::unique_ptr<Word, cudaError_t (*)(void*)> keep(copy, [](void* memory) { return cudaFree(memory); });
    std::vector<Word> found(words());
    for (std::size_t of = 0; of < map_.parts.size(); ++of) {
      const cudaError_t launched = launch_read(words_of(of), static_cast<int>(words()), copy, nullptr);
      expect_done(launched == cudaSuccess ? cudaDeviceSynchronize() : launched, by, of, "read from");
      check(cudaMemcpy(found.data(), copy, words() * sizeof(Word), cudaMemcpyDeviceToHost), "test of the heap");
      compare(by, of, found);
    }
  }

 private:
  std::size_t words() const { return 1 + map_.parts.size(); }
  Word* words_of(std::size_t part) const { return heap_.at<Word>(map_.parts[part].first_rank, 0); }
  static Word written(std::size_t from, std::size_t to) { return 0x4865646400000000 + from * 0x10000 + to; }
  Word sum() const {
    const Word n = map_.parts.size();
    return n * (n + 1) / 2 * adds_a_launch;
  }

  void expect_done(cudaError_t status, std::size_t from, std::size_t to, const char* verb) const {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    throw InputError(fmt::format("{} cannot {} the memory of {}: {}; a group needs GPUs that are linked", map_.name_of(from), verb,
                                 map_.name_of(to), cudaGetErrorString(status)));
  }

  void compare(std::size_t by, std::size_t of, const std::vector<Word>& found) const {
    for (std::size_t from = 0; from < map_.parts.size(); ++from) {
      if (found[1 + from] == written(from, of)) continue;
      throw InputError(fmt::format("{} reads {:#x} in the memory of {} where {} wrote {:#x}; their link does not carry words",
                                   map_.name_of(by), found[1 + from], map_.name_of(of), map_.name_of(from), written(from, of)));
    }
    if (found[0] == sum()) return;
    throw InputError(
        fmt::format("{} reads {} in the memory of {} where the atomic adds of {} GPUs make {}; their link does not carry native "
                    "atomics",
                    map_.name_of(by), found[0], map_.name_of(of), map_.parts.size(), sum()));
  }

  const DeviceMap& map_;
  HeapView heap_;
};

}  // namespace

// Every step ends when all processes have made it, which orders it before the next one.
void probe_heap(Group& processes, const DeviceMap& map, const HeapView& heap) {
  const Probe probe(map, heap);
  const auto for_own = [&map](const auto& visit) {
    for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) visit(map.first + gpu);
  };
  step_together(processes, "test of the heap", [&] { probe.clear_own_parts(); });
  step_together(processes, "test of the heap", [&] { for_own([&](std::size_t gpu) { probe.write(gpu); }); });
  step_together(processes, "test of the heap", [&] {
    for_own([&](std::size_t gpu) { probe.add(gpu); });
    for_own([&](std::size_t gpu) { probe.finish(gpu); });
  });
  step_together(processes, "test of the heap", [&] { for_own([&](std::size_t gpu) { probe.read(gpu); }); });
}

}  // namespace heddle::cuda
