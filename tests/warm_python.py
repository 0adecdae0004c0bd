"""A Python that starts at once: forked from a process that has imported what a peer consists of.

Hundreds of processes of the suite import torch and `peer`, which takes each of them seconds of processor time.
`executable` is a program that stands in for the interpreter: it hands its command, its open files, its limits and its
environment to a server, which forks a process that does the rest; signals go there, and its exit code comes back. There
are two servers: one has imported the libraries alone, the other one, forked from it, `peer` as well. Who would find
another release, on PYTHONPATH or in the working directory, or other kernels, is forked from the first.

What a forked process cannot do is left to the interpreter: other options and users, preloaded libraries, and variables
that Python reads before it begins. Tests of imports and of starts use the interpreter.
"""

from __future__ import annotations

# Few: the program that stands in imports them each time. What only the server needs is imported there.
import json
import os
import resource
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LIBRARIES = """
    torch._dynamo torch.distributed numpy google.protobuf.message pydantic cryptography.x509 click rich.console
    safetensors.torch tomlkit xxhash zstandard
"""
OF_PEER = "peer.cli.fork_server peer.ops.local_cluster peer.ops.export peer.simulate.run peer.lab.study.folder"
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOM_FOR_COMMAND_LINE = " " * 1024
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TAKEN_OVER = {
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONBREAKPOINT",  # Ray sets it.
}
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_MOST_FILES = 253
_MOST_BYTES = 1 << 17
_LOOKS_FOR_PARENT_S = 0.5
_set_by_imports: dict[str, str] = {}
"""Variables that the imports of the server have set: those of a forked process would set them again."""


class WarmPython:
    """The server, and the program that stands in for the interpreter. It imports nothing before it is first used."""

    def __init__(self, folder: Path, below: WarmPython | None = None) -> None:
        """`below`: one that has the libraries. This one is forked from it, has `peer` as well, and hands on to it
        whoever would find another one."""
        self.address, self.executable = str(folder / "socket"), folder / "python"
        plain = self if below is None else below
        ours = (sys.executable, "-IS", __file__, "client", self.address, sys.executable, plain.address)
        # Beside it, for a PATH: the command of the package.
        for program, words in ((self.executable, shlex.join(ours)), (folder / "sotto", f"{self.executable} -m peer")):
            program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            program.chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._server = subprocess.Popen(
            [
                *(sys.executable if below is None else str(below.executable), "-P", __file__, "server", self.address),
                *(str(self.executable), LIBRARIES if below is None else OF_PEER, _ROOM_FOR_COMMAND_LINE),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | environment,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"listens\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, and all that it has forked."""
        assert self._server.stdin is not None
        # It does not close while a process that a test has forked holds it, so the end is also said.
        os.write(self._server.stdin.fileno(), b"end")
        self._server.stdin.close()
        self._server.wait()


# -- the program that stands in ----------------------------------------------------------------------------------------


def be_client(address: str, interpreter: str, plain: str, words: list[str]) -> None:
    """Have a server do what these words ask the interpreter for, and end as that does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address if _finds_peer_here(words) else plain)
    if not _can_be_forked(words, connection):
        os.execv(interpreter, [interpreter, *words])
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number)]
    parent = os.getppid()
    apart = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _namespaces_apart(_server_of(connection)[0])]
    order = {
        "words": words,
        "files": numbers,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "parent": parent,
        "limits": [[kind, *resource.getrlimit(kind)] for kind in _LIMITS],
        "ignored": [number for number in _FORWARDED if signal.getsignal(number) == signal.SIG_IGN],
        "umask": os.umask(0),
    }
    socket.send_fds(connection, [json.dumps(order).encode()], [*numbers, *apart])
    # Those too that are ignored, as by what a shell has in the background: the process may come to take them.
    for each in _FORWARDED:
        signal.signal(each, lambda number, frame: connection.send(bytes([number])) and None)
    for number in (*numbers, *apart):
        os.close(number)
    while not select.select([connection], [], [], _LOOKS_FOR_PARENT_S if "SOTTO_PARENT" in os.environ else None)[0]:
        if os.getppid() != parent:
            os._exit(1)
    code = int(connection.recv(64) or b"255")
    if code < 0:
        if -code in _FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _finds_peer_here(words: list[str]) -> bool:
    """Whether the interpreter would import `peer` from this repository, with the kernels that are built for it."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "-P" not in words and "PYTHONSAFEPATH" not in os.environ:
        script = next((word for word in words if word != "-u"), "-")
        folders.insert(0, os.getcwd() if script.startswith("-") else os.path.dirname(os.path.realpath(script)))
    found = (each for folder in filter(None, folders) if os.path.exists(each := os.path.join(folder, "peer")))
    ours = os.path.join(_HERE, "peer")
    return os.path.samefile(next(found, ours), ours) and "SOTTOVOCE_NATIVE" not in os.environ


def _can_be_forked(words: list[str], connection: socket.socket) -> bool:
    """Whether a process that is forked here would be what the interpreter would become."""
    words = [word for word in words if word not in ("-u", "-P")]
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")) or os.path.isdir(words[0]):
        return False
    early = {name for name in os.environ if name.startswith("PYTHON")} - _TAKEN_OVER
    server, user = _server_of(connection)
    return (
        not early
        and "LD_PRELOAD" not in os.environ
        and user == os.getuid()
        and os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{server}/ns/user")
    )


def _server_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user of the server."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def _namespaces_apart(server: int) -> list[str]:
    """Return in which namespaces this process is and the server is not: a network comes with files of its own."""
    kinds = ("net", "mnt")
    return [kind for kind in kinds if os.readlink(f"/proc/self/ns/{kind}") != os.readlink(f"/proc/{server}/ns/{kind}")]


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


# -- the server --------------------------------------------------------------------------------------------------------


def serve(address: str, libraries: list[str]) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for every connection, and report how each ended, until the standard input closes.

    Returns twice and more: in every forked process with what it is to do and its files, and at last here with None.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("listens", flush=True)
    # A forked process takes them when it is ready, and loses none.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, socket.socket] = {}
    """The process → who asked for it."""
    is_warm = False
    while True:
        waits: list[Any] = [0, woken, listener, *running.values()]
        readable, _, _ = select.select(waits, [], [])
        if 0 in readable:
            for process in running:
                os.kill(process, signal.SIGKILL)
            return None
        if woken in readable:
            os.read(woken, 4096)
        # Once more: who kills one and starts another finds that one gone, and what it held.
        heard, _, _ = select.select(list(running.values()), [], [], 0.0)
        for process, client in list(running.items()):
            is_killed = False
            if client in heard:
                said = _received(client, 1)
                is_killed = not said
                os.kill(process, said[0] if said else signal.SIGKILL)
            ended, status = os.waitpid(process, 0 if is_killed else os.WNOHANG)
            if ended:
                _send(client, str(os.waitstatus_to_exitcode(status)).encode())
                running.pop(process).close()
        if listener in readable:
            client, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(client, _MOST_BYTES, _MOST_FILES)
            if not message:
                client.close()  # It went to the interpreter.
                continue
            if not is_warm:
                warm(libraries)
                is_warm = True
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (listener, client, *running.values()):
                    each.close()
                os.close(woken)
                os.close(wake)
                return json.loads(message), files
            running[process] = client
            for file in files:
                os.close(file)


def warm(libraries: list[str]) -> None:
    """Import the libraries, and let no collection of garbage write to what they are."""
    import gc
    import importlib

    before = {*os.environ}
    for name in libraries:
        importlib.import_module(name)
    _set_by_imports.update({name: os.environ[name] for name in os.environ.keys() - before})
    gc.collect()
    gc.freeze()


def _received(client: socket.socket, most: int) -> bytes:
    try:
        return client.recv(most)
    except ConnectionResetError:
        return b""


def _send(client: socket.socket, said: bytes) -> None:
    import contextlib

    with contextlib.suppress(OSError):
        client.send(said)


# -- a forked process --------------------------------------------------------------------------------------------------


def become(order: dict[str, Any], files: list[int], executable: str) -> None:
    """Be what the interpreter would be that was given this order."""
    os.setsid()
    many = len(order["files"])
    _enter(files[many:])
    _take_files(dict(zip(order["files"], files[:many], strict=True)))
    os.chdir(order["folder"])
    os.umask(order["umask"])
    for kind, soft, hard in order["limits"]:
        resource.setrlimit(kind, (soft, hard))
    for number in _FORWARDED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else usual)
    environment = _set_by_imports | order["environment"]
    if environment.get("SOTTO_PARENT") == str(order["parent"]):
        environment["SOTTO_PARENT"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(environment)

    words = order["words"]
    is_unbuffered, is_safe = "PYTHONUNBUFFERED" in environment, "PYTHONSAFEPATH" in environment
    while words[0] in ("-u", "-P"):
        is_unbuffered, is_safe = is_unbuffered or words[0] == "-u", is_safe or words[0] == "-P"
        words = words[1:]
    _open_streams(is_unbuffered)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    sys.executable = executable
    import numpy as np

    np.random.seed()
    kind = words[0] if words[0] in ("-m", "-c") else ""
    first = "" if kind == "-c" else order["folder"] if kind else os.path.dirname(os.path.realpath(words[0]))
    more = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*[first] * (not is_safe), *more, *sys.path]
    sys.argv = [kind, *words[2:]] if kind else words
    os._exit(_ended(kind, words[1] if kind else words[0]))


def _ended(kind: str, what: str) -> int:
    """Run a module, a text or a file to its end and return the exit code. What the process has from the server is not
    taken apart: each page of it would be copied first."""
    import atexit
    import threading

    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        _run(kind, what)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and end.code is not code:
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # As the interpreter does at its end: pools of threads are told, and threads that are no daemons waited for.
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code & 0xFF


def _enter(namespaces: list[int]) -> None:
    """Go where the program is that stands in, as with `ip netns exec`."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for file in namespaces:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "a forked process cannot go to the namespace of its program")
        os.close(file)


def _take_files(received: dict[int, int]) -> None:
    """Give files the numbers that they had: number → file."""
    import fcntl

    above = max([*received, *received.values(), 2]) + 1
    apart = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in received.items()}
    for file in received.values():
        os.close(file)
    for number in {0, 1, 2} - received.keys():
        os.close(number)
    for number, file in apart.items():
        os.dup2(file, number)
        os.close(file)


def _open_streams(is_unbuffered: bool) -> None:
    import io

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        former = getattr(sys, name)
        try:
            raw = open(number, "wb" if number else "rb", buffering=0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115 - it stays open
        except OSError:
            stream = None
        else:
            stream = io.TextIOWrapper(
                raw,
                encoding=former.encoding,
                errors=former.errors,
                line_buffering=number == 2 or os.isatty(number),
                write_through=is_unbuffered,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(kind: str, what: str) -> None:
    import builtins
    import runpy
    import types

    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    role, address, given, what, *rest = sys.argv[1:]
    if role == "client":
        be_client(address, given, what, rest)
    elif (begun := serve(address, what.split())) is not None:
        become(*begun, given)
