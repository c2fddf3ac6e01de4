// The file of heddle bench all: what was measured when, where and how. Written anew, by rename, after every measurement.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "suite.hpp"

namespace heddle::tool {

class SuiteFile {
 public:
  /// Takes up what an earlier call left at `path`. Throws InputError where the file is none of this suite, or of the other engine.
  SuiteFile(std::string path, const SuiteArguments& a, nlohmann::ordered_json machine);

  /// Is there one: has this call or an earlier one written it?
  bool is_there() const;
  /// Was it measured in full, with these arguments, from this commit, on this machine? Computed ones are of any machine.
  bool has(const Measurement& what) const;
  /// Was it under way when an earlier call ended?
  bool was_interrupted(const Measurement& what) const;
  void begin(const Measurement& what);
  void finish(const Measurement& what, const Measured& measured, double seconds);
  /// `why` it was not measured.
  void skip(const Measurement& what, const std::string& why);

 private:
  nlohmann::ordered_json entry_of(const Measurement& what) const;
  const nlohmann::ordered_json* find(const Measurement& what) const;
  void put(const nlohmann::ordered_json& entry);
  void save();

  std::string path_, commit_;
  nlohmann::ordered_json machine_, json_;
  std::string interrupted_;
};

}  // namespace heddle::tool
