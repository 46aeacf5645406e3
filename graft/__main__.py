"""Command line: ``python -m graft``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

try:
    from packaging.version import Version
except ModuleNotFoundError:
    sys.exit("graft: needs the package 'packaging' (pip install packaging)")

from . import delta, label, writer
from .build import build
from .edits import EDITS
from .errors import GraftError
from .fetch import INSTALLED, open_base
from .patch import patch
from .releases import DEFAULT_BASE, RELEASES
from .source import check_installed, installed_version
from .verify import verify

BASE_HELP = "a version, the path of an upstream wheel, or 'installed' (default: %(default)s)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m graft",
        description="Graft the workspace fork onto a FlashInfer release: a drop-in wheel.",
        epilog="Exit status: 0 done, 2 bad input (on stderr one line, and under it a line for each "
        "problem in a file; nothing is written).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, base: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if base:
            default = None if name == "install" else DEFAULT_BASE
            shown = BASE_HELP if default else "as for build (default: the copy installed here)"
            command.add_argument("base", nargs="?", default=default, metavar="BASE", help=shown)
            command.add_argument(
                "--unknown-release",
                action="store_true",
                help="accept a version that is not in the table, after the same checks",
            )
        return command

    command = add("build", "build and verify the drop-in wheel")
    command.add_argument("-o", dest="folder", type=Path, default=Path("dist"), metavar="DIR")
    command.add_argument("--json", action="store_true", help="report as JSON")
    command.add_argument(
        "--native",
        type=Path,
        metavar="FILE",
        help="the native launch that `make native` built: a wheel for its platform",
    )
    command = add("verify", "check a finished wheel, independently of the build", base=False)
    command.add_argument("wheel", type=Path, metavar="WHEEL")
    command.add_argument("--json", action="store_true", help="report as JSON")
    add("diff", "print the delta as one patch for `git apply` in a checkout of that release")
    command = add("tree", "write the grafted package as a source tree, to read")
    command.add_argument("-o", dest="folder", type=Path, required=True, metavar="DIR")
    command = add("releases", "list the known releases and what each edit does there", base=False)
    command.add_argument("--json", action="store_true", help="as JSON")
    add("install", "build for the version installed here, install it, verify, show its config")
    add("label", "print the label and the digest of the delta at hand", base=False)
    return parser


def _verify(wheel: Path, *, as_json: bool) -> None:
    if not wheel.is_file():
        raise GraftError(f"{wheel}: {'not a file' if wheel.exists() else 'no such file'}")
    proofs = verify(wheel)
    if as_json:
        print(json.dumps({"wheel": str(wheel), "proofs": [asdict(proof) for proof in proofs]}))
    else:
        print("\n".join(f"verified: {proof}" for proof in proofs))


def _diff(base: str, *, allow_unknown: bool) -> None:
    with open_base(base, allow_unknown=allow_unknown) as source:
        sys.stdout.writelines(patch(delta.make(source)))


def _tree(base: str, folder: Path, *, allow_unknown: bool) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GraftError(f"{folder}: is there already and is not an empty folder")
    with open_base(base, allow_unknown=allow_unknown) as source:
        made = delta.make(source)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Beside the target, so that it appears complete or not at all.
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tree-") as temporary:
                root = Path(temporary, "tree")
                for path, content, _ in writer.members(source, made):
                    data = content if isinstance(content, bytes) else source.store.read(content)
                    target = root / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)
                os.replace(root, folder)
        except OSError as error:
            raise GraftError(f"cannot write {folder}: {error.strerror}") from None
    print(folder)


def _releases(*, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "version": release.version,
                "state": release.state,
                "sha256": release.sha256,
                "record_sha256": release.record_sha256,
                "sites": {edit.name: dict(release.family.counts[edit.name]) for edit in EDITS},
                "own_lengths": sorted(release.family.own_lengths),
            }
            for release in RELEASES.values()
        ]
        print(json.dumps(rows, indent=1))
        return
    for release in sorted(RELEASES.values(), key=lambda r: Version(r.version)):
        sites = " ".join(
            f"{edit.name} {sum(release.family.counts[edit.name].values())}" for edit in EDITS
        )
        print(f"{release.version:13} {release.state}")
        print(f"{'':13} {sites}")
        print(f"{'':13} sha256 {release.sha256}")


def _run(*command: str) -> int:
    sys.stdout.flush()
    return subprocess.run(command, check=False).returncode


def _install(base: str | None, *, allow_unknown: bool) -> int:
    here = installed_version()
    upstream = here.split("+")[0]
    if base is None:
        # A grafted copy is no input; its release is fetched (or comes from the cache).
        base = INSTALLED if here == upstream else upstream
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        built = build(base, Path(folder), allow_unknown=allow_unknown)
        if built.base != upstream:
            raise GraftError(f"{here} is installed here, the build is of {built.base}")
        print(built.as_text())
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        # --force-reinstall: a version that is equal already would be left as it is.
        done = _run(*pip, "install", "--no-deps", "--force-reinstall", "-q", str(built.wheel))
        if done:
            raise GraftError(f"pip install ended with {done}; the wheel was not installed")
    print(f"verified: installed files as in RECORD: {check_installed()}")
    script = shutil.which("flashinfer", path=str(Path(sys.executable).parent))
    show = (script,) if script else (sys.executable, "-m", "flashinfer")
    status = _run(*show, "show-config")
    if status:
        # The release's own command; it wants torch, and a network where checksums are not cached.
        print(
            f"graft: installed and verified; `flashinfer show-config` ended with {status}",
            file=sys.stderr,
        )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status."""
    given = _parser().parse_args(arguments)
    unknown = getattr(given, "unknown_release", False)
    try:
        match given.command:
            case "build":
                built = build(given.base, given.folder, allow_unknown=unknown, native=given.native)
                print(json.dumps(built.as_json()) if given.json else built.as_text())
            case "verify":
                _verify(given.wheel, as_json=given.json)
            case "diff":
                _diff(given.base, allow_unknown=unknown)
            case "tree":
                _tree(given.base, given.folder, allow_unknown=unknown)
            case "releases":
                _releases(as_json=given.json)
            case "install":
                return _install(given.base, allow_unknown=unknown)
            case "label":
                row = label.at_hand()
                print(f"{label.CURRENT}: Label(runtime={row.runtime!r}, delta={row.delta!r})")
        sys.stdout.flush()
    except GraftError as error:
        print(f"graft: {error}", file=sys.stderr)
        return 2
    except (RecursionError, MemoryError) as error:
        print(f"graft: too deeply nested or too large ({type(error).__name__})", file=sys.stderr)
        return 2
    except UnicodeEncodeError as error:
        print(f"graft: cannot print {error.object!r} in {error.encoding}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a patch went away; nothing of ours is half-written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"graft: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("graft: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
