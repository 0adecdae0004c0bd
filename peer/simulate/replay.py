"""`sotto lab replay`: runs a scenario file through algorithm, compressor and the encoded bytes, in float64 throughout.

A scenario file is one JSON object: graph, objective, numbers in place of random draws, and for the asynchronous
algorithms the serial order of events. The result is the trajectory of every node. The objects are those that real peers
use; only the driver differs. This module reads a file and returns values; it prints nothing.

Keys: `algorithm`, `nodes`, `dim`, `layers` (sizes or shapes), `rounds`, `objective` (`curvature` and `target`,
[node][dim]: node i minimizes ½ Σ_k curvature[i][k] (x_k − target[i][k])²), `x0`, `lr` (a number or one for each round),
and where they apply `mixing` (matrices W; round t uses `mixing[(t // mixing_period) % len(mixing)]`), `mixing_period`,
`averaging_rate`, `compressor`, `uniforms` ([round][dim], or [round][node][dim]), `momentum`, `final_rounds`,
`final_averaging_rate`, `whole_below`, `server`, `model_bits`, `model_range`, `gradient_range`, `rank`, `factor_bits`,
`events`, `seed` (of draws that `uniforms` does not give), and `expect`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer import compress, wire
from peer.compress.base import Compressor, Draws
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import ConfigError, LocalProtocolError
from peer.gossip import ALGORITHMS, build, build_pair_node
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, NodeContext, NoMomentum
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.options import FinalRounds, LowRankOptions, ModuloOptions, ServerOptions
from peer.gossip.pairs.node import PairNode
from peer.gossip.topology import Turns
from peer.random import PeerDraws
from peer.state.foreign_files import read_json
from peer.train.momentum import Momentum
from peer.wire.message import Message

Float64Array: TypeAlias = npt.NDArray[np.float64]
Trajectory: TypeAlias = dict[str, list[Any]]
Carry: TypeAlias = Callable[[Message], Message]

MOST_NUMBERS = 100_000_000
"""nodes · dim · (rounds + 1) of the largest scenario that is accepted."""


def read_scenario(path: str | Path) -> Scenario:
    """Return the checked content of a scenario file. Raises ConfigError that names file, key, value and valid
    values."""
    file = str(path)
    try:
        tree = read_json(Path(path), infinite="kept")
    except FileNotFoundError:
        raise ConfigError("no such file", file=file) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=file) from None
    except ValueError as error:
        raise ConfigError(f"is not valid JSON: {error}", file=file) from None
    return parse_scenario(tree, file)


def largest_difference(result: Mapping[str, Any], expect: Mapping[str, Any]) -> float:
    """Return the largest absolute difference between a trajectory and the expected one, over the keys expected.

    Infinite if a key is missing, the lengths differ or a value is not finite.
    """
    largest = 0.0
    for key, wanted in expect.items():
        have, want = np.asarray(result.get(key, ())), np.asarray(wanted)
        if have.shape != want.shape:
            return math.inf
        difference = float(np.max(np.abs(have - want))) if want.size else 0.0
        if not math.isfinite(difference):
            return math.inf
        largest = max(largest, difference)
    return largest


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A checked scenario file."""

    file: str
    algorithm: str
    common: NodeContext
    """The context of node 0: the others have all but two fields in common with it."""
    source: RecordedSource
    curvature: Float64Array
    target: Float64Array
    x0: Float64Array
    rates: tuple[float, ...]
    """γ of each round (of each event)."""
    momentum: Mapping[str, Any]
    events: tuple[tuple[Any, ...], ...]
    expect: Mapping[str, Any] | None

    def node(self, peer: int) -> NodeContext:
        """Return the context of one node."""
        return replace(self.common, peer=peer, draw_source=replace(self.source, peer=peer))

    def gradient(self, node: int, z: FloatArray) -> Float64Array:
        """Return the exact gradient of the node's objective at `z`."""
        result: Float64Array = self.curvature[node] * (z - self.target[node])
        return result

    def carry(self, message: Message) -> Message:
        """Return the message after a way over the wire: encoded to bytes and decoded again."""
        frame = wire.encode(message, self.common.layout)
        return wire.decode(frame, self.common.layout, dtype=np.float64)


def replay(scenario: Scenario) -> Trajectory:
    """Return {"x": [...], "z": [...], "u": [...]} of a scenario.

    `x` and `z` are [round][node][dim] and `u` [round][node], before round 0 and after each round (for the asynchronous
    algorithms: before, and after each event).
    """
    if ALGORITHMS[scenario.algorithm].spec.asynchronous:
        return _replay_events(scenario)
    peers = range(len(scenario.curvature))
    algorithms = [build(scenario.algorithm, scenario.node(i), scenario.x0) for i in peers]
    of_mean = scenario.common.momentum is not NoMomentum
    momenta = [Momentum() if of_mean else Momentum(**scenario.momentum) for _ in peers]
    result: Trajectory = {"x": [], "z": [], "u": []}
    _record(result, algorithms)
    for t in range(scenario.common.rounds):
        before = [algorithm.model().copy() for algorithm in algorithms]
        gradients, rates = [], []
        for i, algorithm in enumerate(algorithms):
            if algorithm.wants_gradient(t):
                gradients.append(momenta[i].direction(scenario.gradient(i, before[i]), before[i]))
                rates.append(scenario.rates[t])
            else:
                gradients.append(np.zeros_like(before[i]))
                rates.append(0.0)
        run_round(algorithms, t, gradients, rates, scenario.carry)
        for i, algorithm in enumerate(algorithms):
            momenta[i].after_round(before[i], algorithm.model(), rates[i])
        _record(result, algorithms)
    return result


def run_round(
    algorithms: Sequence[Algorithm], t: int, gradients: Sequence[FloatArray], rates: Sequence[float], carry: Carry
) -> None:
    """Take all peers through round t, every message through `carry`; nobody is late."""
    boxes: dict[tuple[int, int], dict[int, Message]] = {}
    open_exchanges: dict[int, Exchange] = {}

    def post(sender: int, exchange: Exchange) -> None:
        open_exchanges[sender] = exchange
        for receiver, message in exchange.sends.items():
            arrived = carry(message)
            if arrived.kind.name == "REPAIR_REQUEST":
                answer = carry(algorithms[receiver].answer(arrived))
                boxes.setdefault((sender, answer.phase), {})[receiver] = answer
            else:
                boxes.setdefault((receiver, arrived.phase), {})[sender] = arrived

    for i, algorithm in enumerate(algorithms):
        post(i, algorithm.begin(t, gradients[i], rates[i]))
    while open_exchanges:
        ready = [
            i for i, exchange in open_exchanges.items() if exchange.awaits <= boxes.get((i, exchange.phase), {}).keys()
        ]
        if not ready:
            raise LocalProtocolError(f"round {t}: peers {sorted(open_exchanges)} wait for messages that nobody sends")
        for i in sorted(ready):
            exchange = open_exchanges.pop(i)
            box = boxes.get((i, exchange.phase), {})
            following = algorithms[i].advance({j: box[j] for j in sorted(exchange.awaits)})
            if following is not None:
                post(i, following)


def _replay_events(scenario: Scenario) -> Trajectory:
    """Run the serial events of an asynchronous algorithm; event number e uses γ, θ and uniforms number e."""
    nodes = [build_pair_node(scenario.algorithm, scenario.node(i), scenario.x0) for i in range(len(scenario.curvature))]
    momenta = [Momentum(**scenario.momentum) for _ in nodes]
    read: dict[int, FloatArray] = {}
    result: Trajectory = {"x": [], "z": [], "u": []}
    _record(result, nodes)
    for e, event in enumerate(scenario.events):
        kind, i = event[0], event[1]
        if kind == "read":
            read[i] = nodes[i].read()
        elif kind == "step":
            direction = momenta[i].direction(scenario.gradient(i, read[i]), read[i])
            # The logs of real peers carry γ with each step.
            nodes[i].step(direction, event[2] if len(event) > 2 else scenario.rates[e])
        else:
            exchange_pair(nodes, i, event[2], event[3] if len(event) > 3 else e, scenario.carry)
        _record(result, nodes)
    return result


def exchange_pair(nodes: Sequence[PairNode], initiator: int, responder: int, exchange: int, carry: Carry) -> None:
    """Average two idle nodes, every message through `carry`."""
    on_the_way = [(responder, nodes[initiator].request(responder, exchange))]
    while on_the_way:
        receiver, message = on_the_way.pop()
        on_the_way.extend(nodes[receiver].receive(carry(message)).sends)


def _record(result: Trajectory, nodes: Sequence[Algorithm] | Sequence[PairNode]) -> None:
    result["x"].append([node.x.tolist() for node in nodes])
    result["z"].append([node.model().tolist() for node in nodes])
    result["u"].append([float(node.u) for node in nodes])


@dataclass(frozen=True)
class RecordedSource:
    """Draws from a scenario file; those that it does not give come from the product's own generator."""

    uniforms: Float64Array | None
    layout: Layout
    seed: int
    peer: int

    def draws(self, t: int) -> Draws:
        if self.uniforms is None:
            return PeerDraws(self.seed, self.peer, t)
        row = self.uniforms[t]
        return RecordedDraws(row[self.peer] if row.ndim == 2 else row, self.layout)


@dataclass(frozen=True)
class RecordedDraws:
    """Uniforms laid over the flat vector: each layer uses its own slice, whether they are own or shared."""

    row: Float64Array
    layout: Layout

    def own(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        return self.row[self.layout.slices[layer]][:size].astype(dtype)

    def shared(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        return self.own(layer, size, dtype)

    def words(self, layer: int, size: int) -> npt.NDArray[np.uint32]:
        """Return ⌊2³² · uniform⌋."""
        words: npt.NDArray[np.uint32] = np.floor(self.own(layer, size, np.float64) * 2.0**32).astype(np.uint32)
        return words


def parse_scenario(tree: object, file: str = "scenario") -> Scenario:
    """Return the checked scenario of parsed JSON. Raises ConfigError."""
    if not isinstance(tree, dict):
        raise ConfigError("should be one JSON object", file=file)
    read = _Reader(tree, file)
    name = read.choice("algorithm", ALGORITHMS)
    spec = ALGORITHMS[name].spec
    nodes, dim = read.whole("nodes", least=1), read.whole("dim", least=1)
    layout = _read_layout(read, dim)
    events = _read_events(read, nodes) if spec.asynchronous else ()
    rounds = len(events) if spec.asynchronous else read.whole("rounds", least=0)
    if nodes * dim * (rounds + 1) > MOST_NUMBERS:
        raise read.error(
            "rounds", "makes a trajectory too long to hold", valid=f"nodes · dim · rounds ≤ {MOST_NUMBERS}"
        )
    objective = _Reader(read.table("objective"), file, "objective.")
    compressor, theta, verified = _read_compressor(read, spec.modulo, rounds)
    by_layer = read.choice("factor_exponents", ("vector", "layer"), "vector") == "layer"
    momentum = _read_momentum(read, spec.asynchronous, layout)
    of_mean = spec.acts_on_mean(momentum.get("kind", "none"))
    source = RecordedSource(_read_uniforms(read, nodes, dim, rounds), layout, read.whole("seed", 0), 0)
    return Scenario(
        file=file,
        algorithm=name,
        source=source,
        curvature=objective.array("curvature", (nodes, dim)),
        target=objective.array("target", (nodes, dim)),
        x0=read.array("x0", (dim,)),
        rates=read.per_round("lr", rounds),
        momentum=momentum,
        events=events,
        common=NodeContext(
            peer=0,
            schedule=_read_schedule(read, nodes, spec),
            layout=layout,
            draw_source=source,
            compressor=compressor,
            averaging_rate=read.number("averaging_rate", 1.0),
            whole_below=read.whole("whole_below", 0),
            rounds=rounds,
            # θ is the file's, even if codes carry hashes: a θ that is too small is repaired and stays.
            modulo=ModuloOptions(theta=theta, verified=verified),
            final=FinalRounds(
                count=read.whole("final_rounds", 0, most=rounds),
                averaging_rate=read.number("final_averaging_rate", 1.0),
            ),
            server=_read_server(read),
            low_rank=LowRankOptions(
                rank=read.whole("rank", 4, least=1),
                bits=read.whole("factor_bits", 8, least=2, most=16),
                exponents="layer" if by_layer else "vector",
            ),
            momentum=partial(Momentum, **momentum) if of_mean else NoMomentum,
        ),
        expect=read.table("expect") if "expect" in tree else None,
    )


class _Reader:
    """Reads keys of a scenario; every complaint names file, key, value and valid values."""

    def __init__(self, tree: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self.tree, self._file, self._prefix = tree, file, prefix

    def error(self, key: str, problem: str, *, valid: str | None = None) -> ConfigError:
        """Return the complaint about a key; long values are shown by their beginning."""
        value = self.tree.get(key)
        shown = value if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
        return ConfigError(problem, key=self._prefix + key, value=shown, valid=valid, file=self._file)

    def value(self, key: str, default: object = None) -> Any:
        """Return the value of a key. Raises ConfigError if it is missing and has no default."""
        if key not in self.tree and default is None:
            raise self.error(key, "is missing")
        return self.tree.get(key, default)

    def table(self, key: str) -> Mapping[str, Any]:
        """Return a JSON object."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, "should be an object")
        return value

    def choice(self, key: str, choices: Collection[str], default: str | None = None) -> str:
        """Return one of the names."""
        value = self.value(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, "is not one of the choices", valid=", ".join(choices))
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 0, most: int | None = None) -> int:
        """Return a whole number in the range."""
        value = self.value(key, default)
        if not _is_whole(value) or value < least or (most is not None and value > most):
            raise self.error(key, "is out of range", valid=f"{least} or more" if most is None else f"{least} to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """Return a finite number."""
        value = self.value(key, default)
        if not _is_number(value) or (positive and value <= 0):
            raise self.error(key, "has to be a number", valid="a number above 0" if positive else "a finite number")
        return float(value)

    def per_round(self, key: str, rounds: int, *, positive: bool = False) -> tuple[float, ...]:
        """Return one number for each round, given as one number or as a list at least that long."""
        value = self.value(key)
        if not isinstance(value, list):
            return (self.number(key, positive=positive),) * max(rounds, 1)
        if len(value) < rounds or not all(_is_number(v) and (v > 0 or not positive) for v in value):
            raise self.error(key, "has to be one number, or one for each round", valid=f"{rounds} finite numbers")
        return tuple(float(v) for v in value)

    def array(self, key: str, shape: tuple[int | None, ...]) -> Float64Array:
        """Return an array of finite numbers of the given shape; None stands for any length."""
        wanted = " x ".join("any" if length is None else str(length) for length in shape)
        try:
            array = np.array(self.value(key), dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise self.error(key, "has to be an array of numbers", valid=f"{wanted} numbers") from None
        fits = array.ndim == len(shape) and all(w in (None, have) for w, have in zip(shape, array.shape, strict=True))
        if not fits or not np.isfinite(array).all():
            raise self.error(
                key, f"has the shape {array.shape} or a value that is not finite", valid=f"{wanted} numbers"
            )
        return array


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _read_layout(read: _Reader, dim: int) -> Layout:
    """Return the layers, each given by its size or by its shape; all matrices are hidden."""
    layers = read.value("layers", [dim])
    shapes = [each if isinstance(each, list) else [each] for each in layers] if isinstance(layers, list) else []
    if not shapes or not all(shape and all(_is_whole(size) and size >= 1 for size in shape) for shape in shapes):
        raise read.error("layers", "has to be a list of whole numbers above 0, or of lists of them")
    hidden = tuple(number for number, shape in enumerate(shapes) if len(shape) > 1)
    layout = replace(Layout.of_shapes([tuple(shape) for shape in shapes]), hidden=hidden)
    if layout.size != dim:
        raise read.error("layers", "does not add up to dim", valid=f"sizes whose sum is {dim}")
    return layout


def _read_schedule(read: _Reader, nodes: int, spec: AlgorithmSpec) -> Turns:
    """Return the mixing matrices; algorithms that mix nothing do without."""
    if spec.asynchronous:
        # The events name the pairs that average.
        return Turns([MixingMatrix.from_dense(np.full((nodes, nodes), 1.0 / nodes))])
    unused = spec.graph in (GraphNeed.NONE, GraphNeed.COMPLETE, GraphNeed.SERVER)
    if "mixing" not in read.tree and unused:
        return Turns([MixingMatrix.from_dense(np.eye(nodes))])
    matrices = read.array("mixing", (None, nodes, nodes))
    if not len(matrices):
        raise read.error("mixing", "holds no matrix", valid=f"one or more {nodes} x {nodes} matrices")
    if not unused and (matrices.min() < 0.0 or np.abs(matrices.sum(axis=1) - 1.0).max() > 1e-6):
        raise read.error("mixing", "is not column stochastic", valid="weights of 0 or more, every column summing to 1")
    return Turns([MixingMatrix.from_dense(w) for w in matrices], read.whole("mixing_period", 1, least=1))


def _read_compressor(read: _Reader, modulo: bool, rounds: int) -> tuple[Compressor, tuple[float, ...], bool]:
    """Return the compressor, θ of every round, and whether codes carry hashes."""
    settings: dict[str, Any] = dict(read.table("compressor")) if "compressor" in read.tree else {"kind": "none"}
    inner = _Reader(settings, read._file, "compressor.")
    kind = inner.choice("kind", compress.COMPRESSORS)
    if modulo != (kind == "modulo"):
        raise inner.error(
            "kind", f"does not go with {read.tree['algorithm']}", valid="modulo" if modulo else "any other"
        )
    theta: tuple[float, ...] = ()
    verified = False
    if modulo:
        theta = inner.per_round("theta", rounds, positive=True)
        verified = inner.value("verified", False)
        if not isinstance(verified, bool):
            raise inner.error("verified", "has to be true or false")
    if "biased" in settings:
        settings["unbiased"] = not settings.pop("biased")
    elif kind == "qsgd":
        settings.setdefault("unbiased", True)
    if kind == "grid" and "uniforms" not in read.tree:
        settings.setdefault("rounding", "nearest")
    built = {key: value for key, value in settings.items() if key not in ("kind", "theta", "verified")}
    try:
        return compress.build(kind, **built), theta, verified
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error), key="compressor", file=read._file) from None


def _read_server(read: _Reader) -> ServerOptions:
    """Return the options of the parameter server."""
    default = ServerOptions()
    return ServerOptions(
        peer=read.whole("server", default.peer),
        model_bits=read.whole("model_bits") if "model_bits" in read.tree else None,
        model_range=read.number("model_range", default.model_range),
        gradient_range=read.number("gradient_range") if "gradient_range" in read.tree else None,
    )


def _read_uniforms(read: _Reader, nodes: int, dim: int, rounds: int) -> Float64Array | None:
    """Return the numbers in place of random draws: [round][dim] or [round][node][dim], at least one a round."""
    if read.tree.get("uniforms") is None:
        return None
    try:
        dimensions = np.ndim(read.tree["uniforms"])
    except ValueError:
        dimensions = 0
    shape = (None, nodes, dim) if dimensions == 3 else (None, dim)
    uniforms = read.array("uniforms", shape)
    if len(uniforms) < rounds or (uniforms.size and not 0.0 <= uniforms.min() <= uniforms.max() < 1.0):
        raise read.error("uniforms", "are too few or out of range", valid=f"{rounds} rounds of numbers in [0, 1)")
    return uniforms


def _read_momentum(read: _Reader, asynchronous: bool, layout: Layout) -> Mapping[str, Any]:
    """Return the keyword arguments of `Momentum`."""
    settings = dict(read.table("momentum")) if read.tree.get("momentum") else {}
    inner = _Reader(settings, read._file, "momentum.")
    known = ("kind", "beta", "mu", "weight_decay", "beta2", "epsilon", "clip_norm")
    for key in settings:
        if key not in known:
            raise inner.error(key, "is no setting of momentum", valid=", ".join(known))
        if key != "kind" and not (key == "mu" and settings[key] is None):
            inner.number(key)
    try:
        momentum = Momentum(**settings)
    except ConfigError as error:
        raise ConfigError(error.problem, key=error.key, value=error.value, valid=error.valid, file=read._file) from None
    if asynchronous and momentum.needs_round:
        valid = "none, heavy-ball, nesterov, adam, adamw, muon"
        raise inner.error("kind", "follows rounds, and this algorithm has none", valid=valid)
    return settings | {"layout": layout}


def _read_events(read: _Reader, nodes: int) -> tuple[tuple[Any, ...], ...]:
    """Return the serial events; a step needs a read before it, a mix two different nodes."""
    events = read.value("events")
    if not isinstance(events, list):
        raise read.error("events", "has to be a list")
    lengths = {"read": (2,), "step": (2, 3), "mix": (3, 4)}
    has_read: set[int] = set()
    for number, event in enumerate(events):
        where = f"event {number}, {str(event)[:60]}, "
        if not isinstance(event, list) or not event or event[0] not in lengths or len(event) not in lengths[event[0]]:
            raise read.error("events", where + "is none", valid='["read", i], ["mix", i, j] or ["step", i]')
        peers = event[1:3] if event[0] == "mix" else event[1:2]
        if not all(_is_whole(i) and 0 <= i < nodes for i in peers) or len(set(peers)) != len(peers):
            raise read.error(
                "events", where + "names nodes that are none", valid=f"different nodes from 0 to {nodes - 1}"
            )
        if event[0] == "read":
            has_read.add(event[1])
        elif event[0] == "step" and event[1] not in has_read:
            raise read.error("events", where + "steps before it read")
    return tuple(tuple(event) for event in events)
