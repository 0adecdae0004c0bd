"""When a checkpoint is taken."""

from __future__ import annotations

from peer.config.options import StateOptions
from peer.daemon.checkpoint_cadence import CheckpointCadence


def due(cadence: CheckpointCadence, rounds: range, journal_bytes: int = 0) -> list[int]:
    return [done for done in rounds if cadence.is_due(done, journal_bytes)]


def test_regular_rounds_and_the_last_one() -> None:
    cadence = CheckpointCadence(StateOptions(checkpoint_every_rounds=20), rounds=50)
    assert due(cadence, range(1, 51)) == [20, 40, 50]
    assert [cadence.last_common_round(done) for done in (0, 19, 20, 39, 50)] == [0, 0, 20, 20, 40]


def test_without_regular_ones_only_the_last_and_nothing_in_common_before_it() -> None:
    cadence = CheckpointCadence(StateOptions(checkpoint_every_rounds=0), rounds=50)
    assert due(cadence, range(1, 51)) == [50]
    assert [cadence.last_common_round(done) for done in (7, 49)] == [0, 0]


def test_a_snapshot_is_taken_once() -> None:
    cadence = CheckpointCadence(StateOptions(checkpoint_every_rounds=0), rounds=50)
    cadence.snapshot_wanted = True
    assert cadence.is_due(7, 0)
    cadence.saved()
    assert not cadence.is_due(8, 0)


def test_a_journal_that_is_long_or_slow_to_repeat_is_cut_short() -> None:
    cadence = CheckpointCadence(StateOptions(checkpoint_every_rounds=0, journal_mbytes=1, recover_within_s=2.0), 50)
    assert not cadence.is_due(7, 1 << 20)
    assert cadence.is_due(7, (1 << 20) + 1)
    cadence.add_round(1.5)
    assert not cadence.is_due(7, 0)
    cadence.add_round(0.6)
    assert cadence.is_due(8, 0)
    cadence.saved()
    assert not cadence.is_due(9, 0)
