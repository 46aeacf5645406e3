"""Run the doctor, as a module or as a folder (which needs no working FlashInfer)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_ALONE = "flashinfer_workspace_doctor"


def _package() -> str:
    """Name of the package that this file belongs to, loaded from its folder if need be."""
    if __package__:
        return __package__
    folder = Path(__file__).resolve().parent
    # Python put the folder itself first: its modules would hide others of the same names.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != folder]
    spec = importlib.util.spec_from_file_location(
        _ALONE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_ALONE] = module
    spec.loader.exec_module(module)
    return _ALONE


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - a folder runs with whatever Python is named
        print(
            "doctor: needs Python 3.10 or later, the one that the server runs with", file=sys.stderr
        )
        sys.exit(2)
    sys.dont_write_bytecode = True  # it leaves nothing behind
    sys.exit(importlib.import_module(f"{_package()}.cli").main())
