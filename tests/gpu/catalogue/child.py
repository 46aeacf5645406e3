"""The process that a case runs in.

``python -m catalogue.child facts``        what is here, and which cases apply
``python -m catalogue.child run KEY``      one case
``python -m catalogue.child warm LANE``    compile what the lane's first call compiles
``python -m catalogue.child serve``        import once, then fork a process for each request

The last line of stdout is the result, as JSON; whatever else a library prints goes to stderr.
``serve`` reads requests from stdin, one JSON object a line (``id``, ``arguments``, ``stdout``,
``stderr``: files), and answers with ``{"id", "pid"}`` when one starts and ``{"id", "status"}`` when
it has ended. It must not have made a CUDA call when it forks; each forked process makes its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: Exit status when there is no CUDA device.
NO_DEVICE = 3

Work = Callable[[list[str]], tuple[dict[str, Any], bool]]


def work(arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """(the result, whether the interpreter is to finish)."""
    match arguments:
        case ["facts"]:
            return _facts(), False
        case ["warm", lane]:
            return _warm(lane), False
        case ["run", key]:
            return _run(key)
        case _:
            raise SystemExit(f"catalogue.child: {arguments} is none of facts, run KEY, warm LANE")


def _facts() -> dict[str, Any]:
    from .facts import NoDevice, gather

    try:
        facts = gather()
    except NoDevice as error:
        return {"no_device": str(error)}
    from . import cases  # noqa: F401  fills the registry
    from .case import REGISTRY

    return {
        "facts": facts.as_dict(),
        "cases": [case.as_dict(facts) for case in REGISTRY.values()],
    }


def _warm(lane: str) -> dict[str, Any]:
    from .ops import Call

    return {"verdict": "pass" if Call(lane, (1, 16, 512, 512)).right() else "fail", "figures": {}}


def _run(key: str) -> tuple[dict[str, Any], bool]:
    from . import cases  # noqa: F401  fills the registry
    from .case import FAIL, NOT_APPLICABLE, PASS, REGISTRY, Absent

    case = REGISTRY[key]
    try:
        seen = case.run(case.lane)
    except Absent as error:
        return {"verdict": NOT_APPLICABLE, "note": str(error), "figures": {}}, False
    except Exception as error:
        text = traceback.format_exc()
        sys.stderr.write(text)
        first = (str(error).strip().splitlines() or [""])[0]
        note = f"{type(error).__name__}: {first[:300]} ({_where(error)})"
        return {"verdict": _verdict_of(error), "note": note, "figures": {}}, False
    verdict = PASS if seen.passed else FAIL
    return {"verdict": verdict, "note": seen.note, "figures": seen.figures}, case.finishes


def _verdict_of(error: BaseException) -> str:
    """What an error that a case did not expect says: of the device, of the wheel, or of the case.

    An asynchronous fault ends the context: the process is lost, as in serving. What came through
    the wheel's own code is the wheel's.
    """
    if "CUDA error" in str(error) or "cudaError" in str(error):
        return "crash"
    frames = traceback.extract_tb(error.__traceback__)
    through = any(f"{os.sep}flashinfer{os.sep}" in frame.filename for frame in frames)
    return "fail" if through else "error"


def _where(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "catalogue" in frame.filename
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"


def perform(arguments: list[str], do: Work) -> bool:
    """Do ``arguments``, print the result as the last line; whether to finish the interpreter."""
    line = os.dup(1)
    os.dup2(2, 1)  # libraries print
    try:
        result, finishes = do(arguments)
        sys.stdout.flush()
        os.write(line, (json.dumps(result, default=str) + "\n").encode())
    finally:
        os.close(line)
    return finishes


def serve(do: Work, prepare: Callable[[], None] | None = None) -> None:
    """Fork a process for each request on stdin until it closes; then end those that run."""
    requests = os.dup(0)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if prepare is not None:
        prepare()
    running: dict[int, int] = {}

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    say({"ready": os.getpid()})
    buffer, is_open = b"", True
    while is_open or running:
        if is_open and select.select([requests], [], [], 0.02)[0]:
            read = os.read(requests, 65536)
            is_open = bool(read)
            buffer += read
            *lines, buffer = buffer.split(b"\n")
            for text in lines:
                request = json.loads(text)
                pid = os.fork()
                if pid == 0:
                    os.close(requests)
                    answers.close()
                    if _forked(request, do):
                        return  # up through the interpreter's end
                    os._exit(0)
                running[pid] = request["id"]
                say({"id": request["id"], "pid": pid})
        if not is_open:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        while running:
            pid, status = os.waitpid(-1, 0 if not is_open else os.WNOHANG)
            if pid == 0:
                break
            if pid in running:
                say({"id": running.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def _forked(request: dict[str, Any], do: Work) -> bool:
    os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    try:
        finishes = perform(request["arguments"], do)
        sys.stderr.flush()
        return finishes
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _import_everything() -> None:
    """Torch, FlashInfer and the cases. Raises SystemExit if that made a CUDA call."""
    import torch

    from . import cases  # noqa: F401

    if torch.cuda.is_initialized():
        raise SystemExit("catalogue.child serve: importing initialised CUDA, cannot fork")


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        serve(work, _import_everything)
        return
    if not perform(sys.argv[1:], work):
        sys.stderr.flush()
        os._exit(0)  # graphs are alive: their teardown is a case of its own


if __name__ == "__main__":
    main()
