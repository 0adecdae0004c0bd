"""The processes of a trial, as children of a fork server (`fork_server.py`) of their installation."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from peer.ops.peer_processes import peer_environment

_START_S = 120.0
_FORK_SERVER = Path(__file__).with_name("fork_server.py")


class Child:
    """One process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        """How it ended; None while it runs."""
        self.ended = threading.Event()

    def kill(self) -> None:
        """End it at once, and return when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.ended.wait(10.0)


class ForkServer:
    """Starts processes of one installation."""

    def __init__(self, release: Path) -> None:
        self.release = release
        self._children: dict[int, Child] = {}
        self._started: queue.Queue[Child] = queue.Queue()
        self._process = subprocess.Popen(
            # -P: the folder of the script is none of the installation's.
            [str(release / ".venv" / "bin" / "python"), "-P", str(_FORK_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=release,
            env=peer_environment() | {"PYTHONPATH": str(release)},
            text=True,
        )
        self._ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def sotto(self, *arguments: str, log: Path) -> Child:
        """Start the installation's command."""
        return self.start("peer.cli:main", [], ["sotto", *arguments], log)

    def start(self, call: str, arguments: Sequence[str], argv: Sequence[str], log: Path) -> Child:
        """Start a process that calls "module:function" with some arguments, its output appended to `log`."""
        if not self._ready.wait(_START_S):
            raise SystemExit(f"{self.release} does not start")
        order = {"call": call, "arguments": list(arguments), "argv": list(argv), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._started.get(timeout=_START_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "started" in event:
                child = self._children[event["started"]] = Child(event["started"])
                self._started.put(child)
            elif "ended" in event:
                child = self._children.pop(event["ended"])
                child.code = event["code"]
                child.ended.set()
            else:
                self._ready.set()
