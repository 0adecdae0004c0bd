"""Simulates very many peers of which few take part in each round, and shows how the worst of them do.

    python -m tools.participation_study                              1,000 and 10,000 peers, 1 % in each of 300 rounds
    python -m tools.participation_study --peers 100000 --models travel
    python -m tools.participation_study --fraction 0.1 --set algorithm.name=sparse-push --set compressor.kind=top_k

SGP with whole messages among the peers that are drawn, 20 samples of the task `clusters` each with label skew 0.8. Of
100 peers that are there, 10 leave in an hour, for half an hour on average; a round takes a minute of virtual time.
Beside it one process that takes as many steps with as many samples each. All models are evaluated, not a sample.

Models "stay" with their peers, or "travel": those that were drawn hand theirs over to those that are drawn next, and
keep a copy. "fetched at the end" is the same run once all peers that are there after the last round have fetched one of
the models that travelled.

Each round draws its members among the peers that are present. They train, send and mix like the members of any run,
with the same objects; the others do nothing, and keep model, push-sum weight and error memory as they are. Σx and Σu
over all peers are therefore conserved. A peer that has begun a round completes it: absence counts between rounds. The
next round begins when all members have ended theirs.

With `hand_over`, the members of a round give x and u to those of the next, and keep a copy of their model that counts
nowhere. In every round, as many models as peers are drawn travel from peer to peer and are trained: as many as with a
server that sends its newest model to all peers that it draws. Σx and Σu over the holders are conserved.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from peer import random, wire
from peer.compress.decompress import add_decompressed_
from peer.config.options import Config
from peer.errors import ConfigError, LocalProtocolError
from peer.gossip.base import Memory
from peer.gossip.boundary import TRANSFER_PHASE
from peer.gossip.mixing import whole
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.topology import Schedule
from peer.node.participant import Participant
from peer.random import Purpose
from peer.run.plan import algorithm_spec
from peer.run.setup import RunSetup
from peer.simulate.rounds import Simulator
from peer.simulate.virtual_run import StepDone
from peer.train.baseline import single_process
from peer.train.local_step import Trainer
from peer.wire.message import Message, MessageKind
from tools.grid import Program

SAMPLES_OF_A_PEER = 20
STEP_S = 60.0
PROGRAM = Program.named("participation")
HEAD = (
    "| peers | drawn in a round | never drawn | models | worst 1 % | 5 % | median | mean | averaged model "
    "| one process | kB a peer sent | MB in all | CPU, s |"
)

_DRAWN, _AWAY, _FETCHED = 0, 1, 2
"""Layers of the random numbers: the draw, the absences, and the fetches."""


def main() -> int:
    arguments = PROGRAM.parse(__doc__)
    print(HEAD)
    print(re.sub(r"[^|]+", " ---: ", HEAD))
    for peers in arguments.peers:
        samples = f"training.task_options.samples={peers * SAMPLES_OF_A_PEER}"
        config = PROGRAM.config(f"run.rounds={arguments.rounds}", *arguments.set, samples)
        for models in arguments.models:
            for row in rows(config, peers, arguments, travel=models == "travel"):
                print(row, flush=True)
    return 0


def rows(config: Config, peers: int, arguments: argparse.Namespace, *, travel: bool) -> Iterator[str]:
    """Yield the rows of one run."""
    started = time.process_time()
    availability = churn(
        peers,
        config.run.rounds * STEP_S,
        leaving_per_hour=arguments.churn,
        mean_away_s=60 * arguments.away_minutes,
        seed=config.run.seed,
    )
    run = ParticipationSimulator(
        config,
        Path(),
        num_peers=peers,
        fraction=arguments.fraction,
        availability=availability,
        step_s=STEP_S,
        hand_over=travel,
    )
    run.run()
    print(f"{peers:,} peers: {time.process_time() - started:.0f} s, evaluating", file=sys.stderr, flush=True)
    drawn = int(run.times_drawn.sum()) / config.run.rounds
    alone, _ = single_process(
        run.setup.task,
        config.training.model_copy(update={"batch_size": round(config.training.batch_size * drawn)}),
        rounds=config.run.rounds,
        seed=config.run.seed,
        device=config.peer.device,
        base=run.setup.base,
    )
    trainer = run.trainer
    assert isinstance(trainer, Trainer)
    for models in ("travel", "fetched at the end") if travel else ("stay",):
        if models == "fetched at the end":
            print(f"{run.fetch():,} of {peers:,} peers fetch a model", file=sys.stderr, flush=True)
        accuracies = np.sort([trainer.evaluate(model).accuracy for model in run.models()])
        averaged = trainer.evaluate(run.averaged_model(), averaged=True).accuracy
        figures = [
            accuracies[: max(1, peers // 100)].mean(),
            np.quantile(accuracies, 0.05),
            np.median(accuracies),
            accuracies.mean(),
            averaged,
            alone.accuracy,
        ]
        cells = [
            f"{peers:,}",
            f"{drawn:.0f}",
            f"{100 * (run.times_drawn == 0).mean():.1f} %",
            models,
            *(f"{100 * figure:.1f} %" for figure in figures),
            f"{run.frame_bytes / peers / 1e3:.1f}",
            f"{run.frame_bytes / 1e6:,.0f}",
            f"{time.process_time() - started:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Availability:
    """Absences of peers, in seconds of the virtual clock. A peer that is not named is always present."""

    away: Mapping[int, Sequence[tuple[float, float]]]
    """Peer → (from, until), ascending, apart from each other."""

    def is_there(self, peer: int, now: float) -> bool:
        """Return whether a peer can be drawn for a round that begins at that time."""
        times = self.away.get(peer, ())
        place = bisect_right(times, (now, math.inf))
        return place == 0 or now >= times[place - 1][1]


def churn(num_peers: int, length_s: float, *, leaving_per_hour: float, mean_away_s: float, seed: int) -> Availability:
    """Return the availability of peers that leave independently of each other, at a rate for each peer that is there,
    and stay away for times with an exponential distribution: no memory, and no time of day."""
    away: dict[int, list[tuple[float, float]]] = {}
    for peer in range(num_peers):
        now = 0.0
        for number in itertools.count():
            uniforms = random.stream(seed, peer, Purpose.SIMULATION, number, layer=_AWAY).uniforms(2, np.float64)
            there, gone = (-np.log1p(-uniforms)).tolist()
            start = now + there * 3600 / leaving_per_hour
            if start >= length_s:
                break
            now = start + gone * mean_away_s
            away.setdefault(peer, []).append((start, now))
    return Availability(away)


class DrawnSchedule(Schedule):
    """The matrix of the round under way: drawn peers send half of their mass to another one, 1, 2, 4, … places further
    among them, by the round; all others keep everything."""

    def __init__(self, num_peers: int) -> None:
        alone = np.arange(num_peers)
        super().__init__([MixingMatrix(num_peers, alone, alone, np.ones(num_peers))], name="drawn, one-peer")
        self.round = -1
        """The round under way."""

    def draw(self, t: int, drawn: npt.NDArray[np.int64]) -> None:
        """Let these peers, ascending, take part in round t."""
        count = drawn.size
        rest = np.setdiff1d(np.arange(self.num_peers), drawn, assume_unique=True)
        shift = 1 << t % max(1, math.ceil(math.log2(max(2, count))))
        if count < 2:
            matrix = self.matrices[0]
        else:
            half = np.full(count, 0.5)
            matrix = MixingMatrix(
                self.num_peers,
                np.concatenate([rest, drawn, drawn]),
                np.concatenate([rest, drawn, np.roll(drawn, -shift)]),
                np.concatenate([np.ones(rest.size), half, half]),
            )
        self.round, self.matrices = t, (matrix,)

    def at(self, t: int) -> MixingMatrix:
        if t != self.round:
            raise LocalProtocolError(f"round {self.round} is under way, not {t}")
        return self.matrices[0]

    def all_senders(self, peer: int) -> tuple[int, ...]:
        """Nobody: no two peers are neighbours for longer than a round."""
        return ()

    def all_receivers(self, peer: int) -> tuple[int, ...]:
        """Nobody."""
        return ()


class _DrawnSetup(RunSetup):
    """A run whose members are drawn."""

    @cached_property
    def why_no_changes(self) -> str | None:
        return "peers are drawn for each round"

    @cached_property
    def max_lead(self) -> int:
        return 0  # Nobody begins a round before all others have ended theirs.


class ParticipationSimulator(Simulator):
    """One simulated run in which a fraction of the peers takes part in each round."""

    def __init__(
        self,
        config: Config,
        base: Path,
        *,
        num_peers: int,
        fraction: float,
        availability: Availability | None = None,
        step_s: float = 0.0,
        hand_over: bool = False,
    ) -> None:
        """`fraction` is that of all peers; fewer take part while fewer are present. Raises ConfigError for an algorithm
        whose peers need lasting neighbours, and with `hand_over` for one that keeps more than x and u."""
        spec = algorithm_spec(config)
        if not spec.push_sum or spec.memory is Memory.REPLICAS or config.rounds.late != "wait":
            raise ConfigError(
                "cannot draw its members for each round", key="algorithm.name", value=spec.name,
                valid='sgp or sparse-push, with rounds.late = "wait"',
            )  # fmt: skip
        if hand_over and spec.memory is not Memory.NONE:
            raise ConfigError(
                "keeps errors that cannot be handed over", key="algorithm.name", value=spec.name, valid="sgp"
            )
        self._schedule = DrawnSchedule(num_peers)
        super().__init__(config, base, num_peers=num_peers, step_s=step_s)
        self._wanted = max(1, round(fraction * num_peers))
        self._availability = availability or Availability({})
        self._under_way = 0
        self._hand_over = hand_over
        self.holders: Sequence[int] = range(num_peers)
        """Peers whose x and u count: all, or with `hand_over` those of the round under way or just over."""
        self.times_drawn = np.zeros(num_peers, np.int64)
        """Rounds in which each peer took part: int64[peers]."""
        # Anybody may be drawn with anybody; what a peer may send in a round is judged by the matrix of that round.
        everybody = frozenset(range(num_peers))
        for participant in self.participants:
            participant.session.in_neighbors = everybody

    def _prepared(self, setup: RunSetup) -> RunSetup:
        values = {field.name: getattr(setup, field.name) for field in fields(setup)}
        return _DrawnSetup(**values | {"schedule": self._schedule})

    def _start(self) -> None:
        self._begin_round(0)

    def _begin_round(self, t: int) -> None:
        there = [peer for peer in range(self.num_peers) if self._availability.is_there(peer, self.now)]
        order = random.stream(self.config.run.seed, random.SHARED, Purpose.SIMULATION, t, layer=_DRAWN)
        chosen = order.permutation(len(there))[: self._wanted]
        if not there:
            raise ConfigError(f"leaves nobody after {self.now:.0f} s", key="availability")
        takers = np.array(there, np.int64)[chosen]
        if self._hand_over:
            if takers.size < self._wanted:
                raise ConfigError(f"leaves fewer than are drawn after {self.now:.0f} s", key="availability")
            if t > 0:
                # In random order: a model is not to stay among neighbours, whose data are alike.
                self._give(self.holders, takers.tolist())
            self.holders = takers.tolist()
        drawn = np.sort(takers)
        self._schedule.draw(t, drawn)
        self.times_drawn[drawn] += 1
        self._under_way = drawn.size
        for peer in drawn.tolist():
            # It was idle for as long as it was not drawn: nothing of the rounds in between concerns it.
            self.participants[peer].session.round = t
            self.agenda.add(self.now + self.step_s[peer], StepDone(peer))

    def _give(self, givers: Sequence[int], takers: Sequence[int]) -> None:
        """Let each taker have x and u of its giver, in the frame with which a peer that leaves hands them over."""
        layout, frames = self.trainer.layout, dict[int, bytes]()
        for giver in dict.fromkeys(givers):
            algorithm = self.participants[giver].algorithm
            layers = whole(algorithm.x, layout)
            message = Message(MessageKind.GOSSIP, giver, self._schedule.round, TRANSFER_PHASE, 1.0, algorithm.u, layers)
            frames[giver] = wire.encode(message, layout)
        # After all are made: a giver may be a taker too.
        for giver, taker in zip(givers, takers, strict=True):
            if giver != taker:
                algorithm, frame = self.participants[taker].algorithm, frames[giver]
                message = wire.decode(frame, layout, dtype=algorithm.x.dtype)
                algorithm.x.fill(0)
                add_decompressed_(algorithm.x, message.layers, layout, 1.0)
                algorithm.u = message.push_weight
                sent = self.totals[giver].frame_bytes + len(frame)
                self.totals[giver] = replace(self.totals[giver], frame_bytes=sent)

    def fetch(self) -> int:
        """Let each peer that is there and holds nothing have a copy of a holder's model, after the last round; return
        how many did."""
        holders = set(self.holders)
        there = [
            peer
            for peer in range(self.num_peers)
            if peer not in holders and self._availability.is_there(peer, self.now)
        ]
        order = random.stream(self.config.run.seed, random.SHARED, Purpose.SIMULATION, 0, layer=_FETCHED)
        shuffled = np.array(there, np.int64)[order.permutation(len(there))].tolist()
        self._give(list(itertools.islice(itertools.cycle(self.holders), len(there))), shuffled)
        return len(there)

    def _counting(self) -> Sequence[Participant]:
        return [self.participants[peer] for peer in self.holders]

    def _ready_for_step(self, peer: int, now: float) -> None:
        del peer
        self._under_way -= 1
        if self._under_way == 0:
            self._begin_round(self._schedule.round + 1)

    def _is_evaluated(self, done: int) -> bool:
        return False  # Only all models together are worth looking at: `models`.

    @property
    def frame_bytes(self) -> int:
        """Bytes that all peers have sent so far."""
        return sum(total.frame_bytes for total in self.totals)

    def models(self) -> Iterable[npt.NDArray[np.float32]]:
        """Yield z of every peer."""
        for participant in self.participants:
            yield participant.model()


if __name__ == "__main__":
    raise SystemExit(main())
