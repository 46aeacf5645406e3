// A library is found only if it is loaded, whatever it is called, and never if two are.
#include <dlfcn.h>

#include "check.h"
#include "errors.h"
#include "loaded_library.h"

using gemm_workspace::LoadedLibrary;
using gemm_workspace::Refused;

namespace {

LoadedLibrary find(int major = 13) { return LoadedLibrary::find("libcudart", major); }

void* load(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) std::cerr << dlerror() << "\n";
  CHECK(handle != nullptr);
  return handle;
}

}  // namespace

int main() {
  check_throws<Refused>([] { find(); }, "libcudart.so.13 is not loaded");

  // Another major is another library.
  void* twelve = load(CUDART_12);
  check_throws<Refused>([] { find(); }, "libcudart.so.13 is not loaded");
  CHECK(find(12).handle() == twelve);

  void* renamed = load(CUDART_RENAMED);
  CHECK(find().handle() == renamed);
  CHECK(find().name().find("libcudart-1a2b3c4d.so.13") != std::string::npos);
  CHECK(find().function<int(int*)>("cudaGetDevice") != nullptr);
  check_throws<Refused>([] { find().function<int()>("cudaNoSuchThing"); },
                        "has no function cudaNoSuchThing");
  // What find() has found stays, whoever lets go of it.
  dlclose(renamed);
  CHECK(find().handle() == renamed);

  // Another library whose name starts alike is not it, nor another version of it.
  check_throws<Refused>([] { LoadedLibrary::find("libcud", 13); }, "libcud.so.13 is not loaded");
  check_throws<Refused>([] { find(1); }, "libcudart.so.1 is not loaded");

  load(CUDART_13);
  check_throws<Refused>([] { find(); }, "libcudart.so.13 is loaded 2 times, as ");
  CHECK(find(12).handle() == twelve);
  return 0;
}
