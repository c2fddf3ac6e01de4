// Machines: what was measured on them, or what the articles take them to do.
#include "heddle/plan.hpp"
#include "plan/find.hpp"

namespace heddle {

namespace {

std::vector<Machine> all_machines() {
  constexpr std::string_view measured = "measured on 2 x H200";
  Machine h200{.name = "h200", .title = "NVIDIA H200", .sms = 132};
  h200.link = MachineValue{370e9, "measured on 2 x H200: vector loads or stores, 8 SMs or more"};
  h200.sm_read = MachineValue{47e9, "measured on 2 x H200: one SM pulling over NVLink"};
  h200.sm_write = MachineValue{47e9, "measured on 2 x H200: one SM pushing over NVLink"};
  h200.memory_read = MachineValue{4.5e12, "measured on 2 x H200: all SMs, gigabytes"};
  h200.memory_copy = MachineValue{3.9e12, "measured on 2 x H200: read + write"};
  h200.fp8 = MachineValue{1400e12, "measured on 2 x H200: 1,508 in one dense product of 8192^3, floors at 1,400"};
  h200.bf16 = MachineValue{796e12, measured};
  h200.word_latency = MachineValue{1.26e-6, measured};
  h200.launch = MachineValue{0.55e-6, "measured on 2 x H200: empty kernels of a graph, back to back"};

  const Machine b200{.name = "b200", .title = "NVIDIA B200 (persistent-grid article)", .sms = 148};

  Machine b300{.name = "b300", .title = "NVIDIA B300 (exchange-ways and fused-kernel articles)", .sms = 148};
  b300.link = MachineValue{0.9 * 18 * 53.125e9, "nominal: 18 links x 53.125 GB/s, nine tenths of it usable"};
  b300.sm_read = MachineValue{200e9, "assumed by the transfer library of the exchange-ways article, section 5.1"};
  b300.sm_write = MachineValue{50e9, "assumed by the transfer library of the exchange-ways article, section 5.1"};
  b300.memory_read = MachineValue{6.5e12, "assumed by the kernel's own test, fused-kernel article, section 3.4"};
  return {h200, b200, b300};
}

}  // namespace

std::span<const Machine> machines() {
  static const std::vector<Machine> all = all_machines();
  return all;
}

const Machine& find_machine(std::string_view name) { return plan::find_named(machines(), name, "machine"); }

}  // namespace heddle
