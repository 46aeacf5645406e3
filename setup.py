"""``python setup.py bdist_wheel``: the drop-in wheel, by the door that older build scripts use.

It needs setuptools and packaging. The base is ``$FLASHINFER_BASE``, else the default one.
"""

import sys
from pathlib import Path

from setuptools import Command, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from graft.backend import build_wheel
from graft.label import CURRENT


class bdist_wheel(Command):
    """Graft the release; nothing of setuptools' own wheel is used."""

    description = "build the drop-in wheel"
    user_options = [("dist-dir=", "d", "folder for the wheel (default: dist)")]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.dist_dir: str | None = None

    def finalize_options(self) -> None:
        self.dist_dir = self.dist_dir or "dist"

    def run(self) -> None:
        assert self.dist_dir is not None
        build_wheel(self.dist_dir)


class refused(Command):
    """Anything else would describe a package that this repository does not hold."""

    description = "not available: only bdist_wheel is"
    user_options = []  # noqa: RUF012

    def initialize_options(self) -> None:
        sys.exit("graft: this repository makes wheels only; use bdist_wheel")

    def finalize_options(self) -> None: ...
    def run(self) -> None: ...


setup(
    name="flashinfer-python",
    version=f"0+ws.{CURRENT}",  # of nothing that is built: a wheel has its base's version
    packages=[],
    py_modules=[],
    cmdclass={
        "bdist_wheel": bdist_wheel,
        **dict.fromkeys(("sdist", "egg_info", "develop", "install", "build"), refused),
    },
)
