// A library is found only if it is loaded, whatever it is called, and never if two are.
#include <dlfcn.h>

#include "check.h"
#include "errors.h"
#include "loaded_library.h"

using gemm_workspace::LoadedLibrary;
using gemm_workspace::Refused;

namespace {

LoadedLibrary find() {
  return LoadedLibrary::find("libcudart", {"libcudart.so.12", "libcudart.so.13"});
}

void* load(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) std::cerr << dlerror() << "\n";
  CHECK(handle != nullptr);
  return handle;
}

}  // namespace

int main() {
  check_throws<Refused>(find, "libcudart is not loaded");

  load(CUDART_RENAMED);
  CHECK(find().name().find("libcudart-1a2b3c4d.so.13") != std::string::npos);
  CHECK(find().function<int(int*)>("cudaGetDevice") != nullptr);
  check_throws<Refused>([] { find().function<int()>("cudaNoSuchThing"); },
                        "has no function cudaNoSuchThing");
  // Another library whose name starts alike is not it.
  check_throws<Refused>([] { LoadedLibrary::find("libcud", {}); }, "libcud is not loaded");

  void* twelve = load(CUDART_12);
  CHECK_EQUAL(find().name(), "libcudart.so.12");
  load(CUDART_13);
  check_throws<Refused>(find, "2 times, as libcudart.so.12, as libcudart.so.13");
  dlclose(twelve);  // what find() has found stays loaded
  check_throws<Refused>(find, "2 times");
  return 0;
}
