"""Measures what joining, leaving and losing a peer costs in accuracy, beside runs that nobody disturbed.

    python -m tools.membership_study                        all cases: digits, skew 0.8, eight peers, three seeds
    python -m tools.membership_study --only sparse-push --seeds 0 --json

Each run is a simulation of production participants, whose changes of members go through the same announcements, frames
and hand-overs as those of real peers. In the middle of the run

- `leave`: peer 3 leaves and hands over what it has; beside it the run in which it stays,
- `join`: a ninth entry of the list joins the eight, with a share of the data of its own; beside it the run in which it
  is there from the beginning,
- `loss`: peer 3 is gone without a word, its neighbours are told and go on without it; beside it a run in which its data
  has no part from that round on (it takes no further step, but hears and tells).

The figure is the accuracy of the worst peer at the end, in percent, and the difference in points. Rows are appended to
--results as they are done, so that the command can be stopped and started again at will.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from peer.config.options import Config, load
from peer.gossip.effects import Effects
from peer.gossip.membership import ChangeKind
from peer.lab.study.checkout import commit
from peer.node.membership_planning import plan_change
from peer.node.participant import Participant
from peer.run.setup import RunSetup
from peer.simulate.network import Agenda, LinkModel, VirtualNetwork
from peer.simulate.virtual_run import Arrival, Event, StepDone
from peer.train.threads import use_one_thread
from tools.grid import Lines, Row

PEERS = 8
SUBJECT = 3
CASES = ("undisturbed", "leave", "loss", "without-data", "nine", "join")
BESIDE = {"leave": "undisturbed", "loss": "without-data", "join": "nine"}
ALGORITHMS = {
    "sparse-push": ("algorithm.name=sparse-push", "graph.kind=exponential"),
    "quant-sgp": ("algorithm.name=quant-sgp", "graph.kind=exponential"),
    "choco-sgd": ("algorithm.name=choco-sgd", "graph.kind=ring"),
}
LINK = LinkModel(rate_kbit_s=100_000.0, latency_s=0.001)
STEP_S = 0.01


class ChangingRun:
    """A run of participants on a virtual clock with a change to one peer in the middle."""

    def __init__(self, config: Config, case: str) -> None:
        use_one_thread()
        self.now = 0.0
        self._rounds, self._case = config.run.rounds, case
        self._dead: set[int] = set()
        self._unreceived: dict[int, list[bytes]] = {}
        """Peer → its frames that the dead one never got."""
        self._agenda: Agenda[Event] = Agenda()
        self._network = VirtualNetwork(LINK)
        num_peers = PEERS + (case in ("join", "nine"))
        setup = RunSetup.open(config, Path(), num_peers)
        self._trainers = [setup.trainer(peer) for peer in range(num_peers)]
        layout, x0 = self._trainers[0].layout, self._trainers[0].initial_vector()
        self.participants = [setup.participant(peer, each, layout, x0) for peer, each in enumerate(self._trainers)]

    def run_to_end(self) -> float:
        """Return the accuracy of the worst member at the end."""
        for participant in self.participants:
            if participant.membership.is_member:
                self._plan_step(participant)
        self._run_until_idle()
        if self._dead and SUBJECT not in self.participants[0].session.lost:
            # All wait for the lost peer by now: the operator tells one of those who hear it.
            issuer = next(p for p in self._living() if p.session.last_heard(SUBJECT) is not None)
            self._announce(issuer, ChangeKind.LOST, SUBJECT)
            self._run_until_idle()
        members = [participant for participant in self._living() if participant.membership.is_member]
        assert all(participant.round == self._rounds for participant in members)
        return min(self._accuracy(participant) for participant in members)

    def _run_until_idle(self) -> None:
        while self._agenda:
            self.now, event = self._agenda.pop()
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Arrival):
            if event.receiver in self._dead:
                self._unreceived.setdefault(event.sender, []).append(event.frame)
            else:
                participant = self.participants[event.receiver]
                self._take(participant, participant.receive(event.sender, event.frame, self.now))
        elif event.peer not in self._dead:
            participant = self.participants[event.peer]
            participant.step()
            self._take(participant, participant.begin(self.now))

    def _take(self, participant: Participant, effects: Effects) -> None:
        sizes = [(outgoing.receiver, len(outgoing.frame)) for outgoing in effects.frames]
        arrivals = self._network.arrivals(participant.peer, sizes, self.now)
        for outgoing, arrival in zip(effects.frames, arrivals, strict=True):
            self._agenda.add(arrival, Arrival(outgoing.receiver, participant.peer, outgoing.frame))
        if effects.news:
            for lost in participant.membership.to_lose:
                frames = self._unreceived.pop(participant.peer, [])
                self._take(participant, participant.lose(lost, frames, self.now))
        if effects.finished is not None:
            self._after_round(participant)

    def _after_round(self, participant: Participant) -> None:
        if participant.round == self._rounds // 2:
            self._let_it_happen(participant)
        if participant.round < self._rounds and participant.membership.is_member and participant.peer not in self._dead:
            self._plan_step(participant)

    def _let_it_happen(self, participant: Participant) -> None:
        if self._case == "leave" and participant.peer == SUBJECT:
            self._announce(participant, ChangeKind.LEAVE, SUBJECT)
        elif self._case == "join" and participant.peer == 0:
            self._announce(participant, ChangeKind.JOIN, PEERS)
        elif self._case == "loss" and participant.peer == SUBJECT:
            self._dead.add(SUBJECT)
        elif self._case == "without-data" and participant.peer == SUBJECT:
            participant.algorithm.wants_gradient = lambda t: False  # type: ignore[method-assign]

    def _plan_step(self, participant: Participant) -> None:
        self._agenda.add(self.now + STEP_S, StepDone(participant.peer))

    def _announce(self, issuer: Participant, kind: ChangeKind, subject: int) -> None:
        self._take(issuer, issuer.learn(plan_change(issuer.membership, kind, subject), self.now))

    def _accuracy(self, participant: Participant) -> float:
        return 100.0 * self._trainers[participant.peer].evaluate(participant.model()).accuracy

    def _living(self) -> list[Participant]:
        return [participant for participant in self.participants if participant.peer not in self._dead]


@dataclass(frozen=True)
class Cell:
    """One run."""

    algorithm: str
    case: str
    seed: int
    rounds: int


def _cell_of(row: Row) -> Cell:
    """Return the run that a row tells of."""
    return Cell(*(row[field.name] for field in fields(Cell)))


def configuration(algorithm: str, case: str, seed: int, rounds: int) -> Config:
    """Return the configuration of one run."""
    overrides = [
        *ALGORITHMS[algorithm],
        f"run.seed={seed}",
        f"run.rounds={rounds}",
        "data.skew=0.8",
        "training.precision=float32",
        "evaluation.every_rounds=0",
    ]
    config = load(environment={}, overrides=overrides)
    if case != "join":
        return config
    peers = [{"name": f"peer-{peer}", "joins_later": peer == PEERS} for peer in range(PEERS + 1)]
    return Config.model_validate({**config.model_dump(), "peers": peers})


def table(rows: Sequence[Row], rounds: int) -> list[dict[str, Any]]:
    """Return, for each algorithm and change, the means of both runs over the seeds measured."""
    worst = {(r["algorithm"], r["case"], r["seed"]): r["worst"] for r in rows if r["rounds"] == rounds}
    lines = []
    for algorithm in ALGORITHMS:
        for case, beside in BESIDE.items():
            seeds = [s for a, c, s in worst if (a, c) == (algorithm, case) and (algorithm, beside, s) in worst]
            if seeds:
                changed = sum(worst[algorithm, case, seed] for seed in seeds) / len(seeds)
                unchanged = sum(worst[algorithm, beside, seed] for seed in seeds) / len(seeds)
                lines.append(
                    {
                        "algorithm": algorithm,
                        "change": case,
                        "seeds": len(seeds),
                        "worst": round(changed, 2),
                        "beside": beside,
                        "worst_beside": round(unchanged, 2),
                        "points": round(changed - unchanged, 2),
                    }
                )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(ALGORITHMS), default=["sparse-push", "quant-sgp"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=Path("membership_study.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print what there is")
    parser.add_argument("--json", action="store_true")
    settings = parser.parse_args()
    chosen = itertools.product(settings.only, settings.seeds, CASES)
    cells = [Cell(algorithm, case, seed, settings.rounds) for algorithm, seed, case in chosen]
    grid = Lines(cells, settings.results, lambda cell: cell, _cell_of)
    for cell in [] if settings.table else grid.missing():
        worst = ChangingRun(configuration(*astuple(cell)), cell.case).run_to_end()
        grid.put(cell, {**asdict(cell), "commit": commit(), "worst": worst})
        print(f"{cell.algorithm} {cell.case}, seed {cell.seed}: {worst:.2f} %", file=sys.stderr, flush=True)
    found = table(grid.kept, settings.rounds)
    if settings.json:
        print(json.dumps(found, indent=2))
    else:
        for line in found:
            print(
                f"{line['algorithm']:12} {line['change']:6} {line['worst']:6.2f} %  {line['beside']:12} "
                f"{line['worst_beside']:6.2f} %  {line['points']:+.2f} points ({line['seeds']} seeds)"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
