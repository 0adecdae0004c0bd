"""When a checkpoint is taken."""

from __future__ import annotations

import pytest

from peer.config.options import StateOptions, load
from peer.daemon.checkpoint_cadence import CheckpointCadence, regular_interval


def due(cadence: CheckpointCadence, rounds: range, journal_bytes: int = 0) -> list[int]:
    return [done for done in rounds if cadence.is_due(done, journal_bytes)]


def test_regular_rounds_and_the_last_one() -> None:
    cadence = CheckpointCadence(StateOptions(), rounds=50, every=20)
    assert due(cadence, range(1, 51)) == [20, 40, 50]
    assert [cadence.last_common_round(done) for done in (0, 19, 20, 39, 50)] == [0, 0, 20, 20, 40]
    assert [done for done in range(1, 51) if cadence.is_foreseen(done)] == [20, 40, 50]


def test_without_regular_ones_only_the_last_and_nothing_in_common_before_it() -> None:
    cadence = CheckpointCadence(StateOptions(), rounds=50, every=0)
    assert due(cadence, range(1, 51)) == [50]
    assert [cadence.last_common_round(done) for done in (7, 49)] == [0, 0]


def test_a_snapshot_is_taken_once() -> None:
    cadence = CheckpointCadence(StateOptions(), rounds=50, every=0)
    cadence.snapshot_wanted = True
    assert cadence.is_due(7, 0)
    assert cadence.is_foreseen(8), "a script whose state was not noted is asked for that of the next round"
    cadence.saved()
    assert not cadence.is_due(8, 0)


def test_a_journal_that_is_long_or_slow_to_repeat_is_cut_short() -> None:
    cadence = CheckpointCadence(StateOptions(journal_mbytes=1, recover_within_s=2.0), 50, 0)
    assert not cadence.is_due(7, 1 << 20)
    assert cadence.is_due(7, (1 << 20) + 1)
    cadence.add_round(1.5)
    assert not cadence.is_due(7, 0)
    cadence.add_round(0.6)
    assert cadence.is_due(8, 0)
    cadence.saved()
    assert not cadence.is_due(9, 0)


def test_the_journal_of_a_script_grows_no_heavier_than_its_checkpoint() -> None:
    cadence = CheckpointCadence(StateOptions(), rounds=50, every=0)
    assert not cadence.is_due(7, 5 << 20, checkpoint_bytes=5 << 20)
    assert cadence.is_due(7, (5 << 20) + 1, checkpoint_bytes=5 << 20)
    assert not cadence.is_due(7, 1 << 20, checkpoint_bytes=1000), "frames of a small model are worth none"


@pytest.mark.parametrize(
    ("repeats", "local_steps", "every", "expected"),
    [
        (None, 3, None, 100),
        (1000, 1, None, 16),
        (1000, 3, None, 6),
        (16_000_000, 20, None, 1),
        (16_000_001, 20, None, 13),
        (1000, 3, 4, 4),
        (None, 3, 0, 0),
    ],
)
def test_a_script_repeats_few_steps(repeats: int | None, local_steps: int, every: int | None, expected: int) -> None:
    settings = [f"training.local_steps={local_steps}"]
    settings += [] if every is None else [f"state.checkpoint_every_rounds={every}"]
    assert regular_interval(load(environment={}, overrides=settings), repeats) == expected
