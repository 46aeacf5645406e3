"""Takes the headers out of downloaded wheels: ``python csrc/headers.py WHEELS FOLDER``.

``WHEELS`` is a folder of wheels, ``FOLDER`` is made anew. Only headers, and the library of
apache-tvm-ffi that the result is linked against, are unpacked: a few MB of the wheels' 800.
"""

import shutil
import sys
import zipfile
from pathlib import Path

LIBRARY = "tvm_ffi/lib/libtvm_ffi.so"


def wanted(name: str) -> bool:
    """Whether the compiler needs the file."""
    return not name.endswith("/") and ("include/" in f"/{name}" or name == LIBRARY)


def unpack(wheels: list[Path], folder: Path) -> None:
    """Fill ``folder``, which appears complete or not at all."""
    making = folder.with_name(folder.name + ".part")
    shutil.rmtree(making, ignore_errors=True)
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if wanted(name)]
            if not names:
                sys.exit(f"headers: {path.name} has no headers")
            wheel.extractall(making, names)
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found = sorted(Path(sys.argv[1]).glob("*.whl"))
    if not found:
        sys.exit(f"headers: no wheels in {sys.argv[1]}")
    unpack(found, Path(sys.argv[2]))
