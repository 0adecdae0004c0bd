"""Processes of peers on this machine: forked from one that has imported their libraries, or started one by one.

Requests and reports are lines of JSON over a pair of sockets:

    → {"process": 3, "arguments": ["run", "--config", FILE], "log": FILE}    fork a process, number 3 from now on
    → {"process": 3, "signal": 15}                                          send it a signal, if it still runs
    ← {"process": 3, "pid": 4711}
    ← {"process": 3, "exited": 0}                                           −n: ended by signal n

When the socket closes, the fork server ends, and the peers when they notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from peer.errors import SottoError
from peer.files import open_own

_FORK_SERVER = ("-m", "peer.cli.fork_server")
_ROOM_FOR_COMMAND_LINE = " " * 1024
"""A process can be renamed only within the memory of the command line that it was started with."""


class PeerProcess(Protocol):
    """The process of one peer: what `subprocess.Popen` has of this, and means by it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


def peer_environment() -> dict[str, str]:
    """Return the environment of a peer process: what has to be set before Python starts."""
    environment = dict(os.environ)
    # One thread a process (bit identity, and N peers share the cores); keep freed memory instead of giving every
    # large block back to the kernel and paying its page faults again in the next round. One arena: a block of more than
    # 64 MB fits into none but the first, and is mapped anew each time that a thread of another one asks for it.
    defaults = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_TOP_PAD_": "67108864",
        "MALLOC_ARENA_MAX": "1",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    environment["SOTTO_PARENT"] = str(os.getpid())
    return environment


def start_process(command: Sequence[str], log: Path) -> PeerProcess:
    """Start a command as the process of a peer, with its output at the end of `log`."""
    with os.fdopen(open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=peer_environment(),
            # A session of its own: Ctrl-C in the terminal comes here first, and the peers are told in order.
            start_new_session=True,
        )


class ForkServer:
    """A process that has imported the peers' libraries, and forks them. Closing it ends peers that still run."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        """Start it; requests for a process meanwhile do not wait. `command` is that of another installation."""
        self._socket, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process that writes to it
        with theirs:
            self._server = subprocess.Popen(
                [*(command or [sys.executable, *_FORK_SERVER]), str(theirs.fileno()), _ROOM_FOR_COMMAND_LINE],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=peer_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._processes: list[ForkedProcess] = []
        self._unread = b""
        self._is_lost = False

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self, arguments: Sequence[str], log: Path) -> PeerProcess:
        """Start `sotto` with these arguments as the process of a peer, with its output at the end of `log`."""
        process = ForkedProcess(self, len(self._processes))
        self._processes.append(process)
        if self._is_lost:
            process.abandon()
            return process
        self.send({"process": process.number, "arguments": [*arguments], "log": str(log.absolute())})
        return process

    def failure(self) -> SottoError | None:
        """Return the error if the server ended before it was closed, and with it all processes that it had forked."""
        if not self._is_lost:
            return None
        code = self._server.wait()
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return SottoError(f"the process that peers are forked from {how}{f': {lines[-1]}' if lines else ''}")

    def close(self) -> None:
        """End the server, and its forked processes that still run. May be called again."""
        self.read(0.0)
        for process in self._processes:
            process.abandon()
        self._socket.close()
        # It may be importing still, and would notice only then.
        self._server.terminate()
        self._server.wait()
        self._output.close()

    def send(self, request: dict[str, object]) -> None:
        """Send a request."""
        # `read` notices a server that is gone.
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def read(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s`, without end if it is None, for reports, and note them."""
        is_closed = self._socket.fileno() < 0
        if self._is_lost or is_closed or not select.select([self._socket], [], [], timeout_s)[0]:
            return
        try:
            read = self._socket.recv(1 << 16)
        except ConnectionResetError:
            read = b""
        *lines, self._unread = (self._unread + read).split(b"\n")
        for report in map(json.loads, lines):
            self._processes[report["process"]].note(report)
        if not read:
            self._is_lost = True
            for process in self._processes:
                process.abandon()


class ForkedProcess:
    """A `PeerProcess` that was forked."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self.number = server, number
        self._pid: int | None = None
        self.returncode: int | None = None
        """The exit code, if it was looked for already."""

    @property
    def pid(self) -> int:
        """The id of the process. Waits until it is forked; raises SottoError if it cannot be any more."""
        while self._pid is None:
            self._server.read(None)
            if self._pid is None and (failure := self._server.failure()) is not None:
                raise failure
        return self._pid

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, or is yet to be forked."""
        if self.returncode is None:
            self._server.read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            self._server.read(left)
            if self.returncode is None and left == 0.0:
                raise subprocess.TimeoutExpired("sotto", timeout or 0.0)
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            self._server.send({"process": self.number, "signal": sig})

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def note(self, report: Mapping[str, int]) -> None:
        """Take the server's report about this process."""
        self._pid = report.get("pid", self._pid)
        self.returncode = report.get("exited")

    def abandon(self) -> None:
        """End the process, of which nobody will report any more."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
