// Machines: what was measured on them, or what the articles take them to do.
#include "heddle/plan.hpp"
#include "plan/find.hpp"

namespace heddle {

namespace {

/// DeepEP publishes times, not latencies: this is what its 16-rank row leaves over.
MachineValue published_latency() {
  return {6e-6, "DeepEP's published low-latency dispatch on 16 ranks, 118 us, less its 8-rank row's overhead and its bytes"};
}

/// The machine of DeepEP's published tables (docs/legacy.md there).
Machine h800() {
  Machine h800{.name = "h800", .title = "NVIDIA H800 with 400 Gb/s InfiniBand (DeepEP's published tables)", .sms = 132};
  h800.link = MachineValue{160e9, "DeepEP, docs/legacy.md: about 160 GB/s, the most of NVLink"};
  h800.network = MachineValue{50e9, "DeepEP, docs/legacy.md: about 50 GB/s, the most of a 400 Gb/s adapter"};
  h800.network_latency = published_latency();
  h800.fit = MachineFit{
      .source =
          "DeepEP's published rows of 8 ranks: 153 and 158 GB/s (own rows counted) in normal mode, 77 and 114 us in low-latency "
          "mode",
      .ways = {{Way::normal, 0, 0, 160 / 153.0 * 8 / 7, 160 / 158.0 * 8 / 7}, {Way::low_latency, 35.6e-6, 33.7e-6, 1, 1}},
  };
  return h800;
}

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
  h200.network = MachineValue{50e9, "not measured: nominal, one 400 Gb/s adapter a GPU, as on DeepEP's published machines"};
  h200.network_latency = published_latency();
  h200.fit = MachineFit{
      .source =
          "measured on 2 x H200, hidden 4096, 64 experts, top-6: round trips of 1 and 4,096 tokens "
          "(exchange-2xh200-round2.json), layers of 1 and 4,096 (mega-2xh200.json)",
      .ways = {{Way::elastic, 12.9e-6, 12.4e-6, 1.33, 1.22},
               {Way::low_latency, 12.2e-6, 12.2e-6, 1.07, 1.15},
               {Way::one_sided, 7.3e-6, 6.3e-6, 1.17, 0.88}},
      .quantise = 2.9e-6,
      .quantise_rate = 0.57e12,
      .experts = 17e-6,
      .experts_slowdown = 1.61,
  };

  const Machine b200{.name = "b200", .title = "NVIDIA B200 (persistent-grid article)", .sms = 148};

  Machine b300{.name = "b300", .title = "NVIDIA B300 (exchange-ways and fused-kernel articles)", .sms = 148};
  b300.link = MachineValue{0.9 * 18 * 53.125e9, "nominal: 18 links x 53.125 GB/s, nine tenths of it usable"};
  b300.sm_read = MachineValue{200e9, "assumed by the transfer library of the exchange-ways article, section 5.1"};
  b300.sm_write = MachineValue{50e9, "assumed by the transfer library of the exchange-ways article, section 5.1"};
  b300.memory_read = MachineValue{6.5e12, "assumed by the kernel's own test, fused-kernel article, section 3.4"};
  return {h200, b200, b300, h800()};
}

}  // namespace

std::span<const Machine> machines() {
  static const std::vector<Machine> all = all_machines();
  return all;
}

const Machine& find_machine(std::string_view name) { return plan::find_named(machines(), name, "machine"); }

}  // namespace heddle
