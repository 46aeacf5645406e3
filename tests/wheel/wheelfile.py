"""Wheels as plain dicts, path -> bytes: read one, change it, write it back with a right RECORD."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parent.parent.parent
Members = dict[str, bytes]


def read(path: Path) -> Members:
    """Every member of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(members: Members, target: Path | BinaryIO) -> None:
    """A wheel of these members, stored: only what they hold matters here."""
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def in_memory(members: Members) -> BinaryIO:
    """The same, without a file."""
    out = io.BytesIO()
    write(members, out)
    out.seek(0)
    return out


def dist_info(members: Members) -> str:
    """The dist-info folder."""
    (folder,) = {name.split("/")[0] for name in members if ".dist-info/" in name}
    return folder


def record_line(path: str, data: bytes) -> str:
    """A row of RECORD; no path used here needs quotes."""
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def with_record(members: Members) -> Members:
    """The members with RECORD made right."""
    own = f"{dist_info(members)}/RECORD"
    rest = {path: data for path, data in members.items() if path != own}
    text = "".join(record_line(path, data) for path, data in rest.items()) + f"{own},,\n"
    return {**rest, own: text.encode()}


def with_provenance(members: Members, before: Members) -> Members:
    """Own up to every difference from ``before`` in graft.json, then make RECORD right.

    What is wrong with the result can only be found by reading what the files mean.
    """
    folder = dist_info(members)
    provenance: dict[str, Any] = json.loads(members[f"{folder}/graft.json"])
    for path, data in members.items():
        after = hashlib.sha256(data).hexdigest()
        if path not in before:
            provenance["added"][path] = after
        elif data != before[path]:
            old = hashlib.sha256(before[path]).hexdigest()
            if path in provenance["added"]:
                provenance["added"][path] = after
            else:
                provenance["changed"].setdefault(path, {"before": old})["after"] = after
    for path in before.keys() - members.keys():
        provenance["added"].pop(path, None)
    text = json.dumps(provenance).encode()
    return with_record({**members, f"{folder}/graft.json": text})


def minimal(version: str, name: str = "flashinfer-python", **files: bytes) -> Members:
    """The smallest wheel that looks like a release; ``files`` go into the package."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    return with_record(
        {
            "flashinfer/__init__.py": b"",
            **{f"flashinfer/{path}.py": data for path, data in files.items()},
            f"{folder}/METADATA": (
                f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nText.\n"
            ).encode(),
            f"{folder}/WHEEL": (
                b"Wheel-Version: 1.0\nGenerator: by hand\n"
                b"Root-Is-Purelib: true\nTag: py3-none-any\n"
            ),
            f"{folder}/RECORD": b"",
        }
    )


def reversioned(members: Members, version: str) -> Members:
    """The same release under another version number."""
    folder = dist_info(members)
    old = folder.removeprefix("flashinfer_python-").removesuffix(".dist-info")
    out = {
        path.replace(folder, f"flashinfer_python-{version}.dist-info", 1): data
        for path, data in members.items()
    }
    metadata = f"{dist_info(out)}/METADATA"
    out[metadata] = out[metadata].replace(
        f"\nVersion: {old}\n".encode(), f"\nVersion: {version}\n".encode(), 1
    )
    return with_record(out)


def graft(
    *arguments: str | Path, root: Path = ROOT, python: str | Path = sys.executable, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m graft`` in a process of its own, in the repository or a copy of it."""
    env = {**os.environ, **options.pop("env", {})}
    # Of what is in the environment only what a test asks for decides where flashinfer comes from.
    env = {name: value for name, value in env.items() if value is not None}
    return subprocess.run(
        [python, "-m", "graft", *map(str, arguments)],
        cwd=root,
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,  # a hang, not slowness: a build takes seconds
        **options,
    )
