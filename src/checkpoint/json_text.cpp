#include "checkpoint/json_text.hpp"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "checkpoint/describe.hpp"
#include "heddle/error.hpp"

namespace heddle::checkpoint {

namespace {

/// Sees every parse event; keeps the depth and the names of each open object.
class Strictness {
 public:
  explicit Strictness(const std::string& where) : where_(where) {}

  bool operator()(int /*depth*/, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        if (names_.size() >= deepest) throw InputError(fmt::format("{}: is nested more than {} deep", where_, deepest));
        names_.emplace_back();
        break;
      case Event::object_end:
      case Event::array_end:
        names_.pop_back();
        break;
      case Event::key:
        if (const auto& name = parsed.get_ref<const std::string&>(); !names_.back().insert(name).second) {
          throw InputError(fmt::format("{}: the name {} appears twice", where_, in_quotes(name)));
        }
        break;
      case Event::value:
        break;
    }
    return true;
  }

 private:
  static constexpr std::size_t deepest = 64;
  const std::string& where_;
  std::vector<std::set<std::string>> names_;
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  Strictness strictness(where);
  try {
    return nlohmann::json::parse(text.begin(), text.end(),
                                 [&strictness](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
                                   return strictness(depth, event, parsed);
                                 });
  } catch (const nlohmann::json::parse_error& error) {
    throw InputError(fmt::format("{}: is not JSON (from byte {} of {} on)", where, error.byte, text.size()));
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: holds a number that no type can hold", where));
  }
}

}  // namespace heddle::checkpoint
