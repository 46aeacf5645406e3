"""Processes for cases: new ones, or forked from a server that has imported everything."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

CHILD = ("-m", "catalogue.child")
#: What a process is said to have ended with when nobody knows.
LOST = 255


class Running(Protocol):
    """A process of a case."""

    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""

    def kill(self) -> None:
        """End it and what it started."""


class Launcher(Protocol):
    """Starts processes of one wheel."""

    def start(
        self, arguments: list[str], stdout: Path, stderr: Path, environment: Mapping[str, str]
    ) -> Running: ...

    def close(self) -> None: ...


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


class _Started:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        _kill_group(self._process.pid)
        self._process.wait()


class Fresh:
    """A new interpreter for each case."""

    def __init__(
        self, environment: Mapping[str, str], folder: Path, command: tuple[str, ...] = CHILD
    ) -> None:
        self._environment, self._folder, self._command = dict(environment), folder, command

    def start(
        self, arguments: list[str], stdout: Path, stderr: Path, environment: Mapping[str, str]
    ) -> Running:
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self._environment, **environment},
                cwd=self._folder,
                start_new_session=True,
            )
        return _Started(process)

    def close(self) -> None: ...


class ServerEnded(Exception):
    """The server is gone, or never came; the text says what it said last."""


class Server:
    """One interpreter that has imported everything and forks for each case.

    Importing takes seconds, a case mostly less. A case that needs another environment gets a new
    interpreter. Raises ServerEnded on construction if the server does not come.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        folder: Path,
        command: tuple[str, ...] = CHILD,
        seconds: float = 180,
    ) -> None:
        self._fresh = Fresh(environment, folder, command)
        self._log = folder / "server.stderr"
        with self._log.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *command, "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._ready: queue.Queue[bool] = queue.Queue()
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._count = 0
        self._alive = True
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            came = self._ready.get(timeout=seconds)
        except queue.Empty:
            came = False
        if not came:
            self.close()
            raise ServerEnded(self._said())

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "nothing"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            with self._lock:
                if "ready" in answer:
                    self._ready.put(True)
                elif "pid" in answer:
                    self._pids[answer["id"]] = answer["pid"]
                elif "status" in answer:
                    self._statuses[answer["id"]] = answer["status"]
        with self._lock:
            self._alive = False
        self._ready.put(False)

    def start(
        self, arguments: list[str], stdout: Path, stderr: Path, environment: Mapping[str, str]
    ) -> Running:
        if environment or not self._alive:
            return self._fresh.start(arguments, stdout, stderr, environment)
        self._count += 1
        number = self._count
        request = {
            "id": number,
            "arguments": arguments,
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            return self._fresh.start(arguments, stdout, stderr, environment)
        return _Forked(self, number)

    def look(self, number: int) -> int | None:
        with self._lock:
            if number in self._statuses:
                return self._statuses[number]
            return None if self._alive else LOST

    def kill(self, number: int) -> None:
        with self._lock:
            pid = None if number in self._statuses else self._pids.get(number)
        if pid is not None:
            _kill_group(pid)

    def close(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            _kill_group(self._process.pid)
            self._process.wait()


class _Forked:
    def __init__(self, server: Server, number: int) -> None:
        self._server, self._number = server, number

    def status(self) -> int | None:
        return self._server.look(self._number)

    def kill(self) -> None:
        self._server.kill(self._number)
