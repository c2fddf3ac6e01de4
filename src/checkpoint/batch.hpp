// A batch from an opened file; heddle::read_batch() opens it.
#pragma once

#include <string>

#include "checkpoint/safetensors.hpp"
#include "heddle/checkpoint.hpp"

namespace heddle::checkpoint {

/// `place` names the file in messages.
Batch read_batch(const SafetensorsFile& file, const std::string& place);

}  // namespace heddle::checkpoint
