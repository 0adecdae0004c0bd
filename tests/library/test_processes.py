"""Scripts in processes of their own: what they come to is what the simulation of them does, killed or not."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sottovoce

from tests.library import scripts
from tests.library.processes import finish, kill_now_and_then, start, starts_of
from tests.library.scripts import write_kits

SEED = int(os.environ.get("SOTTO_TEST_SEED", "1"))
"""Of the times at which processes are killed."""


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param(("algorithm.name=sgp",), {}, id="sgp"),
        pytest.param(("algorithm.name=quant-sgp",), {"overlap": True}, id="quant-sgp, overlapping"),
        pytest.param(
            ("algorithm.name=choco-sgd", "graph.kind=ring"),
            {"outer_momentum": 0.5, "outer_learning_rate": 0.7},
            id="choco-sgd, outer momentum",
        ),
    ],
)
def test_processes_and_the_simulation_agree_bit_for_bit(
    tmp_path: Path, settings: tuple[str, ...], options: dict[str, Any]
) -> None:
    files = write_kits(tmp_path, 3, "run.rounds=12", *settings)
    real = finish(files, [start("adamw", file, **options) for file in files])
    simulated = sottovoce.simulate(partial(scripts.adamw, **options), files[0])
    assert real == list(simulated.results)
    assert {outcome.steps for outcome in real} == {36}
    assert len({outcome.digest for outcome in real}) == 3


@pytest.mark.parametrize(("option", "every"), [(None, 4), ("overlap", 16), ("in_8_bits", 1), ("in_16_bits", 4)])
def test_killed_scripts_go_on_with_the_same_bits(tmp_path: Path, option: str | None, every: int) -> None:
    options: dict[str, Any] = {option: True} if option else {}
    settings = ("run.rounds=150", "algorithm.name=quant-sgp", f"state.checkpoint_every_rounds={every}")
    files = write_kits(tmp_path, 2, *settings)
    processes = [start("adamw_slowly", file, **options) for file in files]
    kill_now_and_then("adamw_slowly", files, processes, kills=4, seed=SEED, **options)
    real = finish(files, processes)
    assert all(len(starts) == 3 for starts in map(starts_of, files))
    assert all("another result" not in (file.parent / "log.txt").read_text() for file in files)
    simulated = sottovoce.simulate(partial(scripts.adamw, **options), files[0])
    assert real == list(simulated.results)


def test_workers_that_outlive_a_killed_script_hold_nothing_of_it(tmp_path: Path) -> None:
    """Workers of a loader notice within five seconds that the script is gone. Until then they have what was open when
    they were forked: the lock on the state folder, and the port."""
    (file,) = write_kits(tmp_path, 1, "run.rounds=60", "algorithm.name=local", "graph.kind=complete")
    killed = start("with_workers", file)
    while len(starts_of(file)) < 5:
        assert killed.is_alive(), (file.parent / "log.txt").read_text()
        time.sleep(0.05)
    killed.kill()
    killed.join()
    (outcome,) = finish([file], [start("with_workers", file)])
    assert outcome.round == 60


def test_devices_train_on_all_samples_that_they_have(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 2, "run.rounds=10", "algorithm.name=sgp")
    found = finish(files, [start("all_of_its_own", file) for file in files])
    assert [(outcome.samples, outcome.steps, outcome.round) for outcome in found] == [(100, 70, 10), (700, 70, 10)]


def test_no_displacement_is_applied_twice(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 3, "run.rounds=50", "algorithm.name=sgp", "graph.kind=exponential")
    processes = [start("adamw_by_index", file, pause_s=0.02) for file in files]
    kill_now_and_then("adamw_by_index", files, processes, kills=5, seed=SEED, pause_s=0.02)
    real = finish(files, processes)
    assert real == list(sottovoce.simulate(scripts.adamw_by_index, files[0]).results)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["diffusion", "contrast", "values"])
def test_ten_kills_of_scripts_of_this_year_change_no_bit(tmp_path: Path, kind: str) -> None:
    """With a moving average, a momentum encoder and a queue, a target network and a replay buffer; each of four devices
    has two workers that read its data."""
    files = write_kits(
        tmp_path, 4, "run.rounds=70", "algorithm.name=sgp", "graph.kind=ring", "state.checkpoint_every_rounds=7"
    )
    processes = [start("of_this_year", file, kind=kind, pause_s=0.05) for file in files]
    kill_now_and_then("of_this_year", files, processes, kills=10, seed=SEED, kind=kind, pause_s=0.05)
    real = finish(files, processes, timeout_s=600)
    assert sum(len(starts_of(file)) for file in files) == 14
    assert real == list(sottovoce.simulate(partial(scripts.of_this_year, kind=kind), files[0]).results)
