"""Asks of every algorithm how far honest messages move a model beside the bound, and what the largest that passes does.

    python -m tests.stress.plausible honest [--seeds 0-1] [--rounds 60] [--algorithms sgp,d2] [--json FILE]
    python -m tests.stress.plausible lies …

`honest`: in virtual time five peers train the small task `clusters`, with even and with wholly skewed data, at full
rate from the first round and after a warm-up; then linear models that begin at zero (`Regression`), with targets in
units of 1:1000 and some that are zero, with samples 1:100, with momentum; algorithms that go on without late neighbours
also with one peer that is cut off for twenty minutes, from the first rounds on. Where members change, peers also join,
leave and are lost (`tests.stress.faults`). No message may be refused. Shown are the largest message beside the bound,
and how many times as large that was.

`lies`: one of the peers lies in no round, in one, or in every one (`never`, `once`, `always`), with the largest message
that passes, all of whose numbers are alike.

With `--json` the rows are kept in FILE, and what is in it already is not run again. Ends with 1 if an honest message
was refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from peer import gossip, wire
from peer.compress import block_float
from peer.compress.layout import Layout
from peer.compress.modulo import Modulo
from peer.compress.payload import Dense, FloatArray, LayerPayload, Residues, ValueType, num_values
from peer.config.options import Config, load
from peer.errors import DivergenceError, RemoteProtocolError, SottoError
from peer.gossip.plausibility import Reaches, norm_of
from peer.node.divergence_guard import reason_to_stop
from peer.node.local_steps import LocalSteps
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.records import RoundRecord
from peer.run.setup import RunSetup
from peer.simulate.network import Cut, LinkModel
from peer.simulate.pairs import AsynchronousSimulator
from peer.simulate.rounds import Simulator
from peer.wire.message import Message, MessageKind
from tests.node.local_steps import KeptSteps, Step
from tests.stress.chaos import parse_seeds
from tests.stress.faults.scenario import BY_NAME, CASES, Scenario
from tests.stress.faults.training import VirtualTraining
from tests.stress.faults.world import SimulationFailed, World

PEERS, LIAR = 5, 3
_GIVING = (MessageKind.GOSSIP, MessageKind.PART, MessageKind.PAIR_REQUEST, MessageKind.PAIR_REPLY)

RING, QSGD = "graph.kind=ring", ("compressor.kind=qsgd", "compressor.bits=8")
MODULO = (RING, "compressor.kind=modulo")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "local": (),
    "allreduce": ("graph.kind=complete",),
    "parameter-server": ("graph.kind=star", *QSGD),
    **dict.fromkeys(("low-rank", "compressed-allreduce"), ("graph.kind=complete",)),
    "d-psgd": (RING,),
    "naive-quantized": (RING, *QSGD),
    "sgp": (),
    "deep-squeeze": (RING,),
    "sparse-push": (),
    "scsp": ("algorithm.final_rounds=20",),
    "choco-sgd": (RING,),
    "quant-sgp": (),
    "dcd-psgd": (RING, *QSGD),
    "ecd-psgd": (RING, *QSGD),
    "moniqua": MODULO,
    "d2": (RING,),
    "moniqua-d2": MODULO,
    "ad-psgd": (RING,),
    "moniqua-ad-psgd": MODULO,
}
PAIRS = ("ad-psgd", "moniqua-ad-psgd")
LATE = tuple(name for name in ALGORITHMS if name not in PAIRS and gossip.ALGORITHMS[name].spec.tolerates_late)
"""Those that may go on without a late neighbour."""
JOINS = tuple(sorted({case.algorithm for case in CASES} | (BY_NAME.keys() & ALGORITHMS.keys())))
"""Those whose members change in `tests.stress.faults`."""
ABSENCE_S = 1200.0
UNITS = (70.0, 0.07, 0.0, 0.7, 7.0)
"""Of the targets of each peer. With 70 the loss begins at a quarter of what the guard lets a peer go on with; single
batches come near to that."""
WEIGHTS = {
    "even": (1.0,) * PEERS,
    "the largest unit counts most": (4.8, 0.048, 0.048, 0.052, 0.052),
    "a small unit counts most": (0.048, 4.8, 0.048, 0.052, 0.052),
}
"""What `data.weight_by_samples` multiplies steps by: samples are 100 to 1."""


class Regression(KeptSteps):
    """The gradient of ½ (z · x − y)² over a few samples, with features of size 1; y = unit · (w · x), w of norm 1 and
    its own for each peer."""

    beta: ClassVar[float] = 0.0
    rates: ClassVar[float] = 0.01

    def __init__(self, size: int, *, seed: int, peer: int, unit: float, weight: float) -> None:
        super().__init__(np.zeros(size, np.float32))
        self._seed, self._peer, self._weight = seed, peer, weight
        target = np.random.default_rng([seed, peer, 0, 2]).normal(size=size)
        self._target = (unit * target / np.linalg.norm(target)).astype(np.float32)

    def rate(self, t: int) -> float:
        return self.rates * (1.0 - self.beta)

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        features = np.random.default_rng([self._seed, self._peer, t, 1]).normal(size=(8, z.size)).astype(np.float32)
        errors = features @ (z - self._target)
        self.kept *= np.float32(self.beta)
        self.kept += np.float32(self._weight / 8.0) * (errors @ features)
        return Step(self.kept.copy(), float(0.5 * np.mean(errors * errors)))


class WithMomentum(Regression):
    beta = 0.9


@dataclass
class Row:
    """What came of one run."""

    messages: int = 0
    refused: int = 0
    """Honest messages that reach further than is let by."""
    held_back: int = 0
    """… and further than their senders would send; of no account in a run that the guard ends besides."""
    shortened: int = 0
    """Own changes that honest peers shortened."""
    share: float = 0.0
    """The largest share of the bound that an honest message had."""
    reach: float = 0.0
    """How far that message reached."""
    allowed: float = 0.0
    """… and how far it might have."""
    ended: str | None = None
    """Why a peer ended."""
    accuracy: float | None = None
    """Of the worst honest peer."""
    seconds: float = 0.0

    def note(self, reach: float, allowed: float) -> None:
        """Take note of one honest message."""
        self.messages += 1
        self.refused += not reach <= allowed
        share = reach / allowed if allowed else math.inf
        if share > self.share:
            self.share, self.reach, self.allowed = share, reach, allowed

    def __str__(self) -> str:
        times = (
            f"largest {self.reach:.3g}, bound {self.allowed:.3g}: {1.0 / self.share:.1f} times" if self.share else "-"
        )
        accuracy = "" if self.accuracy is None else f"; accuracy {100 * self.accuracy:.1f} %"
        refused = f"; {self.refused} HONEST MESSAGES REFUSED" if self.refused else ""
        refused += f"; {self.held_back} HELD BACK" if self.held_back else ""
        refused += f"; {self.shortened} shortened" if self.shortened else ""
        return f"{self.messages} messages; {times}{accuracy}{refused}" + (
            f"; ended: {self.ended}" if self.ended else ""
        )


def job(algorithm: str, seed: int, rounds: int, *settings: str) -> Config:
    """Return the configuration of a run."""
    return load(
        environment={},
        overrides=[
            "training.task=clusters", "training.task_options={hidden = 8, samples = 400}", "training.batch_size=8",
            "evaluation.every_rounds=0", f"run.rounds={rounds}", f"run.seed={seed}", f"algorithm.name={algorithm}",
            *ALGORITHMS[algorithm], *settings,
        ],
    )  # fmt: skip


@contextmanager
def watching(row: Row, liar: int | None = None) -> Iterator[None]:
    """Note in a row what is judged in here, and neither refuse nor hold back anything for how far it reaches."""

    def lets_by(reaches: Reaches, t: int, sender: int, model: FloatArray, own: FloatArray, distance: float) -> bool:
        allowed = reaches.allowed(sender, norm_of(own) if reaches.counts_own(t) else 0.0)
        passes = really_lets_by(reaches, t, sender, model, own, distance)
        if sender != liar and not row.held_back:
            row.note(norm_of(model), allowed)
        return passes or sender != liar

    def check(reaches: Reaches, t: int, message: Message, reach: float, own_norm: Callable[[], float]) -> None:
        # Who holds a message back ends, and what follows from that message is none that was sent.
        if reach and liar not in (message.sender, reaches.me) and not row.held_back:
            row.note(reach, reaches.allowed(message.sender, own_norm() if reaches.counts_own(t) else 0.0))

    def check_own(reaches: Reaches, *arguments: Any) -> None:
        try:
            really_check_own(reaches, *arguments)
        except DivergenceError:
            row.held_back += reaches.me != liar
            if liar is None:
                raise

    def share_within(reaches: Reaches, *arguments: Any, **options: Any) -> float:
        share = really_share_within(reaches, *arguments, **options)
        row.shortened += share < 1.0 and reaches.me != liar
        return share

    def require(reaches: Reaches, *arguments: Any) -> None:
        if reaches.me != liar:
            really_require(reaches, *arguments)

    really_lets_by, really_check_own, really_require = Reaches.lets_by, Reaches.check_own, Reaches.require
    really_share_within = Reaches.share_within
    with (
        patch.object(Reaches, "check", check),
        patch.object(Reaches, "lets_by", lets_by),
        patch.object(Reaches, "check_own", check_own),
        patch.object(Reaches, "require", require),
        patch.object(Reaches, "share_within", share_within),
    ):
        yield


@contextmanager
def trained_by(steps_of: Callable[[int, int], LocalSteps]) -> Iterator[None]:
    """Let what `steps_of(size, peer)` returns train each peer that is made in here, from a model that is zero."""
    rounds, in_pairs = RunSetup.participant, RunSetup.pair_participant

    def made(make: Any, setup: RunSetup, peer: int, steps: LocalSteps, layout: Layout, x0: Any, **options: Any) -> Any:
        return make(setup, peer, steps_of(layout.size, peer), layout, np.zeros_like(x0), **options)

    with (
        patch.object(RunSetup, "participant", as_method(partial(made, rounds))),
        patch.object(RunSetup, "pair_participant", as_method(partial(made, in_pairs))),
    ):
        yield


def as_method(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is a method where it is an attribute of a class."""
    return lambda *arguments, **options: call(*arguments, **options)


@contextmanager
def lied_to(lies_in: Callable[[int], bool]) -> Iterator[None]:
    """Let the largest lie that passes come in the place of what the liar sends, in the rounds that `lies_in` says."""
    rounds, in_pairs = Participant.receive, PairParticipant.receive

    def received(receive: Any, receiver: Any, sender: int, frame: bytes, now: float) -> Any:
        if sender == LIAR:
            codes = getattr(receiver, "last_codes", None)
            before = None if codes is None else codes.of(LIAR)
            message = wire.decode(frame, receiver.layout, dtype=receiver.algorithm.x.dtype, previous=before)
            if message.kind in _GIVING and message.layers:
                if lies_in(message.round):
                    frame = wire.encode(largest_lie(receiver, message), receiver.layout)
                elif not passes(receiver, message):
                    # Behind a lie, of which copies and memories are kept, what is true may be refused as well.
                    frame = wire.encode(largest_lie(receiver, message), receiver.layout)
        if isinstance(receiver, PairParticipant) and receiver.peer == LIAR:
            frame = readable(receiver, frame)
        return receive(receiver, sender, frame, now)

    with (
        patch.object(Participant, "receive", as_method(partial(received, rounds))),
        patch.object(PairParticipant, "receive", as_method(partial(received, in_pairs))),
        # A liar goes on.
        patch("peer.simulate.virtual_run.reason_to_stop", as_reason),
        # Where all tell the same of a peer they share one copy of it.
        patch("peer.simulate.virtual_run.SharedCopies", lambda: None),
    ):
        yield


def as_reason(options: Any, record: RoundRecord, model: FloatArray, **others: Any) -> str | None:
    """Return why an honest peer should stop."""
    return None if record.peer == LIAR else reason_to_stop(options, record, model, **others)


def readable(liar: PairParticipant, frame: bytes) -> bytes:
    """Return a frame for the liar. A reply is coded for one who has what its request said."""
    message = wire.decode(frame, liar.layout, dtype=liar.algorithm.x.dtype)
    coded = message.kind is MessageKind.PAIR_REPLY and any(isinstance(each, Residues) for each in message.layers)
    return wire.encode(lie_of(liar, message, 0.0), liar.layout) if coded else frame


def largest_lie(receiver: Participant | PairParticipant, honest: Message, share: float = 0.999) -> Message:
    """Return a message all of whose numbers are alike, and that reaches that share of what the receiver lets by."""
    # Codes of 8 bits are rounded.
    modulo = any(isinstance(each, Residues) for each in honest.layers)
    share *= 0.98 if honest.kind is MessageKind.PART or modulo else 1.0
    low, high = 0.0, 1e12
    while high > 1.001 * low + 1e-9:
        largest = math.sqrt(max(low, 1e-9) * high)
        answer = asked(receiver, lie_of(receiver, honest, largest))
        # In rounds, codes are read only once all have come.
        coded = sum(num_values(each) for each in honest.layers if isinstance(each, Residues))
        reach = math.inf if answer is None else max(answer[0], largest * math.sqrt(coded))
        if answer is not None and reach <= share * receiver.reaches.allowed(honest.sender, answer[1]):
            low = largest
        else:
            high = largest
    found = lie_of(receiver, honest, low)
    if low < 1e-3 and not passes(receiver, found):
        # A copy is too far away already: as little as possible of the way back.
        back = (lie_of(receiver, honest, -each) for each in np.geomspace(1e-3, 1e3, 200).tolist())
        found = next((lie for lie in back if passes(receiver, lie)), found)
    return found


def passes(receiver: Participant | PairParticipant, message: Message) -> bool:
    """Return whether a receiver lets a message by."""
    answer = asked(receiver, message)
    return answer is not None and answer[0] <= receiver.reaches.allowed(message.sender, answer[1])


def lie_of(receiver: Participant | PairParticipant, honest: Message, largest: float) -> Message:
    """Return a message all of whose numbers are that large; a code is one of such numbers."""
    node, x = receiver.algorithm.node, receiver.algorithm.x
    if not isinstance(node.compressor, Modulo):
        return blown_up(honest, largest)
    theta, draws = 2.0 * (largest + float(np.abs(x).max())), node.draw_source.draws(honest.round)
    layers = tuple(
        node.compressor.compress(np.full(num_values(layer), largest, x.dtype), number, draws, theta=theta)
        if isinstance(layer, Residues)
        else _blown_up(layer, largest)
        for number, layer in enumerate(honest.layers)
    )
    return replace(honest, layers=layers)


def asked(receiver: Participant | PairParticipant, message: Message) -> tuple[float, float] | None:
    """Return how far a message reaches, and the norm of the receiver's model, as its judge finds them; None if it is
    refused for something else."""
    found: list[tuple[float, float]] = []

    def check(reaches: Reaches, t: int, _message: Message, reach: float, own_norm: Callable[[], float]) -> None:
        found.append((reach, own_norm() if reaches.counts_own(t) else 0.0))
        raise RemoteProtocolError("was asked about only", peer=message.sender)

    with patch.object(Reaches, "check", check), suppress(RemoteProtocolError):
        receiver.algorithm.judge(message) if isinstance(receiver, PairParticipant) else receiver.weigh(message)
    return found[0] if found else None


def blown_up(message: Message, largest: float) -> Message:
    """Return a message all of whose numbers are that large; θ, where they are coded."""
    if message.kind is MessageKind.PART and block_float.read(message.layers, 8) is not None:
        pieces, numbers = map(num_values, message.layers)
        # As many pieces as the part has.
        sizes = np.array([1] * (pieces - 1) + [numbers - pieces + 1], np.int64)
        return replace(message, layers=block_float.encode(np.full(numbers, largest), sizes, 8))
    return replace(message, layers=tuple(_blown_up(layer, largest) for layer in message.layers))


def _blown_up(layer: LayerPayload, largest: float) -> LayerPayload:
    if isinstance(layer, Residues):
        return replace(layer, theta=float(np.float32(largest)))
    # Levels have no room for such numbers, but nobody is bound to the compressor of the run.
    return Dense(np.full(num_values(layer), largest, np.float32), ValueType.FLOAT32)


def run(
    config: Config,
    *,
    steps_of: Callable[[int, int], LocalSteps] | None = None,
    lies_in: Callable[[int], bool] | None = None,
    links: LinkModel | None = None,
    step_s: float = 1.0,
    diverges: bool = False,
) -> Row:
    """Run a job, with a liar if `lies_in` says of rounds whether it lies in them. `diverges`: messages are refused and
    held back as ever."""
    row, started = Row(), time.monotonic()
    kind: Any = AsynchronousSimulator if config.algorithm.name in PAIRS else Simulator
    with ExitStack() as odd:
        if not diverges:
            odd.enter_context(watching(row, None if lies_in is None else LIAR))
        if steps_of is not None:
            odd.enter_context(trained_by(steps_of))
        if lies_in is not None:
            odd.enter_context(lied_to(lies_in))
        simulator = kind(config, Path(), num_peers=PEERS, step_s=step_s, links=links)
        try:
            simulator.run()
        except SottoError as error:
            row.ended = str(error)
            row.refused += not isinstance(error, DivergenceError)
    if row.ended is None and steps_of is None:
        models = [each.model() for each in simulator.participants if lies_in is None or each.peer != LIAR]
        row.accuracy = min(simulator.trainer.evaluate(model).accuracy for model in models)
    row.seconds = time.monotonic() - started
    return row


class OddTraining(VirtualTraining):
    """Targets in units 1:1000 and one that is zero: also of those that join."""

    units: ClassVar[tuple[float, ...]] = (10.0, 0.01, 0.0, 0.1)

    def __init__(self, size: int, rounds: int, *, seed: int, peer: int, **options: Any) -> None:
        super().__init__(size, rounds, seed=seed, peer=peer, **options)
        unit = np.float32(self.units[(peer + seed) % len(self.units)])
        self.scale(unit)


def with_changing_members(algorithm: str, seed: int, rounds: int) -> Row:
    """Run peers of which some join, leave or are lost, with everything that goes wrong besides."""
    row, started = Row(), time.monotonic()
    with watching(row), patch("tests.stress.faults.scenario.VirtualTraining", OddTraining):
        try:
            World(changing(algorithm, seed, rounds)).run()
        except SimulationFailed as failure:
            row.ended = failure.problem
    row.seconds = time.monotonic() - started
    return row


def changing(algorithm: str, seed: int, rounds: int) -> Scenario:
    """Return a scenario of an algorithm that it names, or of the one that the seed stands for."""
    return Scenario(seed, rounds, name=algorithm if algorithm in BY_NAME else None)


Runs = Iterator[tuple[str, Callable[[], Row]]]
"""(what it is, how to run it)."""


def honest(algorithm: str, seed: int, rounds: int) -> Runs:
    """Yield runs in which nobody lies."""
    for skew in (0.0, 1.0):
        for warm_up in (0, 50):
            settings = (f"data.skew={skew}", f"training.warmup_rounds={warm_up}")
            config = job(algorithm, seed, rounds, *settings)
            yield f"{algorithm}, seed {seed}, skew {skew:g}, warm-up {warm_up}", partial(run, config)
    yield from at_zero(algorithm, seed, rounds)
    if algorithm in LATE:
        yield from cut_off(algorithm, seed, rounds)
    if algorithm in JOINS:
        # A seed of `tests.stress.faults` stands for one algorithm, in turn.
        seeds = (each for each in range(100 * seed, 100 * seed + 100) if _is_of(algorithm, each))
        for number, each in zip(range(2), seeds, strict=False):
            name = f"{algorithm}, seed {seed}, changing members {number}"
            yield name, partial(with_changing_members, algorithm, each, rounds)


def _is_of(algorithm: str, seed: int) -> bool:
    scenario = changing(algorithm, seed, 60)
    return scenario.case.algorithm == algorithm and bool(scenario.happenings)


def at_zero(algorithm: str, seed: int, rounds: int) -> Runs:
    """Yield runs of linear models that begin at zero, on data that differ as much as honest ones may."""
    for what, weights in WEIGHTS.items():
        for kind in (Regression, WithMomentum):
            steps = partial(_regression, kind, weights, seed)
            name = f"{algorithm}, seed {seed}, from zero, {what}, {kind.__name__}"
            yield name, partial(run, job(algorithm, seed, rounds), steps_of=steps)


def _regression(kind: type[Regression], weights: tuple[float, ...], seed: int, size: int, peer: int) -> Regression:
    return kind(size, seed=seed, peer=peer, unit=UNITS[(peer + seed) % PEERS], weight=weights[(peer + seed) % PEERS])


def cut_off(algorithm: str, seed: int, rounds: int) -> Runs:
    """Yield runs in which a peer is away for twenty minutes, and comes back."""
    for from_s in (45.0, 300.0):
        call, name = (
            partial(late, algorithm, seed, rounds, from_s),
            f"{algorithm}, seed {seed}, away from {from_s:g} s on",
        )
        yield name, call
        yield f"{name}, from zero", partial(call, steps_of=partial(_regression, Regression, WEIGHTS["even"], seed))


def late(algorithm: str, seed: int, rounds: int, from_s: float, **options: Any) -> Row:
    """Run peers that go on without one that is away from then on, for twenty minutes."""
    settings = (
        "rounds.late=skip", "rounds.late_after_s=5", "rounds.max_skipped_rounds=200", "data.skew=1.0",
        "guard.min_push_weight=1e-30",
    )  # fmt: skip
    away = LinkModel(cuts=(Cut(peers=frozenset({1}), from_s=from_s, until_s=from_s + ABSENCE_S),))
    return run(job(algorithm, seed, rounds, *settings), links=away, step_s=30.0, **options)


def diverging(algorithm: str, seed: int, rounds: int) -> Runs:
    """Yield runs whose rate is too high for all, for data of one of the peers, or for one that was cut off."""
    skips = ("wait", "skip") if algorithm in LATE else ("wait",)
    for rate, skew, late_ in itertools.product((1.0, 3.0, 10.0, 30.0, 1e3, 1e5, 1e9), (0.0, 1.0), skips):
        settings = (f"data.skew={skew}", f"training.learning_rate={rate}", f'rounds.late="{late_}"')
        name = f"{algorithm}, seed {seed}, rate {rate:g}, skew {skew:g}, {late_}"
        yield name, partial(run, job(algorithm, seed, rounds, *settings), diverges=True)
    for factor in (10.0, 20.0, 40.0, 100.0, 1e3, 1e4):
        for what, weights in WEIGHTS.items():
            longer = tuple(factor * weight for weight in weights)
            steps, name = partial(_regression, Regression, longer, seed), f"{algorithm}, seed {seed}, from zero, {what}"
            yield f"{name}, {factor:g} times", partial(run, job(algorithm, seed, rounds), steps_of=steps, diverges=True)
            if algorithm in LATE:
                away = partial(late, algorithm, seed, rounds, 45.0)
                yield f"{name}, {factor:g} times, away", partial(away, steps_of=steps, diverges=True)


def lies(algorithm: str, seed: int, rounds: int) -> Runs:
    """Yield runs in which one peer lies."""
    often: dict[str, Callable[[int], bool]] = {
        "never": lambda t: False,
        "once": lambda t: t == rounds // 3,
        "always": lambda t: t > 1,
    }
    if algorithm != "local":
        for name, lies_in in often.items():
            config = job(algorithm, seed, rounds, "data.skew=0.5")
            yield f"{algorithm}, {name}, seed {seed}", partial(run, config, lies_in=lies_in)


KINDS = {"honest": honest, "diverging": diverging, "lies": lies}


def main() -> None:
    """Run what is asked for and print a line for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seeds", type=parse_seeds, default=range(1), metavar="A-B")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kept: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
    worst: dict[str, Row] = {}
    for seed in arguments.seeds:
        for algorithm in arguments.algorithms.split(","):
            for name, call in KINDS[arguments.kind](algorithm, seed, arguments.rounds):
                row = Row(**kept[name]) if name in kept else call()
                kept[name] = asdict(row)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
                if algorithm not in worst or row.share > worst[algorithm].share:
                    worst[algorithm] = row
                print(f"{name}: {row}", flush=True)
    print(f"{len(kept)} runs; where honest messages came closest to the bound:")
    for algorithm, row in worst.items():
        times = f"{1.0 / row.share:.1f}" if row.share else "-"
        print(f"| `{algorithm}` | {row.reach:.3g} | {row.allowed:.3g} | {times} |")
    refused = sum(each["refused"] for each in kept.values())
    held_back = sum(each["held_back"] for each in kept.values() if each["ended"] is None)
    print(f"{refused} honest messages refused, {held_back} held back")
    raise SystemExit(1 if refused or held_back else 0)


if __name__ == "__main__":
    main()
