"""Metrics of a cluster's peers, brought together on the operator's machine for one report.

Running peers are asked for the rows of their metrics that are not here yet; for others, rows of an earlier call or of a
state folder that was copied back are used. None of this is state: the folder `collected` may be deleted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from peer.config import options as configuration
from peer.config.options import Config, PeerAddress
from peer.errors import RemoteProtocolError, SottoError, StateError
from peer.files import make_own_folder, write_whole
from peer.ops import control, standing
from peer.ops.standing import Standing
from peer.records import Better, RoundRecord
from peer.state.disk import private_files, writing
from peer.state.foreign_files import read_as
from peer.state.metrics import PAGED, EvaluationRecord, LinkRecord, MetricsStore, page_records

FOLDER = "collected"
AT_ONCE = 16
"""Calls under way at the same time."""
_FETCH_S = 300.0
"""Longest time for one peer, which may hand over its rows slowly."""
_KNOWN = "peers.json"


@dataclass
class Member:
    """One peer of a cluster, as far as it is known here."""

    index: int
    name: str
    config: Config
    """Its own configuration, or that of a peer whose list it is in."""
    base: Path
    entry: int | PeerAddress
    """Index or address under which it is asked."""
    collected: Path
    """File of its collected metrics."""
    has_kit: bool = True
    answer: Mapping[str, Any] | None = None
    problem: str | None = None
    """Why it did not answer."""
    standing: Standing | None = None

    @property
    def metrics(self) -> Path | None:
        """The metrics file with most of its rounds: the collected one, or that of a state folder that was copied
        back."""
        files = [self.collected]
        if self.has_kit:
            files.append(self.base / self.config.state.directory / "metrics.sqlite")
        present = [file for file in files if file.exists()]
        return max(present, key=lambda file: standing.recorded(file, self.index), default=None)

    @property
    def recorded(self) -> int:
        """Number of its rounds whose figures are here."""
        return 0 if self.metrics is None else standing.recorded(self.metrics, self.index)

    @property
    def state(self) -> str:
        """Its activity, or its end."""
        if self.answer is not None:
            return str(self.answer.get("state"))
        return "unreachable" if self.standing is None else self.standing.state


def is_cluster(directory: Path) -> bool:
    """Return whether a folder is that of a cluster: kits of devices, and not the folder of a run."""
    return any(directory.glob("peer-*/peer.toml"))


def collect(directory: Path, *, ask: bool = True) -> list[Member]:
    """Bring the metrics of all peers of a cluster into its folder; return their standings.

    With `ask`, the peers are asked; otherwise only what is on disk counts. Raises ConfigError for kits that are none,
    StateError if the folder cannot be written.
    """
    members = members_of(directory)
    with private_files(), writing(FOLDER):
        make_own_folder(directory / FOLDER)
        if ask:
            members += asyncio.run(_ask(directory, members))
        _settle(directory, members)
    return members


def members_of(directory: Path) -> list[Member]:
    """Return the peers of a cluster folder, as its kits list them. Raises ConfigError for kits that are none."""
    members: dict[int, Member] = {}
    for file in sorted(directory.glob("peer-*/peer.toml")):
        # The environment speaks for a peer that runs here.
        config = standing.with_length(configuration.load_device(file, environment={}), file.parent)
        index = config.peer.index
        members[index] = Member(index, config.peers[index].name, config, file.parent, index, _file(directory, index))
    first = next(iter(members.values()))
    for index, entry in enumerate(first.config.peers):
        if index not in members:
            file = _file(directory, index)
            members[index] = Member(index, entry.name, first.config, first.base, index, file, has_kit=False)
    return [members[index] for index in sorted(members)]


async def _ask(directory: Path, members: Sequence[Member]) -> list[Member]:
    """Ask all peers for their status, and for the rows that are not here; return those that no file here lists."""
    limit = asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(ask_status(member, limit) for member in members))
    newcomers = newcomers_of(directory, members)
    await asyncio.gather(*(ask_status(newcomer, limit) for newcomer in newcomers))
    known = [*members, *newcomers]
    await asyncio.gather(*(_fetch(member, known, limit) for member in known if member.answer is not None))
    return newcomers


async def ask_status(member: Member, limit: asyncio.Semaphore) -> None:
    """Ask a peer for its status. `limit`: of calls under way at the same time."""
    member.answer = None
    async with limit:
        try:
            member.answer = await control.ask(member.config, member.base, member.entry, "status")
            member.problem = member.standing = None
        except SottoError as error:
            member.problem = getattr(error, "problem", None) or str(error)


async def _fetch(member: Member, known: Sequence[Member], limit: asyncio.Semaphore) -> None:
    assert member.answer is not None
    with closing(MetricsStore(member.collected)) as store:
        try:
            # A peer that was put back to an earlier round repeats those after it.
            store.drop_after(member.answer["round"] - 1)
            async with limit, asyncio.timeout(_FETCH_S):
                for table in PAGED:
                    after: int | None = -1 if table == "links" else store.last_round(member.index, table)
                    while after is not None:
                        records, last = await fetch_page(member, known, table, after)
                        store.put(*records)
                        if last is not None and last <= after:
                            raise RemoteProtocolError("sent pages that do not go on")
                        after = last
        except TimeoutError:
            member.problem = f"it takes more than {_FETCH_S:g} s to hand over its figures"
        except SottoError as error:
            member.problem = getattr(error, "problem", None) or str(error)


async def fetch_page(
    member: Member, known: Sequence[Member], table: str, after: int
) -> tuple[list[RoundRecord | EvaluationRecord | LinkRecord], int | None]:
    """Return the next page of a peer's metrics, rows of rounds above `after`, and the round after which there are more.

    Raises SottoError, and RemoteProtocolError for impossible rows. Rows about unknown peers are left out.
    """
    arguments = {"table": table, "after": after}
    page = await control.ask(member.config, member.base, member.entry, "metrics", arguments)
    records = page_records(table, page["columns"], page["rows"], peer=member.index, rounds=_rounds(known))
    numbers = {each.index for each in known}
    about = [(record, {record.peer, getattr(record, "neighbor", record.peer)}) for record in records]
    return [record for record, peers in about if peers <= numbers], page["last"]


def _rounds(members: Sequence[Member]) -> int:
    """Return how many rounds the run has: those of the list here, or what most of the peers that answer say, which may
    have been told to go on for longer."""
    said = [rounds for each in members if each.answer and (rounds := each.answer.get("rounds")) is not None]
    return max(members[0].config.run.rounds, median_low(said) if said else 0)


def criteria_of(answers: Iterable[Mapping[str, Any]]) -> dict[str, Better] | None:
    """Return the figures of the task, as most peers say; None where nobody says any."""
    said = Counter(tuple(answer["criteria"].items()) for answer in answers if answer.get("criteria"))
    return dict(said.most_common(1)[0][0]) if said else None


def newcomers_of(directory: Path, members: Sequence[Member]) -> list[Member]:
    """Return the peers that running ones know and no file here lists."""
    names, found = {each.name for each in members}, {each.index: each for each in members}
    for member in members:
        if member.answer is not None:
            for index, entry in control.newcomers(member.config, member.base, member.answer).items():
                if index not in found and entry.name not in names:
                    names.add(entry.name)
                    file = _file(directory, index)
                    found[index] = Member(index, entry.name, member.config, member.base, entry, file, has_kit=False)
    return [each for each in found.values() if each not in members]


def find_standings(members: Sequence[Member], known: Mapping[str, Standing]) -> None:
    """Find the standings of peers that did not answer, unless known and final. `known`: what was known at earlier
    times, by name."""
    answers = [member.answer for member in members if member.answer is not None]
    kits = [member for member in members if member.has_kit]
    for member in members:
        settled = member.standing is not None and member.standing.state in standing.FINAL
        if member.answer is None and not settled:
            member.standing = (
                standing.from_answers(member.name, answers)
                or (standing.from_folder(member.config, member.base) if member.has_kit else None)
                or standing.from_metrics(member.collected, member.config, member.index)
                or next(
                    filter(None, (standing.from_average(each.config, each.base, member.index) for each in kits)), None
                )
                or known.get(member.name)
            )


def read_known(directory: Path) -> dict[str, Standing]:
    """Return the final standings of a cluster's peers when they were last asked."""
    try:
        return read_as(dict[str, Standing], directory / FOLDER / _KNOWN)
    except (OSError, StateError):
        return {}  # The first time; or somebody else wrote the file.


def _settle(directory: Path, members: Sequence[Member]) -> None:
    """Find the standings of peers that did not answer, and keep final ones for the next time."""
    find_standings(members, read_known(directory))
    final = ((each.name, each.standing) for each in members if each.standing is not None)
    kept = {name: asdict(each) for name, each in final if each.state in standing.FINAL}
    write_whole(directory / FOLDER / _KNOWN, json.dumps(kept, indent=1) + "\n")


def _file(directory: Path, index: int) -> Path:
    return directory / FOLDER / f"peer-{index}.sqlite"
