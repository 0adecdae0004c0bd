"""The budget of memory: bytes a parameter, by algorithm, as docs/planning.md has them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from peer.ops.profile import FRUGAL
from tests.library.scripts import write_kits
from tests.run.memory_of_peers import LARGE, SMALL

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", **FRUGAL}
ROOM = 1.5
"""Bytes a parameter more than the budget that may be due to layers under way, pages and libraries. A copy of the model
takes 4."""

measures = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not os.access("/proc/self/clear_refs", os.W_OK),
    reason="memory that is freed has to go back to the kernel, and the peak of a process to begin anew",
)


def budget_of_scripts() -> dict[str, float]:
    """Return algorithm → what a script holds at most beyond its own loop."""
    rows = re.findall(
        r"^\| `([a-z-]+)`( in bfloat16|) \| ([\d.]+) \| [^|\d]", (ROOT / "docs/planning.md").read_text(), re.MULTILINE
    )
    return {name + memory: float(most) for name, memory, most in rows}


def budget() -> dict[str, tuple[float, float]]:
    """Return algorithm → what the table says that a peer holds, and for how much more a round has room."""
    rows = re.findall(
        r"^\| `([a-z-]+)` \| ([\d.]+) \| ([\d.]+) \|", (ROOT / "docs/planning.md").read_text(), re.MULTILINE
    )
    return {name: (float(held), float(more)) for name, held, more in rows}


@measures
def test_peers_keep_to_the_budget(tmp_path: Path) -> None:
    table = budget()
    assert table.keys() >= {"quant-sgp", "sparse-push", "low-rank", "allreduce", "sgp"}
    measured = subprocess.run(
        [sys.executable, "-m", "tests.run.memory_of_peers", str(tmp_path), *table],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)
    for name, (held, more) in table.items():
        figures = found[name]
        # With push-sum weights, z = x / u is a vector of its own while it is used.
        z = 4.0 if name == "sparse-push" else 0.0
        most = {"held": held, "round": more, "save": 0.0, "evaluate": z, "write": z, "resume": held}
        above = {what: figure for what, figure in figures.items() if figure > most[what] + ROOM}
        assert not above, f"{name} takes more bytes a parameter than {most}: {above}"


def write_pair(folder: Path, algorithm: str, name: str) -> list[str]:
    """Return the configurations of two peers that train for a few rounds, with a checkpoint and an evaluation amid."""
    settings = ("run.rounds=4", "state.checkpoint_every_rounds=2", "evaluation.every_rounds=2", "graph.kind=complete")
    plain = algorithm.removesuffix(" in bfloat16")
    chosen = [f"algorithm.name={plain}", *(["compressor.fraction=0.01"] if plain == "quant-sgp" else [])]
    if algorithm != plain:
        chosen.append("algorithm.memory=bfloat16")
    return [str(file) for file in write_kits(folder / name, 2, *settings, *chosen)]


def start(arguments: Sequence[str], *, late_s: float = 0.0, group: Path | None = None) -> subprocess.Popen[str]:
    """Start the script, in a cgroup where one is given."""
    command = [sys.executable, "-m", "tests.run.memory_of_script", str(late_s), *arguments]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"', "sh", str(group), *command]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@measures
@pytest.mark.parametrize(
    "algorithm",
    [
        *("quant-sgp", "low-rank", "compressed-allreduce", "allreduce"),
        *("quant-sgp in bfloat16", "compressed-allreduce in bfloat16"),
    ],
)
def test_scripts_keep_to_the_budget(tmp_path: Path, algorithm: str) -> None:
    # What is imported and made once has to be there.
    small, large = (write_pair(tmp_path, algorithm, name) for name in ("small", "large"))
    processes = [start([str(SMALL), one, str(LARGE), other]) for one, other in zip(small, large, strict=True)]
    for process in processes:
        printed, problems = process.communicate()
        assert process.returncode == 0, problems
        _, (size, alone, most, _) = json.loads(printed)
        assert (most - alone) / size <= budget_of_scripts()[algorithm] + ROOM
