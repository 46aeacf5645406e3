#include "loaded_library.h"

#include <dlfcn.h>

#include <fstream>
#include <set>
#include <sstream>
#include <vector>

#include "errors.h"

namespace gemm_workspace {
namespace {

// Whether `file` is `stem` itself: "libcudnn.so.9" and "libcudnn-1a2b3c4d.so.9" are "libcudnn",
// "libcudnn_graph.so.9" is another library.
bool is_called(const std::string& file, const std::string& stem) {
  if (file.compare(0, stem.size(), stem) != 0) return false;
  std::size_t at = stem.size();
  if (at < file.size() && file[at] == '-') {
    at = file.find_first_not_of("0123456789abcdef", at + 1);
    if (at == std::string::npos) return false;
  }
  return file.compare(at, 3, ".so") == 0 && (at + 3 == file.size() || file[at + 3] == '.');
}

// Paths of the mapped files that are called `stem`.
std::set<std::string> mapped(const std::string& stem) {
  std::set<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path == std::string::npos) continue;
    const std::size_t file = line.rfind('/') + 1;
    if (is_called(line.substr(file), stem)) paths.insert(line.substr(path));
  }
  return paths;
}

void* if_loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

}  // namespace

LoadedLibrary LoadedLibrary::find(const std::string& stem,
                                  std::initializer_list<const char*> sonames) {
  std::vector<LoadedLibrary> found;
  for (const char* soname : sonames) {
    if (void* handle = if_loaded(soname)) found.push_back(LoadedLibrary(handle, soname));
  }
  if (found.empty()) {
    for (const std::string& path : mapped(stem)) {
      if (void* handle = if_loaded(path.c_str())) found.push_back(LoadedLibrary(handle, path));
    }
  }
  if (found.empty()) throw Refused(stem + " is not loaded; wanted the one that torch loads");
  if (found.size() > 1) {
    std::ostringstream message;
    message << stem << " is loaded " << found.size() << " times";
    for (const LoadedLibrary& each : found) message << ", as " << each.name();
    throw Refused(message.str() + "; wanted once, since which one torch uses cannot be told");
  }
  return found.front();
}

void* LoadedLibrary::symbol(const char* name) const {
  void* address = dlsym(handle_, name);
  if (address == nullptr) throw Refused(name_ + " has no function " + name);
  return address;
}

}  // namespace gemm_workspace
