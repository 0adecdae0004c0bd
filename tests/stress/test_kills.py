"""Ten kills of real processes; `make kills` does a thousand."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from peer.ops.peer_processes import ForkServer
from tests.stress import kills


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["quant-sgp", "low-rank", "compressed-allreduce"])
def test_ten_kills_at_random_instants_change_no_bit(tmp_path: Path, fork_server: ForkServer, algorithm: str) -> None:
    # Rounds last long enough for kills to come within them, and cost no more.
    arguments = argparse.Namespace(
        kills=10, peers=4, rounds=100, seed=3, cold=False, set=["peer.slow_down=30", "state.checkpoint_every_rounds=10"]
    )
    print(f"seed {arguments.seed}")
    row = kills.measure(algorithm, arguments, tmp_path, fork_server)
    assert row.identical, row
    assert row.kills == 10
    # A peer that has done its rounds stays for the others, and may be killed then, too.
    assert sum(0 < kill.at_round < 100 for kill in row.plan) > 5


def test_who_is_killed_when_is_a_function_of_the_seed() -> None:
    one, same, other = (kills.plan(seed, 200, 8, 400) for seed in (1, 1, 2))
    assert one == same != other
    assert {kill.peer for kill in one} == set(range(8))
    assert sum(kill.after_round is None for kill in one) > 20
