// Judgements over machines that nobody has: each fact that is wrong is found, named and met with advice; fit machines are fit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "doctor/findings.hpp"

namespace heddle::doctor {
namespace {

constexpr std::uint64_t gibi = std::uint64_t{1} << 30;

MachineFacts host_alone() {
  MachineFacts facts;
  facts.host = {8, {}, 64 * gibi, 48 * gibi, {}, 8 * gibi, {}, {}, {}};
  return facts;
}

GpuFacts h200(int index) {
  GpuFacts gpu;
  gpu.index = index;
  gpu.name = "NVIDIA H200";
  gpu.major = 9;
  gpu.sms = 132;
  gpu.memory_bytes = 140 * gibi;
  gpu.shared_bytes = 48 * 1024;
  gpu.shared_optin_bytes = 227 * 1024;
  gpu.virtual_memory = gpu.descriptors = gpu.cooperative = true;
  gpu.free_bytes = 139 * gibi;
  gpu.sm_clock_mhz = 345;
  gpu.most_sm_clock_mhz = 1980;
  gpu.power_limit_w = gpu.usual_power_limit_w = 700.0;
  gpu.slow_reasons = 1;  // idle
  gpu.compute_mode = 0;
  gpu.divided = false;
  gpu.memory_errors = 0;
  gpu.links = gpu.links_up = 18;
  return gpu;
}

MachineFacts two_h200() {
  MachineFacts facts = host_alone();
  facts.build = {true, 13000};
  facts.driver = {"580.65.06", true, 0, 13000, "580.65.06", true, 22809};
  facts.gpus = {h200(0), h200(1)};
  facts.pairs = {{0, 1, true, true}, {1, 0, true, true}};
  facts.tests = {{"gpus 0 1: layer", TestFacts::State::passed, 1.0, ""}};
  return facts;
}

std::vector<Finding> about(const MachineFacts& facts, const std::string& subject) {
  std::vector<Finding> found;
  for (const Finding& finding : judge(facts)) {
    if (finding.subject == subject) found.push_back(finding);
  }
  return found;
}

/// Exactly one finding of the subject is not ok: of this severity, naming `what`, and with advice that names `advice`.
void expect_finding(const MachineFacts& facts, Severity severity, const std::string& subject, const std::string& what,
                    const std::string& advice) {
  int wrong = 0;
  for (const Finding& finding : about(facts, subject)) {
    if (finding.severity == Severity::ok) continue;
    ++wrong;
    EXPECT_EQ(name(severity), name(finding.severity)) << finding.what;
    EXPECT_THAT(finding.what, ::testing::HasSubstr(what));
    EXPECT_THAT(finding.advice, ::testing::HasSubstr(advice));
  }
  EXPECT_EQ(wrong, 1) << subject << " " << what;
  EXPECT_EQ(is_fit(judge(facts)), severity != Severity::failed) << what;
}

TEST(DoctorFindings, MachinesInOrderHaveNothingButOk) {
  for (const Finding& finding : judge(two_h200()))
    EXPECT_EQ(name(finding.severity), "ok") << finding.subject << ": " << finding.what;
  EXPECT_EQ(engines_of(two_h200()), "the host engine and 2 GPUs");
}

TEST(DoctorFindings, WithoutADriverTheHostEngineIsWhatIsThere) {
  expect_finding(host_alone(), Severity::note, "driver", "host engine is what is there", "");
  EXPECT_EQ(engines_of(host_alone()), "the host engine");
  for (const Finding& finding : judge(host_alone())) EXPECT_EQ(finding.subject.find("gpu"), std::string::npos) << finding.subject;
}

TEST(DoctorFindings, HostsThatAreShortOfSomething) {
  MachineFacts facts = host_alone();
  facts.host.cpu_quota = 1.5;
  expect_finding(facts, Severity::note, "cpu", "1.5", "--cpus");
  facts = host_alone();
  facts.host.memory_available = gibi;
  expect_finding(facts, Severity::warning, "memory", "1.00 GiB of 64.00 GiB", "2 GiB");
  facts.host.memory_available = gibi / 8;
  facts.host.memory_limit = gibi / 4;
  expect_finding(facts, Severity::failed, "memory", "limit is 256.00 MiB", "free some");
  facts = host_alone();
  facts.host.open_files = 256;
  expect_finding(facts, Severity::warning, "limits", "256 files", "ulimit -n");
  facts.host.open_files = 32;
  expect_finding(facts, Severity::failed, "limits", "32 files", "ulimit -n");
  facts = host_alone();
  facts.host.processes = 100;
  expect_finding(facts, Severity::warning, "limits", "100 processes", "ulimit -u");
}

TEST(DoctorFindings, SharedMemoryMattersWhereSeveralGpusAre) {
  MachineFacts facts = host_alone();
  facts.host.shm_bytes = 64 << 20;
  expect_finding(facts, Severity::note, "shm", "64.00 MiB", "--shm-size");
  facts = two_h200();
  facts.host.shm_bytes = 64 << 20;
  expect_finding(facts, Severity::warning, "shm", "64.00 MiB", "--shm-size");
  facts.host.shm_bytes.reset();
  expect_finding(facts, Severity::warning, "shm", "no /dev/shm", "tmpfs");
  facts = two_h200();
  facts.host.locked_bytes = 8 << 20;
  expect_finding(facts, Severity::note, "limits", "lock 8.00 MiB", "memlock");
}

TEST(DoctorFindings, DriversThatShowNoGpu) {
  MachineFacts facts = host_alone();
  facts.driver.kernel_module = "580.65.06";
  expect_finding(facts, Severity::failed, "driver", "libcuda.so.1 was not found", "--gpus all");
  facts.driver.library = true;
  facts.driver.error = 100;
  expect_finding(facts, Severity::failed, "driver", "error 100", "--gpus all");
  facts.environment.visible_devices = "7";
  expect_finding(facts, Severity::failed, "driver", "error 100", "CUDA_VISIBLE_DEVICES is '7'");
  facts.driver.error = 802;
  expect_finding(facts, Severity::failed, "driver", "error 802", "fabric manager");
  facts.driver.error = 803;
  expect_finding(facts, Severity::failed, "driver", "error 803", "another version");
  facts.driver.error = 805;
  expect_finding(facts, Severity::failed, "driver", "error 805", "MPS");
  facts.driver.error = 999;
  expect_finding(facts, Severity::failed, "driver", "error 999", "dmesg");
  facts.driver.kernel_module.reset();
  expect_finding(facts, Severity::failed, "driver", "error 999", "dmesg");
  facts.driver.error = 100;  // the library without a GPU, as images bring it
  expect_finding(facts, Severity::note, "driver", "no NVIDIA driver", "");
}

TEST(DoctorFindings, BuildsThatDoNotFitTheDriver) {
  MachineFacts facts = two_h200();
  facts.driver.cuda = 12080;
  expect_finding(facts, Severity::failed, "build", "serves up to 12.8", "CUDA 13");
  facts.driver.cuda = 13000;
  facts.build.runtime = 13010;
  expect_finding(facts, Severity::note, "build", "runtime 13.1", "major version");
  facts.build = {};
  expect_finding(facts, Severity::warning, "build", "without its CUDA part", "preset cuda");
  EXPECT_EQ(engines_of(facts), "the host engine");
  facts = two_h200();
  facts.driver.management = false;
  expect_finding(facts, Severity::note, "driver", "NVML", "");
}

TEST(DoctorFindings, GpusThatCannotRunTheKernels) {
  MachineFacts facts = two_h200();
  facts.gpus[1].major = 8;
  facts.gpus[1].shared_optin_bytes = 163 * 1024;  // follows from the kind, and is not told again
  expect_finding(facts, Severity::failed, "gpu 1", "8.0", "CUDA_VISIBLE_DEVICES");
  facts = two_h200();
  facts.gpus[0].shared_optin_bytes = 99 * 1024;
  expect_finding(facts, Severity::failed, "gpu 0", "101376 bytes", "whole GPU");
  facts = two_h200();
  facts.gpus[0].descriptors = false;
  expect_finding(facts, Severity::failed, "gpu 0", "file descriptors", "heap");
  facts = two_h200();
  facts.gpus[0].virtual_memory = false;
  expect_finding(facts, Severity::failed, "gpu 0", "virtual memory", "heap");
  facts = two_h200();
  facts.gpus[0].cooperative = false;
  expect_finding(facts, Severity::failed, "gpu 0", "cooperative", "whole GPU");
  facts = two_h200();
  facts.gpus[1].compute_mode = 2;
  expect_finding(facts, Severity::failed, "gpu 1", "forbids", "nvidia-smi -i 1 -c DEFAULT");
}

TEST(DoctorFindings, GpusThatAreSlowerOrSmallerThanTheirKind) {
  MachineFacts facts = two_h200();
  facts.gpus[0].power_limit_w = 450;
  expect_finding(facts, Severity::warning, "gpu 0", "450 W, 700 W", "-pl 700");
  facts = two_h200();
  facts.gpus[0].slow_reasons = 0x40;
  expect_finding(facts, Severity::warning, "gpu 0", "heat (345 MHz of 1980)", "cooling");
  facts.gpus[0].slow_reasons = 0x80;
  expect_finding(facts, Severity::warning, "gpu 0", "hardware", "power supply");
  facts.gpus[0].slow_reasons = 0x4;
  expect_finding(facts, Severity::note, "gpu 0", "power cap", "idle");
  facts.gpus[0].slow_reasons = 0x2;
  expect_finding(facts, Severity::note, "gpu 0", "set by hand", "-rac");
  facts = two_h200();
  facts.gpus[1].links_up = 17;
  expect_finding(facts, Severity::warning, "gpu 1", "17 of 18 NVLinks", "nvlink --status");
  facts = two_h200();
  facts.gpus[1].divided = true;
  expect_finding(facts, Severity::warning, "gpu 1", "MIG", "whole GPUs");
  facts = two_h200();
  facts.gpus[1].free_bytes = gibi;
  expect_finding(facts, Severity::warning, "gpu 1", "1.00 GiB of 140.00 GiB", "nvidia-smi");
  facts = two_h200();
  facts.gpus[1].memory_errors = 3;
  expect_finding(facts, Severity::warning, "gpu 1", "3 uncorrected", "reset");
  facts = two_h200();
  facts.gpus[1].compute_mode = 3;
  expect_finding(facts, Severity::warning, "gpu 1", "one process", "-c DEFAULT");
}

TEST(DoctorFindings, LinksThatDoNotCarryAGroup) {
  MachineFacts facts = two_h200();
  facts.pairs[1].access = facts.pairs[1].atomics = false;
  expect_finding(facts, Severity::failed, "links", "reach each other's memory: 1 to 0", "topo");
  facts = two_h200();
  facts.pairs[0].atomics = false;
  expect_finding(facts, Severity::failed, "links", "without native atomics: 0 to 1", "NVLink");
  facts.gpus.pop_back();
  facts.pairs.clear();
  EXPECT_TRUE(about(facts, "links").empty());
}

TEST(DoctorFindings, EnvironmentsThatStandInTheWay) {
  MachineFacts facts = two_h200();
  facts.environment.launch_blocking = true;
  expect_finding(facts, Severity::failed, "environment", "CUDA_LAUNCH_BLOCKING", "unset");
  facts.gpus.pop_back();
  facts.pairs.clear();
  expect_finding(facts, Severity::warning, "environment", "CUDA_LAUNCH_BLOCKING", "unset");
  facts = two_h200();
  facts.environment.mps = true;
  expect_finding(facts, Severity::note, "mps", "MPS daemon", "quit");
  facts.environment.mps_thread_percentage = "25";
  expect_finding(facts, Severity::warning, "mps", "is 25", "unset");
  facts = two_h200();
  facts.driver.nccl.reset();
  expect_finding(facts, Severity::note, "nccl", "not found", "LD_LIBRARY_PATH");
  facts.driver.nccl = 21003;
  expect_finding(facts, Severity::warning, "nccl", "NCCL 2.10.3", "2.14");
}

TEST(DoctorFindings, TestsSayWhatTheySaw) {
  MachineFacts facts = host_alone();
  facts.tests = {{"host: layer", TestFacts::State::failed, 0.1, "mega 2.0e-01 off"}};
  expect_finding(facts, Severity::failed, "test host: layer", "mega 2.0e-01 off", "report");
  facts.tests = {{"all", TestFacts::State::skipped, 0, "--no-test was given"}};
  expect_finding(facts, Severity::note, "test all", "left out: --no-test", "");
}

}  // namespace
}  // namespace heddle::doctor
