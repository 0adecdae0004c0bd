"""Looks at a run again and again: asks its peers, reads their files, and puts both together.

A peer that answers is believed about itself. A silent one is known by the answers of others, and by its folder where
that lies here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer.config import options as configuration
from peer.config.options import OWN_LOOP, Config
from peer.errors import ConfigError, SecurityError, SottoError, StateError
from peer.files import instead_of
from peer.foreign_text import printable
from peer.ops import collect, standing
from peer.ops.collect import Member
from peer.ops.releases import mixed, versions_of
from peer.records import ACCURACY, Criterion, RoundRecord
from peer.report.limit_lines import limits_nearly_reached, limits_reached
from peer.report.run_data import read_frame
from peer.run.plan import build_schedule
from peer.state.metrics import EvaluationRecord, Summary
from peer.watch.edges import Edges, planned
from peer.watch.figures import Figures, MetricsFiles, compared_by
from peer.watch.snapshot import EdgeView, PeerView, Snapshot


class Observer:
    """The run, simulation, cluster or peer that `sotto watch` shows."""

    def __init__(self, kind: str, members: Sequence[Member], directory: Path | None) -> None:
        """`kind` is as in Snapshot; `directory` has the metrics on this machine, if any."""
        self.kind, self.members, self._directory = kind, list(members), directory
        self.figures = Figures()
        folders = {member.name: member.base / "log.txt" for member in members if member.has_kit}
        self.logs = Logs(folders if kind == "run" else {})
        self._files = None if directory is None else MetricsFiles(directory, self.figures)
        self._known = {} if kind != "cluster" or directory is None else collect.read_known(directory)
        self._edges = Edges()
        self._waited: dict[int, tuple[int, frozenset[str]]] = {}
        """Peer → its round at the last look, and the peers that it waited for then."""
        self._criteria: list[Criterion] = []
        self._schedule: list[tuple[int, int]] | None = None
        self._summary: Summary | None = None
        self._config: Config | None = members[0].config if members else None

    async def look(self) -> Snapshot:
        """Return the run as it is now. Figures that cannot be asked or read are left open."""
        limit = asyncio.Semaphore(collect.AT_ONCE)
        await asyncio.gather(*(collect.ask_status(member, limit) for member in self.members))
        if self.kind != "peer":
            newcomers = collect.newcomers_of(self._directory or Path(), self.members)
            await asyncio.gather(*(collect.ask_status(newcomer, limit) for newcomer in newcomers))
            self.members += newcomers
        await asyncio.to_thread(self._read)
        if self.kind in ("cluster", "peer"):
            await asyncio.gather(*(self._fetch(member, limit) for member in self.members))
        return self._snapshot(time.time())

    def member(self, name: str) -> Member | None:
        """Return the peer of that name."""
        return next((member for member in self.members if member.name == name), None)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _fetch(self, member: Member, limit: asyncio.Semaphore) -> None:
        """Ask a peer for the next page of its rounds and evaluations. The page after it is for the next look."""
        if member.answer is None:
            return
        async with limit:
            try:
                for table, after in (
                    ("rounds", self.figures.of(member.index).round),
                    ("evaluations", self.figures.of(member.index).evaluated),
                ):
                    records, _ = await collect.fetch_page(member, self.members, table, after)
                    self._take(records, member.index)
            except SecurityError:
                pass  # Metrics are for the operator and the peer itself; the status says the rest.
            except SottoError as error:
                member.problem = getattr(error, "problem", None) or str(error)

    def _take(self, records: Sequence[Any], peer: int) -> None:
        rounds = [each for each in records if isinstance(each, RoundRecord)]
        self.figures.put_rounds(
            [(r.peer, r.round, r.time_s, r.loss, r.payload_bytes, r.frame_bytes, r.wait_s) for r in rounds]
        )
        self.figures.put_evaluations(
            each for each in records if isinstance(each, EvaluationRecord) and each.peer == peer
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the files on this machine; takes as long as the disk does."""
        if self._files is not None:
            self._files.read()
        self.logs.read()
        collect.find_standings(self.members, self._known)
        if self._directory is not None:
            self._read_frame(self._directory)

    def _read_frame(self, directory: Path) -> None:
        frame = read_frame(directory)
        self._summary = None if self.kind == "cluster" else frame.summary
        if frame.summary is not None:
            self._criteria = frame.summary.all_criteria
        # A training script decides on the rounds, which are known with the first of them.
        is_known = self._config is not None and (self.figures.latest or self._config.training.task != OWN_LOOP)
        if not is_known and (directory / "config.toml").exists():
            try:
                self._config = configuration.load(directory / "config.toml", environment={})
            except ConfigError:
                return
        if self.kind == "simulation" and self._schedule is None and self._config is not None and self.figures.latest:
            peers = max(self.figures.latest) + 1
            try:
                matrices = build_schedule(self._config, directory, peers).matrices
            except ConfigError:
                matrices = ()  # Its file is elsewhere.
            self._schedule = sorted(
                {(sender, peer) for matrix in matrices for peer in range(peers) for sender in matrix.senders(peer)}
            )

    # -- putting together ----------------------------------------------------------------------------------------------

    def _snapshot(self, at: float) -> Snapshot:
        answers = {each.index: each.answer for each in self.members if each.answer is not None}
        if (criteria := collect.criteria_of(answers.values())) is not None:
            self._criteria = [Criterion(name, better) for name, better in criteria.items()]
        criterion = compared_by(self.figures, self._criteria)
        peers = self._simulated(criterion) if self.kind == "simulation" else self._asked(answers, criterion)
        states = {peer.index: peer.state for peer in peers}
        summary = self._summary
        return Snapshot(
            name=printable(self._name(answers)),
            kind=self.kind,
            at=at,
            rounds=self._config.run.rounds if self._config is not None else summary.rounds if summary else None,
            criterion=criterion or ACCURACY,
            peers=peers,
            edges=self._look_at_edges(answers, states),
            averaged_figure=self.figures.average.figures.get((criterion or ACCURACY).name),
            consensus_distance=self.figures.consensus_distance,
            ended=self._ended(answers),
            note=self._note(answers, criterion),
        )

    def _note(self, answers: Mapping[int, Mapping[str, Any]], criterion: Criterion | None) -> str | None:
        """Return sentences for all readers of the page."""
        mixture = mixed(versions_of(answers.values()))
        sentences = [] if mixture is None else [f"Releases are mixed: {mixture}."]
        if criterion is None:
            sentences.append("Which figure models are compared by is not known yet.")
        return " ".join(sentences) or None

    def _name(self, answers: Mapping[int, Mapping[str, Any]]) -> str:
        """Return the name of the run; for one on this machine, that of its folder, which tells several apart."""
        if self.kind in ("run", "simulation") and self._directory is not None:
            return self._summary.name if self._summary is not None else self._directory.resolve().name
        said = next((str(answer["run"]) for answer in answers.values() if "run" in answer), None)
        return said or (self._config.run.name if self._config is not None else "run")

    def _ended(self, answers: Mapping[int, Mapping[str, Any]]) -> str | None:
        """Return the end of the run, or None while it goes on: the summary is then from before it was resumed."""
        if self._summary is None or answers or self.kind not in ("run", "simulation"):
            return None
        return printable(self._summary.ended) or None

    def _simulated(self, criterion: Criterion | None) -> list[PeerView]:
        names = self._summary.peer_names if self._summary is not None else []
        rounds = None if self._config is None else self._config.run.rounds
        ended = self._summary is not None and bool(self._summary.ended)
        return [
            PeerView(
                index=peer,
                name=printable(names[peer]) if peer < len(names) else f"peer-{peer}",
                state="finished"
                if rounds is not None and latest.round + 1 >= rounds
                else "stopped"
                if ended
                else "running",
                round=latest.round + 1,
                loss=latest.loss,
                figure=None if criterion is None else latest.figures.get(criterion.name),
                payload_bytes=latest.payload_bytes,
                rate=latest.rate(),
                wait_share=latest.wait_share(),
            )
            for peer, latest in sorted(self.figures.latest.items())
        ]

    def _asked(self, answers: Mapping[int, Mapping[str, Any]], criterion: Criterion | None) -> list[PeerView]:
        indices = self._indices(answers)
        views = {member.index: self._view(member, indices, criterion) for member in self.members}
        for index, name in sorted((index, name) for name, index in indices.items() if index not in views):
            views[index] = self._view(self._neighbor(index, name, answers), indices, criterion)
        return [self._heard(views[index], answers) for index in sorted(views)]

    def _indices(self, answers: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
        """Return the numbers of all peers that are known, by name."""
        indices = {member.name: member.index for member in self.members}
        if self._config is not None:
            indices = {peer.name: index for index, peer in enumerate(self._config.peers)} | indices
        return indices

    def _view(self, member: Member, indices: Mapping[str, int], criterion: Criterion | None) -> PeerView:
        """Return a peer by its own answer, those of others and the figures that are known."""
        latest, answer = self.figures.of(member.index), member.answer
        has_begun = latest.round >= 0
        # For a connected peer, the reason why it cannot be asked matters.
        settled = None if member.standing is None or member.standing.state == "connected" else member.standing.sentence
        view = PeerView(
            index=member.index,
            name=printable(member.name),
            state=self._silent_state(member),
            problem=printable(settled or member.problem or "") or None,
            round=latest.round + 1 if has_begun else None,
            loss=latest.loss,
            figure=None if criterion is None else latest.figures.get(criterion.name),
            payload_bytes=latest.payload_bytes if has_begun else None,
        )
        if answer is None:
            return view
        state, _, reason = answer["state"].partition(": ")
        budget = answer.get("budget_kbytes_per_s")
        own = answer.get("accuracy")
        if criterion != ACCURACY:
            own = answer.get("metrics", {}).get(criterion and criterion.name)
        return replace(
            view,
            state={"completed": "finished"}.get(state, state),
            problem=printable(reason or member.problem or "") or None,
            round=answer["round"],
            loss=answer.get("loss"),
            figure=own if own is not None else view.figure,
            payload_bytes=answer["payload_bytes"],
            rate=latest.rate(),
            budget=None if budget is None else 1000 * budget,
            waits_for=tuple(indices[name] for name in self._still_awaited(member.index, answer) if name in indices),
            wait_share=latest.wait_share(),
            limits=tuple(map(printable, limits_reached(answer))),
            warnings=tuple(map(printable, limits_nearly_reached(answer))),
        )

    def _still_awaited(self, peer: int, answer: Mapping[str, Any]) -> list[str]:
        """Return the peers awaited since the last look: in a run with rounds, a peer waits for a moment in each."""
        round_, before = self._waited.get(peer, (-1, frozenset()))
        names = answer.get("waiting_for", ())
        self._waited[peer] = answer["round"], frozenset(names)
        return [name for name in names if name in before] if round_ == answer["round"] else []

    def _silent_state(self, member: Member) -> str:
        """Return the state of a peer that does not answer."""
        if member.standing is not None:
            return member.standing.state
        if self.kind == "run":
            if self._summary is not None and self._summary.ended:
                return "stopped"
            if self.figures.of(member.index).round < 0:
                return "starting"
        return "unreachable"

    def _neighbor(self, index: int, name: str, answers: Mapping[int, Mapping[str, Any]]) -> Member:
        """Return a peer that is not asked itself, as others know it."""
        own, found = self.members[0], standing.from_answers(name, answers.values())
        problem = None if found is None else found.sentence
        return replace(own, index=index, name=name, has_kit=False, answer=None, problem=problem, standing=found)

    def _heard(self, view: PeerView, answers: Mapping[int, Mapping[str, Any]]) -> PeerView:
        """Return a peer that does not answer as diverged, if others say that it is."""
        if view.state not in ("unreachable", "connected"):
            return view
        for answer in answers.values():
            for claim in answer.get("diverged", []):
                if claim["name"] == view.name:
                    problem = printable(f"{claim['reason']}, says {claim['told_by']}")
                    return replace(view, state="diverged", problem=problem)
        return view

    def _look_at_edges(self, answers: Mapping[int, Mapping[str, Any]], states: Mapping[int, str]) -> list[EdgeView]:
        if self.kind == "simulation":
            over = all(state != "running" for state in states.values())
            return planned(self._schedule or (), "over" if over else "up")
        indices = self._indices(answers)
        links = {
            peer: {indices[name]: link for name, link in answer["links"].items() if name in indices}
            for peer, answer in answers.items()
        }
        return self._edges.look(links, {peer: answer["seconds"] for peer, answer in answers.items()}, states)


def open_observer(place: Path) -> Observer:
    """Return the observer of a run folder, a cluster folder, or the peer of a configuration file or device folder.
    Raises ConfigError, and StateError if it is none of them."""
    if place.is_file():
        return _of_peer(place)
    if not place.is_dir():
        raise StateError(f"{place}: no such folder; name that of a run, device or cluster{instead_of(place)}")
    if collect.is_cluster(place):
        return Observer("cluster", collect.members_of(place), place)
    if collect.is_cluster(place / "peers"):
        return Observer("run", collect.members_of(place / "peers"), place)
    if (place / "peer.toml").exists():
        return _of_peer(place / "peer.toml")
    if (place / "metrics.sqlite").exists() or (place / "config.toml").exists():
        return Observer("simulation", [], place)
    raise StateError(f"{place}: is no run folder, cluster folder or device folder")


def _of_peer(file: Path) -> Observer:
    config = configuration.load_device(file)
    index = config.peer.index
    member = Member(index, config.peers[index].name, config, file.parent, index, file.parent / "collected")
    return Observer("peer", [member], None)


MOST_LINES = 200
_FIRST_BYTES = 4096
_MOST_BYTES = 65_536
"""Most bytes of one log in one look; a log that grows faster is read at its end."""


class Logs:
    """Reads additions to some files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files` are by name of the peer."""
        self._files = files
        self._places: dict[str, int] = {}
        self.lines: deque[tuple[str, str]] = deque(maxlen=MOST_LINES)
        """(peer, line), the newest last."""

    def read(self) -> None:
        """Take the lines that were added since the last call."""
        for name, file in self._files.items():
            with contextlib.suppress(OSError), open(file, "rb") as opened:
                size = opened.seek(0, 2)
                place = self._places.get(name)
                if place is None or place > size:  # The first look; or somebody made it shorter.
                    place = max(0, size - _FIRST_BYTES)
                cut = max(place, size - _MOST_BYTES)
                opened.seek(cut)
                whole, newline, _ = opened.read(size - cut).rpartition(b"\n")
                self._places[name] = cut + len(whole) + len(newline)
                lines = whole.decode(errors="replace").splitlines() if newline else []
                self.lines.extend((name, printable(line)) for line in lines if line.strip())
