#include "routing/vllm_output.hpp"

#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "heddle/error.hpp"

namespace heddle {

namespace {

using Json = nlohmann::json;

/// RFC 4648, section 4. Line ends are skipped.
std::vector<char> from_base64(const std::string& text, const std::string& label) {
  std::vector<char> bytes;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char c : text) {
    constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (c == '=' || c == '\n' || c == '\r') continue;
    const std::size_t digit = digits.find(c);
    if (digit == std::string_view::npos) throw InputError(fmt::format("{}: '{}' is no digit of base64", label, c));
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    held += 6;
    if (held < 8) continue;
    held -= 8;
    bytes.push_back(static_cast<char>(bits >> held & 0xFF));
  }
  return bytes;
}

/// Collects [tokens, layers, topk] parts that agree in layers and topk.
class Parts {
 public:
  explicit Parts(std::string path) : path_(std::move(path)) {}

  void add(const Json& value, const std::string& name) {
    if (value.is_null()) return;
    const std::string label = fmt::format("{}: {}", path_, name);
    if (value.is_string()) {
      const NpyArray array = parse_npy(from_base64(value.get<std::string>(), label), label);
      if (array.shape.size() != 3)
        throw InputError(fmt::format("{}: shape {}; [tokens, layers, topk] is needed", label, array.shape_text()));
      agree(array.shape[1], array.shape[2], label);
      for (const std::int64_t id : integers(array)) put(id, label);
      return;
    }
    for (const Json& token : value) {
      for (const Json& layer : token) {
        agree(token.size(), layer.size(), label);
        for (const Json& id : layer) put(id.get<std::int64_t>(), label);
      }
    }
  }

  NpyArray joined() const {
    if (ids_.empty())
      throw InputError(fmt::format("{}: no routed_experts in it; was vLLM started with --enable-return-routed-experts?", path_));
    NpyArray array;
    array.path = path_;
    array.type = "i4";
    array.shape = {ids_.size() / (layers_ * topk_), layers_, topk_};
    array.data.resize(ids_.size() * sizeof(std::int32_t));
    std::memcpy(array.data.data(), ids_.data(), array.data.size());
    return array;
  }

 private:
  void agree(std::size_t layers, std::size_t topk, const std::string& label) {
    if (ids_.empty()) {
      layers_ = layers;
      topk_ = topk;
    }
    if (layers == layers_ && topk == topk_ && topk > 0) return;
    throw InputError(fmt::format("{}: {} layers of {} choices, where {} of {} came before", label, layers, topk, layers_, topk_));
  }
  void put(std::int64_t id, const std::string& label) {
    if (id < -1 || id > INT32_MAX) throw InputError(fmt::format("{}: {} is no expert id", label, id));
    ids_.push_back(static_cast<std::int32_t>(id));
  }

  std::string path_;
  std::size_t layers_ = 0, topk_ = 0;
  std::vector<std::int32_t> ids_;
};

void add_response(Parts& parts, const Json& response, std::size_t number) {
  if (const auto prompt = response.find("prompt_routed_experts"); prompt != response.end()) {
    parts.add(*prompt, fmt::format("response {}, prompt_routed_experts", number));
  }
  const auto choices = response.find("choices");
  if (choices == response.end()) return;
  for (std::size_t i = 0; i < choices->size(); ++i) {
    const auto found = (*choices)[i].find("routed_experts");
    if (found != (*choices)[i].end()) parts.add(*found, fmt::format("response {}, choice {}, routed_experts", number, i));
  }
}

}  // namespace

NpyArray parse_vllm_output(std::span<const char> text, const std::string& path) {
  Parts parts(path);
  std::size_t number = 0;
  const auto add = [&](const Json& value) {
    if (value.is_array()) {
      for (const Json& response : value) add_response(parts, response, number++);
    } else {
      add_response(parts, value, number++);
    }
  };
  try {
    if (Json::accept(text.begin(), text.end())) {
      add(Json::parse(text.begin(), text.end()));
    } else {  // an object a line
      for (auto begin = text.begin(); begin != text.end();) {
        const auto end = std::find(begin, text.end(), '\n');
        if (std::find_if(begin, end, [](char c) { return c != ' ' && c != '\r'; }) != end) add(Json::parse(begin, end));
        begin = end == text.end() ? end : end + 1;
      }
    }
  } catch (const Json::exception& error) {
    throw InputError(fmt::format("{}: response {} cannot be read: {}", path, number, error.what()));
  }
  return parts.joined();
}

}  // namespace heddle
