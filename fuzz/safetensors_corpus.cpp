// Writes the fuzzer's seeds into a folder: the headers of small layers in every naming, one whole file, a batch, a config.json.
#include <cstdio>
#include <fstream>
#include <string>

#include "layer_files.hpp"

namespace {

using namespace heddle;
using namespace heddle::testing;

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(in)), {});
}

/// The first byte says what follows (see read_as() of the fuzz target).
void write_seed(const std::string& folder, const std::string& name, char what, const std::string& text) {
  std::ofstream(folder + "/" + name, std::ios::binary) << what << text;
}

/// Two bytes of data size, then the header of a whole file.
std::string header_only(const std::string& file) {
  const std::size_t length = static_cast<unsigned char>(file[0]) | static_cast<std::size_t>(static_cast<unsigned char>(file[1]))
                                                                       << 8;
  const std::size_t data_bytes = file.size() - 8 - length;
  std::string text;
  text += static_cast<char>(data_bytes & 0xFF);
  text += static_cast<char>(data_bytes >> 8);
  text += file.substr(8, length);
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

LayerFileSpec small(WeightKind kind, Naming naming) {
  LayerFileSpec spec;
  spec.shape = {64, 64, 1, 1, {}};
  spec.kind = kind;
  spec.naming = naming;
  return spec;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: safetensors_corpus FOLDER\n");
    return 2;
  }
  const std::string folder = arguments[1];
  const auto write = [&](const std::string& name, const LayerFileSpec& spec) {
    write_seed(folder, name, spec.prefix.empty() ? 1 : 2, header_only(read_text(write_layer(spec).path)));
  };
  auto mxfp4 = small(WeightKind::mxfp4, Naming::deepseek_v4);
  write_seed(folder, "whole_mxfp4", 0, read_text(write_layer(mxfp4).path));
  mxfp4.shared = WeightKind::fp8_block;
  mxfp4.bias = true;
  write("mxfp4_shared_fp8", mxfp4);
  auto gated = small(WeightKind::mxfp8, Naming::hugging_face);
  gated.shared = WeightKind::mxfp4;
  gated.shared_gate = true;
  write("mxfp8_gated_shared", gated);
  auto packed = small(WeightKind::nvfp4, Naming::hugging_face);
  packed.shape.experts = 3;
  packed.packed_names = true;
  packed.prefix = "";
  write("nvfp4_packed", packed);
  write("nvfp4", small(WeightKind::nvfp4, Naming::hugging_face));
  write("fp8_mixtral", small(WeightKind::fp8_block, Naming::mixtral));
  write("bf16", small(WeightKind::bf16, Naming::hugging_face));
  auto fused = small(WeightKind::bf16, Naming::fused);
  fused.shape.hidden = 128;
  write("fused", fused);
  fused.naming = Naming::fused_transposed;
  write("fused_transposed", fused);

  const TempFolder work;
  write_tensors(work.file("batch"), {make_tensor("hidden_states", "BF16", {2, 2}, std::vector<std::uint16_t>{1, 2, 3, 4}),
                                     make_tensor("topk_ids", "I64", {2, 1}, std::vector<std::int64_t>{0, -1}),
                                     make_tensor("topk_weights", "F32", {2, 1}, std::vector<float>{1, 0}),
                                     make_tensor("tokens_per_rank", "I32", {2}, std::vector<std::int32_t>{2, 0})});
  write_seed(folder, "batch", 3, read_text(work.file("batch")));
  write_seed(folder, "batch_header", 4, header_only(read_text(work.file("batch"))));
  write_seed(folder, "config", 5, make_config(mxfp4, RouterOptions{}).dump(1));
  return 0;
}
