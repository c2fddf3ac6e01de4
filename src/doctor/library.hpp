// A shared library that may be there: opened at run time, so that nothing of it is needed to build or to start.
#pragma once

#include <dlfcn.h>

namespace heddle::doctor {

class Library {
 public:
  /// Stays loaded until the process ends: drivers leave threads and handlers behind.
  explicit Library(const char* file) : handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {}

  bool is_there() const { return handle_ != nullptr; }

  /// Calls a function that returns 0 where it is done. False where it is missing or says otherwise; the status goes to `status`.
  template <class... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    return status(name, arguments...) == 0;
  }
  template <class... Arguments>
  int status(const char* name, Arguments... arguments) const {
    constexpr int missing = -1;
    if (handle_ == nullptr) return missing;
    const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
    return function == nullptr ? missing : function(arguments...);
  }

 private:
  void* handle_;
};

}  // namespace heddle::doctor
