"""A cluster on this machine whose peers start at once: forked from a process that has the libraries loaded.

Each peer is a process of its own with the command line that it has under `sotto up`, and can be killed like any other;
only the three seconds of CPU that Python takes to import torch are spent once instead of at every start. So a thousand
kills take minutes, and the time until a peer is back is what comes beyond the start of its process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from peer.ops.local_cluster import Cluster, peer_environment

_LIBRARIES = ["__main__", "peer.cli", "peer.daemon.process"]


class ForkedProcess:
    """One process, with the methods of `subprocess.Popen` that a cluster uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("sotto run", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedCluster(Cluster):
    """A cluster whose processes are forked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_LIBRARIES)
        before = dict(os.environ)
        os.environ.update(peer_environment())
        try:
            # Some of it counts only where it is there before Python starts.
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def start_peer(self, index: int) -> subprocess.Popen[bytes]:
        file = self.peer_files[index]
        process = self._context.Process(target=_run_peer, args=(file,), daemon=True)
        process.start()
        started = cast("subprocess.Popen[bytes]", ForkedProcess(process))
        if index < len(self.processes):
            self.processes[index] = started
        else:
            self.processes.append(started)
        return started


def _run_peer(file: Path) -> None:
    """Be `sotto run --config FILE`."""
    log = os.open(file.parent / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The process that forks ends with the one that asked it to.
    os.environ["SOTTO_PARENT"] = str(os.getppid())
    sys.argv = ["sotto", "run", "--config", str(file)]
    from peer.cli import main

    main()
