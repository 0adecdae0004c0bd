"""Peers that continue when a run on this machine is resumed, also with another number of peers.

A run folder holds the folder of every peer that ever took part. Those of peers that left stay where they are; new
peers are signed by the run's own CA, as a device would be.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.config.options import Config
from peer.errors import ConfigError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.ops.enrollment import REQUEST_FILE, add_unsigned, admit, propose, request
from peer.run.plan import why_no_changes
from peer.state.checkpoints import find_checkpoints, load_checkpoint


@dataclass(frozen=True)
class Lineup:
    """The peers of a run that goes on, by their numbers."""

    staying: tuple[int, ...]
    leaving: tuple[int, ...]
    joining: tuple[int, ...]
    """Newcomers without a folder so far."""

    @property
    def started(self) -> tuple[int, ...]:
        """Those that run, ascending."""
        return tuple(sorted((*self.staying, *self.leaving, *self.joining)))


def line_up(peers: Path, config: Config, wanted: int | None) -> Lineup:
    """Return the peers that go on in the folder of a run's peers, so that `wanted` of them (by default all that are
    there) are left. The newest leave first. Raises ConfigError if the members of this run cannot change."""
    numbers = sorted(int(file.parent.name.removeprefix("peer-")) for file in peers.glob("peer-*/peer.toml"))
    changes, last_round = _changes([peers / f"peer-{number}" / config.state.directory for number in numbers])
    # A device that was lost may have come back, under another number.
    numbering = Numbering(config.num_listed)
    newest = {numbering.device(each.subject): each for each in changes}
    ended = {device: each.effective for device, each in newest.items() if each.kind is not ChangeKind.JOIN}
    there = [number for number in numbers if number not in ended]
    wanted = len(there) if wanted is None else wanted
    if wanted != len(there) and (why := why_no_changes(config)) is not None:
        raise ConfigError(f"differs from the number of peers of this run, but {why}", key="--peers", value=wanted)
    # A peer that nobody has let in yet need not be started to leave; one that is about to leave has to.
    known = {*range(config.num_listed), *newest}
    leaving = {number for number in there[wanted:] if number in known}
    leaving |= {number for number, effective in ended.items() if effective > last_round}
    new = range(numbers[-1] + 1, numbers[-1] + 1 + wanted - len(there))
    return Lineup(tuple(there[:wanted]), tuple(sorted(leaving)), tuple(new))


def add_peers(peers: Path, numbers: Sequence[int], ports: Sequence[int], *, signed: bool) -> None:
    """Make the folders of peers that join, which listen on these ports of this machine, with certificates of the run's
    own CA if they are to be `signed`. Raises SottoError."""
    for number, port in zip(numbers, ports, strict=True):
        folder, name, address = peers / f"peer-{number}", f"peer-{number}", f"127.0.0.1:{port}"
        if folder.exists():
            shutil.rmtree(folder)  # Left by an attempt that was cut off: it has no peer.toml yet.
        if not signed:
            add_unsigned(peers, name, address)
            continue
        request(folder, name, address, port)
        admit(peers, propose(peers, (folder / REQUEST_FILE).read_bytes()))
        (folder / REQUEST_FILE).unlink()


def _changes(states: Sequence[Path]) -> tuple[Sequence[Change], int]:
    """Return the changes of the members in the newest checkpoints, and the last round of any of them."""
    found, last_round = Membership(()), 0
    for state in states:
        for file in find_checkpoints(state)[-1:]:
            checkpoint = load_checkpoint(file)
            found.restore(checkpoint.state.get("members", []))
            last_round = max(last_round, checkpoint.round)
    return found.changes, last_round
