"""Scripts in processes of their own, which start at once: forked from a process that has the libraries loaded."""

from __future__ import annotations

import multiprocessing
import random
import re
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.own_loop.scripts import Outcome, as_process, outcomes

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.own_loop.scripts"])


def start(script: str, file: Path, **options: Any) -> ForkServerProcess:
    """Start a script of `scripts` with the configuration `file`."""
    process = _context.Process(target=as_process, args=(script, file, options), daemon=True)
    process.start()
    return process


def finish(files: Sequence[Path], processes: Sequence[ForkServerProcess], timeout_s: float = 240.0) -> list[Outcome]:
    """Return what scripts came to, once all have ended as they should."""
    deadline = time.monotonic() + timeout_s
    for file, process in zip(files, processes, strict=True):
        process.join(max(0.0, deadline - time.monotonic()))
        log = (file.parent / "log.txt").read_text()
        assert process.exitcode == 0, f"{file.parent.name} ended with {process.exitcode}:\n{log[-3000:]}"
    return list(outcomes(list(files)))


def kill_now_and_then(
    script: str, files: Sequence[Path], processes: list[ForkServerProcess], *, kills: int, seed: int, **options: Any
) -> None:
    """Kill a process with SIGKILL at random, `kills` times, each in the midst of its training, and start it again."""
    numbers = random.Random(seed)
    for kill in range(kills):
        index, starts = kill % len(files), kill // len(files) + 1
        while len(starts_of(files[index])) < starts:
            assert processes[index].is_alive(), (files[index].parent / "log.txt").read_text()
            time.sleep(0.05)
        time.sleep(numbers.uniform(0.1, 0.6))
        assert processes[index].is_alive(), "it was over before it could be killed: give it more rounds"
        processes[index].kill()
        processes[index].join()
        processes[index] = start(script, files[index], **options)


def starts_of(file: Path) -> list[int]:
    """Return with how many steps behind it a script began, each time."""
    log = file.parent / "log.txt"
    return [int(step) for step in re.findall(r"begins at step (\d+)", log.read_text())] if log.exists() else []
