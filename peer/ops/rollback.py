"""Put stopped peers back to an earlier checkpoint. Nothing is deleted: their state since then is set aside by renaming.

A run goes on only if all its peers are of the same round or know each other's journals, so that all are put back to the
same round: by `sotto up`, which has all of them, or by the operator, device by device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from peer.errors import StateError
from peer.state.checkpoints import StateFolder
from peer.state.recovery import StateFiles
from peer.train.private_step import SECRET_FILE


def put_back(directories: Sequence[Path], round_: int) -> None:
    """Set aside the contents of these state folders after the checkpoint of a round; 0 stands for the start.

    Raises StateError, before anything is renamed, if a peer uses one of them, one has no such checkpoint, or local
    steps are private.
    """
    with _locked(directories) as folders:
        for folder in folders:
            rounds = _rounds(folder)
            if round_ not in rounds:
                known = ", ".join(map(str, rounds))
                raise StateError(f"{folder.directory}: has no checkpoint of round {round_}; it can go back to {known}")
            if SECRET_FILE in folder.disk.names():
                raise StateError(
                    f"{folder.directory}: its local steps are private, and [privacy] would not count those that are"
                    " done again; begin a new run"
                )
        for folder in folders:
            StateFiles(folder.disk, {}, keep=len(_rounds(folder)), regular=0).go_back(round_)


def newest_common_round(directories: Sequence[Path], at_most: int) -> int:
    """Return the newest round up to `at_most` of which each of these state folders has a checkpoint; 0, the start, is
    one. Raises StateError."""
    with _locked(directories) as folders:
        return max(set(range(at_most + 1)).intersection(*map(_rounds, folders)))


@contextmanager
def _locked(directories: Sequence[Path]) -> Iterator[list[StateFolder]]:
    """Keep peers from starting in these folders meanwhile."""
    with ExitStack() as stack:
        folders = []
        for directory in directories:
            if not directory.is_dir():
                raise StateError(f"{directory}: no such state folder")
            folders.append(stack.enter_context(closing(StateFolder(directory))))
        yield folders


def _rounds(folder: StateFolder) -> list[int]:
    return sorted({0, *folder.checkpoints.rounds()})
