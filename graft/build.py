"""Build: from a base to a verified wheel on disk, with a report of what was done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from . import delta, writer
from .edits import EDITS
from .fetch import open_base
from .label import ROOT
from .native import read
from .verify import Proof, verify


@dataclass(frozen=True)
class Built:
    """What a build did."""

    wheel: Path
    sha256: str
    base: str
    version: str
    #: edit name -> path in the wheel -> number of sites
    sites: dict[str, dict[str, int]]
    files_changed: int
    files_added: int
    files_unchanged: int
    proofs: list[Proof]

    def as_json(self) -> dict[str, object]:
        """Plain data for scripts."""
        return {**asdict(self), "wheel": str(self.wheel)}

    def as_text(self) -> str:
        """For people: file by file and edit by edit, in under a screen."""
        lines = [f"{self.base} -> {self.version}"]
        for edit in EDITS:
            sites = self.sites[edit.name]
            where = ", ".join(f"{Path(path).name} {n}" for path, n in sites.items())
            lines.append(
                f"  {edit.name:14} {sum(sites.values()):3}  {where or 'nothing to do here'}"
            )
        lines.append(
            f"  {self.files_changed} files changed, {self.files_added} added, "
            f"{self.files_unchanged} unchanged"
        )
        lines += [f"  verified: {proof}" for proof in self.proofs]
        lines += [f"{self.wheel}", f"sha256 {self.sha256}"]
        return "\n".join(lines)


def build(
    base: str, folder: Path, *, allow_unknown: bool = False, native: Path | None = None
) -> Built:
    """Build the drop-in wheel of ``base`` into ``folder``, with the native launch in ``native``.

    ``base`` is a version, the path of an upstream wheel, or ``installed``. The finished wheel is
    verified before it gets its name; raises GraftError and leaves nothing behind otherwise.
    """
    library = None if native is None else read(native, ROOT)
    with open_base(base, allow_unknown=allow_unknown) as source:
        made = delta.make(source, library)
        written = writer.write(source, made, folder, check=verify)
        return Built(
            wheel=written.path,
            sha256=written.sha256,
            base=source.version,
            version=made.version,
            sites={
                edit.name: {
                    file.path: len(file.sites[edit.name])
                    for file in made.edited
                    if edit.name in file.sites
                }
                for edit in EDITS
            },
            files_changed=len(made.edited),
            files_added=len(made.added),
            files_unchanged=len(source.rows) - len(made.edited) - 2,  # METADATA and WHEEL
            proofs=written.proofs,
        )
