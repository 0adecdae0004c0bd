"""State folders of runs that have begun."""

from __future__ import annotations

from peer.state.disk import Disk
from peer.state.journal import Begun
from peer.state.recovery import StateFiles


def begin(disk: Disk, round_: int = 0) -> None:
    """Write a journal after the checkpoint of a round, with the begin of the next one."""
    journal = StateFiles(disk, {"run": "r"}, keep=1, regular=0).new_journal(round_)
    journal.append(Begun(0.0, round_))
    journal.close()
