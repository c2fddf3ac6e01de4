#include "exchange/cuda_nccl.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "exchange/cuda_nccl_communicators.hpp"
#include "group/agreement.hpp"

namespace heddle {

namespace {

#ifdef HEDDLE_NCCL

int usable_version(bool several_processes) {
  const nccl::Library& calls = nccl::library();
  int version = 0;
  nccl::check(calls.get_version(&version), "version");
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 0)
  const bool waits = calls.init_rank != nullptr && calls.finalize != nullptr;
#else
  const bool waits = false;
#endif
  if (several_processes && !waits) {
    throw InputError(fmt::format("NCCL {} cannot say whether a rank has come; over several processes 2.14 or newer is needed{}",
                                 version, nccl::waits_known ? "" : ", also when Heddle is built"));
  }
  return version;
}

std::string new_id() {
  ncclUniqueId id;
  nccl::check(nccl::library().unique_id(&id), "a unique id");
  return {id.internal, sizeof id.internal};
}

std::unique_ptr<NcclCommunicators::Impl> make(const cuda::DeviceMap& map) {
  auto made = std::make_unique<nccl::Communicators>(map, usable_version(false), nccl::Communicators::calls_block);
  made->init_all();
  made->make_first_calls();
  return made;
}

/// A process that failed meets the others, who may still wait in NCCL; they do so for less than the group would for them.
std::unique_ptr<NcclCommunicators::Impl> join(Group& processes, const std::vector<int>& devices) {
  const NcclMeeting meeting = meet_for_nccl(processes, devices);
  auto made = std::make_unique<nccl::Communicators>(meeting.map, usable_version(true), processes.deadline() / 2);
  step_together(processes, "creation of NCCL's communicators", [&] { made->init_ranks(meeting.id); });
  step_together(processes, "NCCL's first collectives", [&] { made->make_first_calls(); });
  return made;
}

#else

int usable_version(bool) {
  throw InputError("this build of Heddle has no NCCL: nccl.h was not found when it was configured; gather has kernels of its own");
}

std::string new_id() { return {}; }

std::unique_ptr<NcclCommunicators::Impl> make(const cuda::DeviceMap&) {
  usable_version(false);
  return nullptr;
}

std::unique_ptr<NcclCommunicators::Impl> join(Group& processes, const std::vector<int>& devices) {
  meet_for_nccl(processes, devices);
  return nullptr;
}

#endif

/// What a process can see of its own GPUs.
void check_each_once(std::vector<int> devices) {
  if (devices.empty()) throw InputError("NCCL's communicators need at least one GPU");
  std::sort(devices.begin(), devices.end());
  if (const auto twice = std::adjacent_find(devices.begin(), devices.end()); twice != devices.end()) {
    throw InputError(fmt::format("ranks share GPU {}; NCCL needs a GPU for each rank, gather's own kernels do not", *twice));
  }
}

void check_no_gpu_is_shared(const cuda::DeviceMap& map) {
  for (std::size_t one = 0; one < map.parts.size(); ++one) {
    for (std::size_t other = 0; other < one; ++other) {
      if (map.parts[one].uuid != map.parts[other].uuid) continue;
      throw InputError(fmt::format("processes {} and {} share {}; NCCL needs a GPU for each rank, gather's own kernels do not",
                                   map.parts[other].process, map.parts[one].process, map.parts[one].uuid));
    }
  }
}

cuda::DeviceMap map_of_one_process(const std::vector<int>& devices) {
  cuda::DeviceMap map;
  for (const int device : devices) map.parts.push_back({0, device, "", static_cast<int>(map.parts.size()), 1});
  map.gpus = devices.size();
  return map;
}

std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}
std::string from_hex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

/// The first process's, for all.
std::string agree_on_id(Group& processes, bool first) {
  std::string mine;
  step_together(processes, "NCCL's unique id", [&] {
    if (first) mine = to_hex(new_id());
  });
  for (const std::string& text : processes.exchange(mine, "NCCL's unique id")) {
    if (!text.empty()) return from_hex(text);
  }
  return {};
}

}  // namespace

NcclMeeting meet_for_nccl(Group& processes, const std::vector<int>& devices) {
  int version = 0;
  step_together(processes, "choice of NCCL", [&] {
    check_each_once(devices);
    version = usable_version(true);
  });
  compare_configurations(processes, fmt::format("NCCL={}\n", version), "process");
  NcclMeeting meeting;
  meeting.map = cuda::map_ranks(processes, {static_cast<int>(devices.size()), devices, {}});
  check_no_gpu_is_shared(meeting.map);
  meeting.id = agree_on_id(processes, meeting.map.first == 0);
  return meeting;
}

NcclCommunicators::NcclCommunicators(const std::vector<int>& devices) {
  check_each_once(devices);
  impl_ = make(map_of_one_process(devices));
}
NcclCommunicators::NcclCommunicators(Group& processes, const std::vector<int>& devices) : impl_(join(processes, devices)) {}
NcclCommunicators::~NcclCommunicators() = default;

int NcclCommunicators::ranks() const { return impl_->map.ranks(); }
int NcclCommunicators::version() const { return impl_->version; }
void NcclCommunicators::throw_if_failed() const { impl_->throw_if_failed(); }
void NcclCommunicators::abort() { impl_->abort(); }

}  // namespace heddle
