"""A stand-in for libcuda and libcudart, for a machine without a GPU: enough to build cuDNN plans.

cuDNN builds plans from the description of a device, but wants a driver to be there. This one has
every function that is looked for in it, and each fails with "no device", but for a few that say:
there is a driver, its version, where its functions are, what an error is called, that there are
no devices, and that device 0 is current and has the compute capability of the description (all
its other attributes are 0). So engines that need a device to be planned (cuBLASLt's, eng0) offer
nothing; the others plan as they do beside a real driver: for cuDNN 9.19 and SM90 the sizes are
those that an H200's driver gave (docs/evidence/plan-sizes.md).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from catalogue.command import last_line
from catalogue.wheels import BadInput

#: In the environment of a process: ten times the major version plus the minor one.
CAPABILITY = "STAND_IN_CAPABILITY"
#: CUDA 13.0, as the driver and the runtime say it.
VERSION = 13000

_DRIVER = rb"\x00(cu[A-Z][A-Za-z0-9]+(?:_v\d+|_ptsz|_ptds)*)(?=\x00)"
_RUNTIME = rb"\x00(cuda[A-Z][A-Za-z0-9]+(?:_v\d+)?)(?=\x00)"

_DRIVER_OWN = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int cuInit(unsigned flags) {{ (void)flags; return 0; }}
int cuDriverGetVersion(int* version) {{ *version = {VERSION}; return 0; }}
int cuDeviceGetCount(int* count) {{ *count = 0; return 0; }}
int cuGetErrorString(int error, const char** text) {{ (void)error; *text = "stand-in"; return 0; }}
int cuGetErrorName(int error, const char** text) {{ (void)error; *text = "stand-in"; return 0; }}
int cuGetProcAddress_v2(const char* name, void** at, int version, unsigned long long flags,
                        int* found) {{
  char newer[256];
  (void)version, (void)flags;
  snprintf(newer, sizeof newer, "%s_v2", name);
  Dl_info here;
  void* self = dladdr((void*)cuInit, &here) ? dlopen(here.dli_fname, RTLD_NOW) : NULL;
  *at = self ? dlsym(self, newer) : NULL;
  if (self && !*at) *at = dlsym(self, name);
  if (found) *found = *at ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
  return *at ? 0 : 500;            /* CUDA_ERROR_NOT_FOUND */
}}
int cuGetProcAddress(const char* name, void** at, int version, unsigned long long flags) {{
  return cuGetProcAddress_v2(name, at, version, flags, NULL);
}}
"""

_RUNTIME_OWN = f"""
#include <stdlib.h>
int cudaGetDevice(int* device) {{ *device = 0; return 0; }}
int cudaGetDeviceCount(int* count) {{ *count = 0; return 0; }}
int cudaDriverGetVersion(int* version) {{ *version = {VERSION}; return 0; }}
int cudaRuntimeGetVersion(int* version) {{ *version = {VERSION}; return 0; }}
const char* cudaGetErrorString(int error) {{ (void)error; return "stand-in"; }}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {{
  const char* text = getenv("{CAPABILITY}");
  const int capability = text ? atoi(text) : 0;
  (void)device;
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0;
  return 0;
}}
"""

# Each compiles C when it is told to.
_C = ("cc", "gcc", "clang", "c++")

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, cudaErrorNoDevice


def environment(folder: Path, capability: int) -> dict[str, str]:
    """Variables for a process that is to plan over the stand-in of ``folder``."""
    path = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {CAPABILITY: str(capability), "LD_LIBRARY_PATH": os.pathsep.join(filter(None, path))}


def build(folder: Path) -> None:
    """Compile the stand-in for the cudnn-frontend and cuDNN on the path into ``folder``, beside
    links to cuDNN and what it loads. Raises BadInput for what is missing."""
    named = os.environ.get("CC")
    compiler = shlex.split(named) if named else list(filter(None, map(shutil.which, _C)))[:1]
    if not compiler:
        raise BadInput(f"no C compiler: neither $CC nor one of {', '.join(_C)} is on the PATH")
    frontend, libraries, companions = _frontend(), _cudnn(), _companions()
    driver, runtime = _names(_DRIVER, [*libraries, *frontend]), _names(_RUNTIME, frontend)
    folder.mkdir(parents=True, exist_ok=True)
    for library in (*libraries, *companions):
        # The frontend looks for libcudnn.so, which the wheel does not have.
        for name in {library.name, re.sub(r"\.so\..*", ".so", library.name)}:
            link = folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(library)
    _compile(compiler, folder / "libcuda.so.1", _DRIVER_OWN, driver)
    for major in (12, 13):
        _compile(compiler, folder / f"libcudart.so.{major}", _RUNTIME_OWN, runtime)


def _found(module: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return []
    except Exception as error:  # find_spec imports the packages above it
        raise BadInput(f"the package above {module} does not import: {error!r}") from None
    return [Path(each).absolute() for each in (spec and spec.submodule_search_locations) or ()]


def _frontend() -> list[Path]:
    for folder in _found("cudnn"):
        if built := sorted(folder.glob("_compiled_module*.so")):
            return built
    raise BadInput("no cudnn-frontend on the path: pip install nvidia-cudnn-frontend")


def _cudnn() -> list[Path]:
    for folder in _found("nvidia.cudnn"):
        if found := sorted((folder / "lib").glob("libcudnn*.so.*")):
            return found
    raise BadInput("no cuDNN on the path: pip install nvidia-cudnn-cu13, or --target a folder")


def _companions() -> list[Path]:
    """What cuDNN loads: cuBLASLt, without which it aborts, and NVRTC, which its engines want."""
    found: list[Path] = []
    for name, package in (("libcublas", "nvidia-cublas"), ("libnvrtc", "nvidia-cuda-nvrtc")):
        of = [
            library
            for module in ("nvidia.cu13", "nvidia.cublas", "nvidia.cuda_nvrtc")
            for folder in _found(module)
            for library in sorted((folder / "lib").glob(f"{name}*.so.*"))
        ]
        if not of:
            raise BadInput(f"no {name} on the path: pip install {package}, or --target a folder")
        found += of
    return found


def _names(pattern: bytes, libraries: Iterable[Path]) -> set[str]:
    found: set[str] = set()
    for library in libraries:
        try:
            data = library.read_bytes()
        except OSError as error:
            raise BadInput(
                f"{library} cannot be read ({error.strerror}): install it again"
            ) from None
        found |= {name.decode() for name in re.findall(pattern, data)}
    return found


def _compile(compiler: list[str], target: Path, own: str, names: set[str]) -> None:
    mine = set(re.findall(r"\b(cu\w+)\(", own))
    source = own + "".join(
        f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in sorted(names - mine)
    )
    flags = ["-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{target.name}"]
    try:
        done = subprocess.run(
            [*compiler, *flags, "-o", str(target), "-ldl"],
            input=source,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        said = f"{shlex.join(compiler)} does not run ({error.strerror})"
        raise BadInput(f"{said}: set $CC to a C compiler") from None
    if done.returncode:
        last = last_line(done.stderr, "no message")
        said = f"{shlex.join(compiler)} cannot make {target.name}: {last}"
        raise BadInput(f"{said}: set $CC to another C compiler")
