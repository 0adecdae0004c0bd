"""The process that `sotto up` forks its peers from: it imports what they need once, and they share its memory.

Run as `python -m peer.cli.fork_server SOCKET PADDING` by `ops.peer_processes`, which says below what goes over the
socket. Between two forks it only waits. It must never have a second thread, an event loop, a channel of gRPC or a
parallel operation of torch behind it: none of them survives a fork.

A forked process is what `sotto run` is: in a session of its own, with its log as stdout and stderr, and with that
command line, for `ps` and whoever looks for it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from peer.files import open_own
from peer.train.startup import quick_imports

with quick_imports():
    from peer import cli
    from peer.cli import run  # noqa: F401 - what the command line imports to be `sotto run`
    from peer.daemon import process  # noqa: F401 - likewise


def serve(requests: socket.socket) -> tuple[list[str], Path] | None:
    """Fork a process whenever asked for one, and report how each ended, until the other end closes.

    Returns twice and more: in every forked process with the arguments of its command `sotto` and its log, and at last
    here with None.
    """
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, int] = {}
    """The number under which a process was asked for → its id."""
    buffer = b""
    while True:
        readable, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _report_ended(requests, running)
        if requests.fileno() not in readable:
            continue
        read = requests.recv(1 << 16)
        if not read:
            return None
        *lines, buffer = (buffer + read).split(b"\n")
        for request in map(json.loads, lines):
            number = request["process"]
            if "signal" in request:
                # Only this process knows for sure that the id still belongs to that peer.
                if number in running:
                    os.kill(running[number], request["signal"])
                continue
            running[number] = os.fork()
            if not running[number]:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # A shell that starts something in the background lets it ignore this one.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                requests.close()
                os.close(woken)
                os.close(wake)
                return request["arguments"], Path(request["log"])
            _send(requests, process=number, pid=running[number])


def _report_ended(requests: socket.socket, running: dict[int, int]) -> None:
    for number, pid in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[number]
            _send(requests, process=number, exited=os.waitstatus_to_exitcode(status))


def _send(requests: socket.socket, **values: int) -> None:
    # If nobody reads it, the next look at the socket ends this process.
    with contextlib.suppress(OSError):
        requests.sendall(json.dumps(values).encode() + b"\n")


def set_command_line(words: Sequence[str]) -> None:
    """Let `ps` show these words instead of the command line that the process was started with, as many as fit."""
    # Where the kernel does not allow it, the peer only has a worse name.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(words[0], encoding="utf-8")
        stat = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = int(stat[45]), int(stat[46])
        text = b"".join(word.encode() + b"\0" for word in words)[: end - begin - 1]
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            memory.write(text.ljust(end - begin, b"\0"))


def main() -> None:
    """Serve; in a forked process, be `sotto` with the arguments asked for."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    set_command_line(["sotto", "fork-server"])
    # Peers end when the process that they were forked from does, and this one ends with whoever started it.
    os.environ["SOTTO_PARENT"] = str(os.getpid())
    start = serve(requests)
    if start is None:
        return
    os.setsid()
    arguments, path = start
    log = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.argv = ["sotto", *arguments]
    set_command_line(sys.argv)
    cli.main()


if __name__ == "__main__":
    main()
