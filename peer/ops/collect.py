"""What the peers of a cluster have measured, brought together on the operator's machine for one report.

Running peers are asked for the rows of their metrics that are not here yet; of others there is what an earlier call
brought, or a state folder that was copied back. Nothing of it is state: the folder `collected` may be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer import config as configuration
from peer.config import Config, PeerAddress
from peer.errors import RemoteProtocolError, SecurityError, SottoError
from peer.ops import control, standing
from peer.ops.standing import Standing
from peer.own_files import make_own_folder, write_whole
from peer.state.disk import private_files, writing
from peer.state.metrics import PAGED, MetricsStore

FOLDER = "collected"
_KNOWN = "peers.json"


@dataclass
class Member:
    """One peer of a cluster, as far as it is known here."""

    index: int
    name: str
    config: Config
    """Its own, or that of a peer whose list it is in."""
    base: Path
    entry: int | PeerAddress
    """How it is asked."""
    collected: Path
    """Where what it was asked for is kept."""
    has_kit: bool = True
    answer: Mapping[str, Any] | None = None
    problem: str | None = None
    """Why it did not answer."""
    standing: Standing | None = None

    @property
    def metrics(self) -> Path | None:
        """The metrics file that has most rounds of it: what was collected, or a state folder that was copied back."""
        files = [self.collected]
        if self.has_kit:
            files.append(self.base / self.config.state.directory / "metrics.sqlite")
        present = [file for file in files if file.exists()]
        return max(present, key=lambda file: standing.recorded(file, self.index), default=None)

    @property
    def recorded(self) -> int:
        """Of how many rounds its figures are here."""
        return 0 if self.metrics is None else standing.recorded(self.metrics, self.index)

    @property
    def state(self) -> str:
        """What it does, or what became of it."""
        if self.answer is not None:
            return str(self.answer.get("state"))
        return "unreachable" if self.standing is None else self.standing.state


def is_cluster(directory: Path) -> bool:
    """Return whether a folder is that of a cluster: kits of devices, and not the folder of a run."""
    return any(directory.glob("peer-*/peer.toml"))


def collect(directory: Path, *, ask: bool = True) -> list[Member]:
    """Bring the metrics of all peers of a cluster into its folder; return what each of them is.

    With `ask`, the peers are asked; otherwise only what is on disk counts. Raises ConfigError for kits that are none,
    StateError if the folder cannot be written.
    """
    members = members_of(directory)
    with private_files(), writing(FOLDER):
        make_own_folder(directory / FOLDER)
        for member in members if ask else ():
            _ask(member)
        if ask:
            newcomers = newcomers_of(directory, members)
            for newcomer in newcomers:
                _ask(newcomer)
            members += newcomers
        _settle(directory, members)
    return members


def members_of(directory: Path) -> list[Member]:
    """Return the peers of a cluster folder, as its kits list them. Raises ConfigError for kits that are none."""
    members: dict[int, Member] = {}
    for file in sorted(directory.glob("peer-*/peer.toml")):
        # The environment speaks for a peer that runs here.
        config = configuration.load(file, environment={})
        index = config.peer.index
        members[index] = Member(index, config.peers[index].name, config, file.parent, index, _file(directory, index))
    first = next(iter(members.values()))
    for index, entry in enumerate(first.config.peers):
        if index not in members:
            file = _file(directory, index)
            members[index] = Member(index, entry.name, first.config, first.base, index, file, has_kit=False)
    return [members[index] for index in sorted(members)]


def _ask(member: Member) -> None:
    """Ask a peer for its status, and for the rows that are not here."""
    try:
        member.answer = control.call(member.config, member.base, member.entry, "status")
        _fetch(member)
    except SecurityError as error:
        member.problem = str(error)
    except SottoError as error:
        member.problem = getattr(error, "problem", None) or str(error)


def _fetch(member: Member) -> None:
    assert member.answer is not None
    store = MetricsStore(member.collected)
    try:
        # A peer that was put back to an earlier round repeats those after it.
        store.drop_after(int(member.answer["round"]) - 1)
        for table in PAGED:
            after: int | None = -1 if table == "links" else store.last_round(member.index, table)
            while after is not None:
                arguments = {"table": table, "after": after}
                page = control.call(member.config, member.base, member.entry, "metrics", arguments)
                after = _put_page(store, table, page, member.index, after)
            store.flush()
    finally:
        store.close()


def _put_page(store: MetricsStore, table: str, page: Mapping[str, Any], peer: int, after: int) -> int | None:
    """Keep a page of rows; return after which round the next one begins, if there is one. Raises RemoteProtocolError
    for what no peer answers."""
    columns, rows, last = (page.get(key) for key in ("columns", "rows", "last"))
    if not isinstance(columns, list) or not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise RemoteProtocolError("sent metrics that are no table")
    if last is not None and (not isinstance(last, int) or last <= after):
        raise RemoteProtocolError("sent pages that do not go on")
    store.put_page(table, columns, rows, peer=peer)
    return last


def newcomers_of(directory: Path, members: Sequence[Member]) -> list[Member]:
    """Return the peers that running ones know and no file here lists."""
    known = {each.index for each in members}
    found: dict[int, Member] = {}
    for member in [each for each in members if each.answer is not None]:
        assert member.answer is not None
        entries = {entry.name: entry for entry in control.newcomers(member.config, member.answer)}
        for each in member.answer.get("newcomers", []):
            index = int(each["index"])
            if each["name"] in entries and index not in known:
                entry, file = entries[each["name"]], _file(directory, index)
                found[index] = Member(index, entry.name, member.config, member.base, entry, file, has_kit=False)
    return list(found.values())


def find_standings(members: Sequence[Member], known: Mapping[str, Standing]) -> None:
    """Find out what became of the peers that did not answer, unless that is known and final. `known`: what was known
    at earlier times, by name."""
    answers = [member.answer for member in members if member.answer is not None]
    for member in members:
        settled = member.standing is not None and member.standing.state in standing.FINAL
        if member.answer is None and not settled:
            member.standing = (
                standing.from_answers(member.name, answers)
                or (standing.from_folder(member.config, member.base) if member.has_kit else None)
                or standing.from_metrics(member.collected, member.config, member.index)
                or known.get(member.name)
            )


def read_known(directory: Path) -> dict[str, Standing]:
    """Return what was final of the peers of a cluster when they were last asked."""
    try:
        content = json.loads((directory / FOLDER / _KNOWN).read_text())
        return {name: Standing(**each) for name, each in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # The first time; or somebody else wrote the file.


def _settle(directory: Path, members: Sequence[Member]) -> None:
    """Find out what became of the peers that did not answer, and keep what is final for the next time."""
    find_standings(members, read_known(directory))
    final = ((each.name, each.standing) for each in members if each.standing is not None)
    kept = {name: asdict(each) for name, each in final if each.state in standing.FINAL}
    write_whole(directory / FOLDER / _KNOWN, json.dumps(kept, indent=1) + "\n")


def _file(directory: Path, index: int) -> Path:
    return directory / FOLDER / f"peer-{index}.sqlite"
