#include "loaded_library.h"

#include <dlfcn.h>

#include <fstream>
#include <map>
#include <set>

#include "errors.h"

namespace gemm_workspace {
namespace {

// Whether a file is `stem` of that version: "libcudnn.so.9", "libcudnn.so.9.19.0" and
// "libcudnn-1a2b3c4d.so.9" are "libcudnn" of ".so.9", "libcudnn_graph.so.9" is another library.
bool is_called(const std::string& file, const std::string& stem, const std::string& version) {
  if (file.compare(0, stem.size(), stem) != 0) return false;
  std::size_t at = stem.size();
  if (at < file.size() && file[at] == '-') {
    at = file.find_first_not_of("0123456789abcdef", at + 1);
    if (at == std::string::npos) return false;
  }
  if (file.compare(at, version.size(), version) != 0) return false;
  at += version.size();
  return at == file.size() || file[at] == '.';
}

// Paths of the files in this process's memory that are called so.
std::set<std::string> mapped(const std::string& stem, const std::string& version) {
  std::set<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path == std::string::npos) continue;
    if (is_called(line.substr(line.rfind('/') + 1), stem, version)) paths.insert(line.substr(path));
  }
  return paths;
}

}  // namespace

LoadedLibrary LoadedLibrary::find(const std::string& stem, int major) {
  const std::string version = ".so." + std::to_string(major);
  std::set<std::string> names = mapped(stem, version);
  names.insert(stem + version);
  // By handle: one library may be known by several names.
  std::map<void*, std::string> found;
  for (const std::string& name : names) {
    void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle != nullptr) found.emplace(handle, name);
  }
  if (found.empty()) {
    throw Refused(stem + version + " is not loaded; wanted the one that torch loads");
  }
  if (found.size() > 1) {
    std::string message = stem + version + " is loaded " + std::to_string(found.size()) + " times";
    for (const auto& [handle, name] : found) message += ", as " + name;
    throw Refused(message + "; wanted once, since which one is in use cannot be told");
  }
  return LoadedLibrary(found.begin()->first, found.begin()->second);
}

void* LoadedLibrary::symbol(const char* name) const {
  void* address = dlsym(handle_, name);
  if (address == nullptr) throw Refused(name_ + " has no function " + name);
  return address;
}

}  // namespace gemm_workspace
