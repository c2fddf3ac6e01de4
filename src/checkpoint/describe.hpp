// Small pieces of error messages that every part of the reader uses.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace heddle::checkpoint {

/// A name from a file, safe to print on one line: quoted, control characters replaced, cut when very long.
std::string in_quotes(std::string_view name);

/// The same without quotes, for paths at the start of a message.
std::string one_line(std::string_view text);

/// "[256, 128]"
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace heddle::checkpoint
