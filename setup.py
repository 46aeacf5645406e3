"""``python setup.py bdist_wheel``: the drop-in wheel, by the door that older build scripts use.

It needs setuptools and packaging. The base is ``$FLASHINFER_BASE``, else the default one.
"""

import sys
from pathlib import Path

from setuptools import Command, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from graft.backend import base_from, build_wheel
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


setup(
    name="flashinfer-python",
    version=f"{base_from()}+ws.{CURRENT}",
    packages=[],
    py_modules=[],
    cmdclass={"bdist_wheel": bdist_wheel},
)
