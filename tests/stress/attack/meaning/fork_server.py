"""A process that has everything imported, and becomes a peer by forking: on a busy machine most of a start is imports.

Run by the Python of an installation, with its folder on PYTHONPATH, as a script: it needs nothing of this repository.
Each line of its input starts a process: {"call": "module:function", "arguments": [...], "argv": [...], "log": FILE}.
Each line of its output is a process that started, {"started": pid}, or ended, {"ended": pid, "code": code}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys

_WARM = ("torch", "grpc", "peer.cli", "peer.daemon.process")


def become(order: dict[str, object]) -> None:
    """Do what an order says, in a process of its own; end with its exit code."""
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    code = 1
    try:
        argv, arguments = order["argv"], order["arguments"]
        assert isinstance(argv, list)
        assert isinstance(arguments, list)
        sys.argv = [str(each) for each in argv]
        os.environ["SOTTO_PARENT"] = str(os.getppid())
        module, _, function = str(order["call"]).partition(":")
        code = getattr(importlib.import_module(module), function)(*arguments) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve until the input ends; then kill what still runs."""
    for name in _WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    children: set[int] = set()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    while True:
        if select.select([0], [], [], 0.05)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            pid = os.fork()
            if pid == 0:
                become(json.loads(line))
            children.add(pid)
            print(json.dumps({"started": pid}), flush=True)
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.discard(pid)
                print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
