// Files of torch.save, read without torch: dictionaries, lists, numbers, texts and dense tensors. Nothing in them is executed; a
// class or function that is not needed for these is refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "routing/npy.hpp"

namespace heddle {

struct TorchValue;
using TorchList = std::vector<TorchValue>;
using TorchDictionary = std::vector<std::pair<std::string, TorchValue>>;

/// A class or function of Python, by module and name: "torch IntStorage".
struct TorchGlobal {
  std::string name;
};

struct TorchValue {
  /// Lists are tuples too. Containers are shared, as they are in the file.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, TorchGlobal, std::shared_ptr<TorchList>,
               std::shared_ptr<TorchDictionary>, std::shared_ptr<NpyArray>>
      value;

  /// The value of a dictionary's key; null where this is none or has none.
  const TorchValue* find(const std::string& key) const;
  const NpyArray* tensor() const;
  const TorchList* list() const;
};

/// Throws InputError: not a zip file of torch.save (the format of torch 1.6 and newer), damaged, or with what is not read here.
/// Tensors come in C order, of type u1, i2, i4, i8, f2, f4 or b2 (bf16), their path naming the file and the storage.
TorchValue read_torch_file(const std::string& path);

}  // namespace heddle
