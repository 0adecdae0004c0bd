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

import numpy as np
import pytest

from peer.state.checkpoints import Checkpoints
from peer.state.disk import Disk
from peer.state.journal import Stepped, read_journal
from tests.library.scripts import Outcome, as_file, as_process, outcomes

_UNTIL_EXCHANGED = 10
"""Steps after which a script with `every=3` has its second round in the journal, also if it goes on meanwhile. The
first may be there as 0.2.0 reads it, without what the loop does behind the exchange."""
_BEYOND = 15
"""Steps by which it gets further each time before it is killed again: what it repeats is behind it by then."""

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports the compiler of torch, which takes as long as all else.
_context.set_forkserver_preload(["tests.library.scripts", "torch._dynamo"])


def start(script: str, file: Path, **options: Any) -> ForkServerProcess:
    """Start a script of `scripts` with the configuration `file`, in the folder of that."""
    # One that is no daemon may have workers of a loader.
    process = _context.Process(
        target=as_process, args=(script, file, options), daemon=script not in ("with_workers", "of_this_year")
    )
    process.start()
    return process


def start_file(script: Path, file: Path) -> ForkServerProcess:
    """Start a script file with the configuration `file`."""
    process = _context.Process(target=as_file, args=(script, file), daemon=True)
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
    """Kill a process with SIGKILL at random, `kills` times, each in the midst of its training, and start it again. By
    then it has exchanged, however slow this machine is."""
    numbers, reached = random.Random(seed), dict.fromkeys(files, 0)
    for kill in range(kills):
        index, starts = kill % len(files), kill // len(files) + 1
        while len(starts_of(files[index])) < starts:
            assert processes[index].is_alive(), (files[index].parent / "log.txt").read_text()
            time.sleep(0.05)
        while (
            _steps_since_the_start(files[index]) < _UNTIL_EXCHANGED or last_step(files[index]) < reached[files[index]]
        ):
            assert processes[index].is_alive(), (files[index].parent / "log.txt").read_text()
            time.sleep(0.05)
        time.sleep(numbers.uniform(0.1, 0.6))
        assert processes[index].is_alive(), "it was over before it could be killed: give it more rounds"
        processes[index].kill()
        processes[index].join()
        reached[files[index]] = last_step(files[index]) + _BEYOND
        processes[index] = start(script, files[index], **options)


def _steps_since_the_start(file: Path) -> int:
    return (file.parent / "log.txt").read_text().rpartition("begins at step")[2].count("has done step")


def last_step(file: Path) -> int:
    """Return the step that a script has done last, in any of its processes."""
    return int((file.parent / "log.txt").read_text().rpartition("has done step ")[2].partition("\n")[0] or 0)


def starts_of(file: Path) -> list[int]:
    """Return with how many steps behind it a script began, each time."""
    log = file.parent / "log.txt"
    return [int(step) for step in re.findall(r"begins at step (\d+)", log.read_text())] if log.exists() else []


def check_mass(files: Sequence[Path], rounds: int) -> None:
    """Check that every displacement was journaled once, and that all of them, and nothing else, moved the sum of all
    x: for runs that keep all their journals, and whose last messages have arrived."""
    expected, found, weight = 0.0, 0.0, 0.0
    for file in files:
        disk = Disk(file.parent / "state")
        names = sorted(name for name in disk.names() if name.startswith("journal-"))
        steps = [each for name in names for each in read_journal(disk, name).records if isinstance(each, Stepped)]
        assert [step.round for step in steps] == list(range(rounds))
        checkpoints = Checkpoints(disk)
        first, last = checkpoints.load(0).arrays, checkpoints.load(rounds).arrays
        moved = sum(step.arrays["step/displacement"].astype(np.float64) for step in steps)
        expected = expected + first["algorithm/x"] - moved
        found = found + last["algorithm/x"].astype(np.float64)
        weight += float(last["algorithm/u"][0])
    assert weight == pytest.approx(len(files), abs=1e-12)
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)
