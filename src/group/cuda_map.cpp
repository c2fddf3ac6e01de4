#include "group/cuda_map.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "group/agreement.hpp"
#include "group/cuda_driver.hpp"
#include "group/text_reader.hpp"
#include "signal/device_team.hpp"

namespace heddle::cuda {

std::string uuid_of(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(properties.uuid.bytes[i]));
  }
  return text;
}

std::string model_of(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

namespace {

void check_devices(const DeviceGroupOptions& mine) {
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess) {
    cudaGetLastError();
    present = 0;
  }
  std::vector<int> seen;
  for (const int device : mine.devices) {
    if (device < 0 || device >= present)
      throw InputError(fmt::format("GPU {} was asked for, this process sees {}", device, present));
    if (std::find(seen.begin(), seen.end(), device) != seen.end())
      throw InputError(fmt::format("GPU {} was named twice; give it more ranks instead", device));
    seen.push_back(device);
  }
  if (mine.devices.empty() || mine.ranks < static_cast<int>(mine.devices.size())) {
    throw InputError(fmt::format("{} ranks on {} GPUs: every GPU needs a rank", mine.ranks, mine.devices.size()));
  }
  const DeviceNodes& nodes = mine.nodes;
  if (nodes.node < 0 || nodes.node >= nodes.nodes)
    throw InputError(fmt::format("node {} of {} was asked for; they are numbered from 0", nodes.node, nodes.nodes));
  if (nodes.nodes > 1 && nodes.link == nullptr)
    throw InputError(fmt::format("node {} of {} has no DeviceNodeLink to the others", nodes.node, nodes.nodes));
}

/// "device ranks uuid model", a line for each GPU of this process.
std::string describe(const DeviceGroupOptions& mine) {
  std::string text;
  const int gpus = static_cast<int>(mine.devices.size());
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const int device = mine.devices[static_cast<std::size_t>(gpu)];
    text += fmt::format("{} {} {} {}\n", device, mine.ranks / gpus + (gpu < mine.ranks % gpus ? 1 : 0), uuid_of(device),
                        model_of(device));
  }
  return text;
}

}  // namespace

std::string DeviceMap::model() const {
  std::vector<std::string> models;
  for (const Part& part : parts) {
    if (std::find(models.begin(), models.end(), part.model) == models.end()) models.push_back(part.model);
  }
  return fmt::format("{}", fmt::join(models, " and "));
}

std::string DeviceMap::name_of(std::size_t part) const {
  const Part& it = parts[part];
  if (gpus == parts.size()) return fmt::format("GPU {}", it.device);
  return fmt::format("GPU {} of process {} ({})", it.device, it.process, it.uuid);
}

DeviceMap map_ranks(Group& processes, const DeviceGroupOptions& mine) {
  std::string text;
  step_together(processes, "choice of GPUs", [&] {
    check_devices(mine);
    text = describe(mine);
  });
  DeviceMap map;
  map.process = processes.rank();
  const auto texts = exchange_texts(processes, text, "choice of GPUs");
  int ranks = 0;
  for (int process = 0; process < processes.ranks(); ++process) {
    if (process == map.process) map.first = map.parts.size();
    TextReader told(texts[static_cast<std::size_t>(process)]);
    Part part;
    part.process = process;
    while (told.number(part.device) && told.number(part.ranks)) {
      part.uuid = told.word();
      part.model = told.line();
      part.first_rank = ranks;
      ranks += part.ranks;
      map.parts.push_back(part);
    }
  }
  map.gpus = mine.devices.size();
  map.nodes = mine.nodes.nodes;
  for (Part& part : map.parts) part.first_rank += mine.nodes.node * ranks;
  ranks *= map.nodes;
  constexpr int most = sizeof DeviceSettings::live;
  if (ranks > most) throw InputError(fmt::format("{} ranks; at most {} are possible", ranks, most));
  return map;
}

}  // namespace heddle::cuda
