// Shared libraries that this process has loaded already. Nothing is ever loaded here, and nothing
// is linked by name: the library that torch uses is the one to call.
#pragma once

#include <string>
#include <utility>

namespace gemm_workspace {

// A reference to a loaded library. It is never given back: functions of it are called until the
// process ends, and unloading at exit would run in an order that nobody controls.
class LoadedLibrary {
 public:
  // The library `stem`, "libcudnn", of a major version that is loaded, also where a repaired
  // wheel has renamed it. Throws Refused if none is loaded, and if several are, from different
  // files: a handle of one must not reach another.
  static LoadedLibrary find(const std::string& stem, int major);

  // The function `name`. Throws Refused if the library has none.
  template <typename Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }

  void* handle() const { return handle_; }
  const std::string& name() const { return name_; }

 private:
  LoadedLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* symbol(const char* name) const;

  void* handle_;
  std::string name_;
};

}  // namespace gemm_workspace
