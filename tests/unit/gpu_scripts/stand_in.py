"""Stands in for ``catalogue.child``: the same arguments, no torch, and every way to end."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "gpu"))

from catalogue import child

FACTS = {
    "distribution": "1.0",
    "version": "1.0",
    "fork": os.environ.get("STAND_IN_FORK") == "1",
    "data": True,
    "gpu": "a stand-in",
    "gpus": 1,
    "capability": [9, 0],
    "driver": "1",
    "torch": "2",
    "cudnn": 91900,
    "cudnn_frontend": "1",
    "cuda_bindings": "13",
    "python": "3",
}


def case(key: str, **settings: Any) -> dict[str, Any]:
    name, _, lane = key.partition(".")
    return {
        "key": key,
        "id": name,
        "lane": lane,
        "hazards": ["A1"],
        "title": f"it is {name}",
        "seconds": 60,
        "alone": False,
        "environment": {},
        "after_release": False,
        "compiles": False,
        "known": False,
        "reason_not": "",
        **settings,
    }


CASES = [
    case("passes"),
    case("fails", known=True),
    case("crashes"),
    case("exits"),
    case("raises"),
    case("garbage"),
    case("silent"),
    case("crashes-after"),
    case("prints-after"),
    case("environment", environment={"SET_FOR_IT": "7"}),
    case("compiled.fp8-cublas", compiles=True),
    case("elsewhere", reason_not="needs two GPUs"),
]


def work(arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """What each case does."""
    match arguments:
        case ["facts"]:
            if os.environ.get("STAND_IN_DEVICE") == "none":
                return {"no_device": "none in this test"}, False
            return {"facts": FACTS, "cases": CASES}, False
        case ["warm", _]:
            return {"verdict": os.environ.get("STAND_IN_WARM", "pass"), "figures": {}}, False
        case ["run", "crashes"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["run", "exits"]:
            sys.stderr.write("what it said last\n")
            sys.stderr.flush()
            os._exit(7)
        case ["run", "raises"]:
            raise KeyError("of the harness")
        case ["run", "garbage"]:
            os.write(1, b"")
            return ["no dictionary"], False  # type: ignore[return-value]
        case ["run", "silent"]:
            os._exit(0)
        case ["run", "crashes-after"]:
            return {"verdict": "pass", "note": "", "figures": {}, "then": "SIGABRT"}, True
        case ["run", "prints-after"]:
            atexit.register(print, "a library says goodbye")
            return {"verdict": "pass", "figures": {}}, True
        case ["run", "environment"]:
            seen = os.environ.get("SET_FOR_IT", "not set")
            return {"verdict": "pass", "figures": {"set": seen}}, False
        case ["run", "fails"]:
            print("a library prints")
            return {"verdict": "fail", "note": "as it must", "figures": {"wrong": 3}}, False
    return {"verdict": "pass", "figures": {}}, False


def main() -> None:
    child.work = work
    if sys.argv[1:] == ["run", "crashes-after"]:
        child.perform(sys.argv[1:], work)
        os.abort()
    child.main()


if __name__ == "__main__":
    if os.environ.get("STAND_IN_SERVES") == "0" and sys.argv[1:] == ["serve"]:
        raise SystemExit("it does not serve")
    if sys.argv[1:] == ["serve"]:
        child.serve(work)
    else:
        main()
