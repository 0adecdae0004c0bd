"""The contract between a gossip algorithm and its driver (daemon, simulator, replay).

An algorithm is a sans-I/O state machine for one peer. A driver runs round t like this:

    z = algorithm.model()                                   # train on this
    exchange = algorithm.begin(t, gradient, rate)           # local step done; what to send, whom to hear
    while exchange is not None:
        send exchange.sends; collect one message from each peer in exchange.awaits
        exchange = algorithm.advance(inbox)                 # None: the round is complete

It takes values and returns values; it never sees a clock, a socket, a file or bytes. Everything it needs to go on
after a crash is in `state()`.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.compress.base import Compressor, Draws
from peer.compress.decompress import add_decompressed_, decompress_layers
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray, Kept, Payload
from peer.compress.payload_norm import norm
from peer.errors import RemoteProtocolError
from peer.gossip.options import FinalRounds, LowRankOptions, ModuloOptions, RobustMixing, ServerOptions
from peer.gossip.plausibility import Reaches
from peer.gossip.shared_copies import SharedCopies
from peer.gossip.topology import Turns
from peer.gossip.views import ViewSchedule
from peer.records import ADAPTIVE
from peer.wire.message import Message, MessageKind


class GraphNeed(enum.Enum):
    """Requirement that an algorithm's theory places on the mixing matrices."""

    NONE = "any graph, unused"
    COLUMN = "column stochastic; may be directed and change over time"
    DOUBLY = "doubly stochastic"
    SYMMETRIC = "symmetric and doubly stochastic"
    COMPLETE = "complete: every peer hears every other"
    SERVER = "a star whose hub is the server"


class Memory(enum.Enum):
    """The vectors that an algorithm keeps besides x between rounds."""

    NONE = "none"
    ERRORS = "error_memory"
    """Accumulated error of the compressor."""
    REPLICAS = "replicas"
    """A copy of each neighbour's model, built from the differences that it sends."""
    LAST_STEP = "last_step"
    """Model and gradient of the round before (D²)."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """Properties of an algorithm for the validator, the lists and the help texts."""

    name: str
    summary: str
    """One sentence for `sotto lab list algorithms`."""
    source: str
    """Paper and algorithm or equation number."""
    graph: GraphNeed
    push_sum: bool = False
    """Keeps a push-sum weight u and trains on z = x / u."""
    compresses: bool = False
    """Sends through the configured compressor; otherwise full precision."""
    modulo: bool = False
    """Needs the `modulo` compressor, and is the only kind of algorithm that can use it."""
    needs_unbiased: bool = False
    """Its theory needs an unbiased compressor (no error feedback)."""
    tolerates_late: bool = False
    """May go on without a late neighbour and apply the message when it comes."""
    may_send_nothing: bool = False
    """A sender may leave a receiver out of a round by telling it so (`MessageKind.NOTHING`)."""
    time_varying: bool = False
    """Works on graphs that change over time."""
    changes_members: bool = False
    """Peers may join, leave or be lost during a run (`gossip.boundary`)."""
    uses_averaging_rate: bool = True
    default_averaging_rate: float | None = None
    """η that suits it with any compressor; None: it depends on the compressor."""
    asynchronous: bool = False
    local_steps: bool = True
    """Allows several gradient steps for each gossip step."""
    exchanges: int = 1
    """Exchanges of each round in which peers wait for all their neighbours, one after the other."""
    sends_factors: bool = False
    """Sends low-rank factors of the gradient (`NodeContext.low_rank`)."""
    momentum_of_mean: bool = False
    """Takes the plain gradient; momentum and weight decay act on the mean of all peers' (`NodeContext.momentum`)."""
    adam_of_mean: bool = False
    """Does so with Adam only: any other momentum of the mean is the mean of all peers' momenta."""
    mixes_after_step: bool = False
    """Averages whole models that have taken their step, so that on a complete graph all hold one at the end of a
    round."""
    mixes_before_step: bool = False
    """Averages the models of the round before, so that at the end of a round each is off by its whole local step."""
    final_rounds: bool = False
    """Its last rounds average in full precision and have no local step."""
    grows_what_it_sends: bool = False
    """Sends a vector that grows with the number of rounds."""
    forgets_errors: bool = False
    """Does not make up for the compressor's error, and stalls at a floor."""
    memory: Memory = Memory.NONE
    corrects_drift: bool = False
    """Can make up for gradients that always pull a peer the same way (`NodeContext.drift_gain`)."""
    tells_all: int | None = None
    """The phase in which a peer sends all its receivers the same, and they rely on that. None: no such phase."""
    robust_mixing: bool = False
    """Can clip or trim received models (`NodeContext.robust`): it mixes whole models, and nothing depends on their
    sum."""

    def acts_on_mean(self, momentum: str, local_steps: int = 1) -> bool:
        """Return whether a kind of momentum acts on the mean of all peers' gradients (`NodeContext.momentum`). With
        several local steps, adamw and muon are made for each of these."""
        if local_steps > 1 and momentum in ("adamw", "muon"):
            return False
        return self.momentum_of_mean or (self.adam_of_mean and momentum in (*ADAPTIVE, "script"))


MixingSchedule: TypeAlias = Turns | ViewSchedule
"""The sequence of mixing matrices that all peers share."""


class DrawSource(Protocol):
    """Gives one peer its random numbers of a round (production: counter-based; replay: from the scenario file)."""

    def draws(self, t: int) -> Draws: ...


LIGHT = 1.0 / 16.0
"""Push-sum weight up to which a message counts as one that hardly moves any peer: most weights are near 1."""


class MomentumRule(Protocol):
    """Turns a gradient into a direction. Implemented in `train.momentum`; see there."""

    @property
    def needs_round(self) -> bool: ...
    @property
    def first_step(self) -> float: ...
    def direction_(self, gradient: FloatArray, z: FloatArray) -> FloatArray: ...
    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None: ...
    def state(self) -> dict[str, npt.NDArray[Any]]: ...
    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None: ...


class NoMomentum:
    """The direction is the gradient."""

    needs_round, first_step = False, 1.0

    def direction_(self, gradient: FloatArray, z: FloatArray) -> FloatArray:
        return gradient

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        """Nothing is kept."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """Everything that stays the same for one peer during a run."""

    peer: int
    schedule: MixingSchedule
    layout: Layout
    draw_source: DrawSource
    compressor: Compressor
    """Set even if the algorithm sends in full precision: then it is `none`."""
    averaging_rate: float = 1.0
    whole_below: int = 0
    """Layers smaller than this are sent whole (see `compress_layers`)."""
    packed: bool = False
    """Whether messages are sent without entropy coding (see `wire.encode`)."""
    push_weight_guard: float = 0.0
    """Scale the local step by min(1, u / guard); 0 turns it off. A starved peer's step in z is γ/u, so without this it
    explodes (measured; the product uses 0.5, replay 0)."""
    drift_gain: Callable[[], float] | None = None
    """Returns β of `drift` for the members that there are; only with `spec.corrects_drift`. None: no correction."""
    rounds: int = 0
    """Rounds of the whole run (SCSP needs to know which are the last)."""
    largest_loss: float = 1e4
    """With which a peer goes on (`guard.max_loss`); see `plausibility`."""
    seed: int = 0
    """Seed of the run; algorithms without rounds draw their partners by it."""
    modulo: ModuloOptions = field(default_factory=ModuloOptions)
    final: FinalRounds = field(default_factory=FinalRounds)
    server: ServerOptions = field(default_factory=ServerOptions)
    low_rank: LowRankOptions = field(default_factory=LowRankOptions)
    in_bfloat16: bool = False
    """Whether copies of models, and error memories, are kept in bfloat16; only of float32 models."""
    outer_rate: float = 1.0
    """How many times as far as γ says the model moves by the mean (`PartitionedAllReduce`)."""
    robust: RobustMixing | None = None
    """Only with `spec.robust_mixing`; None: plain weighted sums."""
    momentum: Callable[[], MomentumRule] = NoMomentum
    """Makes the momentum that acts on the mean of all peers' gradients (`AlgorithmSpec.acts_on_mean`)."""
    shared_copies: SharedCopies | None = None
    """Replicas that all peers of one process have in common; None: each peer keeps its own."""
    imposed: dict[int, Payload] = field(default_factory=dict)
    """Round → payload that this peer sent in it before a crash. Where arithmetic is not repeatable, the repeated round
    sends it in place of the compressor's output, since the others have it already."""
    imposed_parts: dict[tuple[int, int, int], Payload] = field(default_factory=dict)
    """(round, phase, receiver) → the same, for messages in parts, where every receiver gets its own."""

    def kept_zeros(self, x: FloatArray) -> Kept:
        """Return as many zeros as `x` has numbers, of the type in which this run keeps copies and error memories."""
        if self.in_bfloat16 and x.dtype != np.float32:
            raise ValueError(f"what belongs to a model of {x.dtype} cannot be kept in bfloat16, only that of float32")
        return np.zeros(x.size, np.uint16 if self.in_bfloat16 else x.dtype)


@dataclass(frozen=True)
class Exchange:
    """One step of a round: messages to send, and those to await before `advance` may be called."""

    sends: Mapping[int, Message]
    """Receiver → message. Receivers that get the same payload share the payload objects."""
    awaits: frozenset[int]
    """Peers whose message of this round and phase is needed; may be empty."""
    phase: int = 0


@dataclass(frozen=True)
class Metrics:
    """Health figures of an algorithm after a round; None if a figure does not apply."""

    push_weight: float = 1.0
    error_norm: float | None = None
    """‖δ‖₂ of the error memory."""
    replica_error: float | None = None
    """‖x̃ − x̂‖₂ between the own model and the replica that the others hold of it."""
    neighbor_distance: float | None = None
    """Mean of ‖z_j − z_i‖₂ over the neighbours heard in this round: a local estimate of the consensus distance."""
    repairs: int = 0
    """Modulo layers that had to be repaired so far."""
    theta: float | None = None
    """The largest θ in use."""


class Algorithm(ABC):
    """One peer's side of a synchronous gossip algorithm. See the module docstring for the order of calls."""

    spec: ClassVar[AlgorithmSpec]
    message_kind: ClassVar[MessageKind] = MessageKind.GOSSIP
    """Kind of a round's messages. PART: messages have sizes of their own, which `check_part` judges."""

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        """Start from `x0: float32[n]` or `float64[n]`, which is copied."""
        self.node = node
        self.x = np.array(x0, copy=True)
        self.u = 1.0
        self.reaches = Reaches(node.peer, node.layout.size, node.largest_loss, spread=1e30)
        """How far messages have reached: any may, until somebody judges them."""
        self.left_out: frozenset[int] = frozenset()
        """Receivers that get no weight in the coming round, or the one under way; this peer keeps it. Only with
        push-sum, where a column is its sender's own. Set before `begin`."""
        self._t, self._u_sent = -1, 1.0
        """The round under way or over, and the push-sum weight that its messages told."""
        self._own: Payload = ()
        """What this peer sent in it."""
        self._heard: Mapping[int, Message] = {}
        """The messages that it was mixed with."""

    def model(self) -> FloatArray:
        """Return z, the de-biased model to train on, evaluate and export. The caller must not write to it."""
        if not self.spec.push_sum or self.u == 1.0:
            return self.x
        z: FloatArray = self.x / self.x.dtype.type(self.u)
        return z

    def wants_gradient(self, t: int) -> bool:
        """Return whether round t has a local step (not in SCSP's last rounds)."""
        return True

    @abstractmethod
    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        """Take the local step of round t and return the first exchange.

        `gradient: float[n]` is G at `model()`, momentum and weight decay included, summed over the local steps;
        `rate` is γ. Without a local step `gradient` is all zeros and `rate` 0.
        """

    @abstractmethod
    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        """Take the awaited messages (sender → message); return the next exchange, or None when the round is done.

        With a driver that goes on without late peers, `inbox` may lack some of `awaits`, if `spec.tolerates_late`.
        """

    # Rules for what an honest neighbour may send (`gossip.judge`).

    def hears(self, t: int, sender: int) -> bool:
        """Return whether an honest `sender` has a message for this peer in round t."""
        return sender in self.node.schedule.senders(t, self.node.peer)

    def phases_from(self, sender: int) -> tuple[int, ...]:
        """Return the phases of a round in which `sender` may have a message for this peer."""
        return (0,)

    def weights_from(self, t: int, sender: int) -> tuple[float, ...]:
        """Return the mixing weights that an honest `sender` may tell in its message of round t."""
        return (self.node.schedule.weight(t, self.node.peer, sender),)

    def check_codes(self, message: Message) -> None:  # noqa: B027 (most can read any payload that `check_layers` lets by)
        """Raise RemoteProtocolError unless the payload of a round can be read with this run's settings."""

    def check_part(self, message: Message) -> None:  # noqa: B027 (most send all layers of the layout)
        """Raise RemoteProtocolError unless a PART has as many numbers as the sender has for this peer in its round and
        phase. The sender is a member of that round."""

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        """Return how far a message of a round can move a model, ‖·‖₂ (`plausibility`): a neighbour's, or an own one to
        a receiver. `rate`: γ of that round.

        Of a model, its norm. It counts by its push-sum weight: one far below the own, or below `LIGHT`, moves little,
        however far its z is away, as that of a newcomer that was given next to nothing and has made a step.
        """
        return self._counted(norm(message.layers), message.push_weight)

    def _counted(self, length: float, push_weight: float) -> float:
        """Return how far a message of that norm and push-sum weight reaches."""
        return length / max(push_weight, self.u / 4.0, LIGHT)

    def shortened(self, t: int, gradient: FloatArray, rate: float) -> FloatArray:
        """Return the gradient of round t, or a share of it where the own model would reach too far by it. `rate`: γ, as
        z moves."""
        number = gradient.dtype.type
        share = self.reaches.share_within(t, self.model(), lambda: number(-rate) * gradient)
        return gradient if share == 1.0 else number(share) * gradient

    def unsent(self) -> Mapping[int, Message]:
        """Return, after `begin`, what this peer adds itself to what it is going to send, as a message to itself."""
        return {}

    def check_repair(self, repair: Message) -> None:
        """Raise RemoteProtocolError unless a repair can be applied. In algorithms whose rounds ask for repairs, the
        exchange under way waits for it."""
        raise RemoteProtocolError("sent a repair in an algorithm that has none", peer=repair.sender)

    # Calls that may come at any time.

    def absorb_late(self, message: Message) -> None:
        """Apply the message of an earlier round that `advance` went on without.

        Called between rounds (before `begin`), in order of the message's round, then of its sender.
        """
        raise NotImplementedError(f"{self.spec.name} cannot go on without a neighbour")

    def without(self, peer: int) -> None:
        """Go on without a peer that is lost for good. Called between rounds.

        Without push-sum, values put back for a message that did not come stay. Most algorithms keep nothing of anybody.
        """
        if not self.spec.changes_members:
            raise NotImplementedError(f"{self.spec.name} cannot lose a peer")

    def take_back(self, unreceived: Sequence[Message]) -> None:
        """Add back the mass of own messages that a lost peer never got, as if this peer had kept it.

        Called between rounds, after `without`, perhaps some rounds later. Only with push-sum.
        """
        for message in unreceived:
            self.absorb_late(message)

    def start_anew(self) -> None:  # noqa: B027 (most keep nothing that speaks of the graph)
        """Forget all state tied to the former members: from the next round on, members and schedule are others."""

    def shrunk_(self, scale: float) -> None:  # noqa: B027 (most keep nothing that goes with x)
        """Note that x was multiplied by `scale`, because a joining peer got the rest."""

    def answer(self, request: Message) -> Message:
        """Return the answer to a request that may come at any time (repair of a modulo code). Changes nothing. Raises
        RemoteProtocolError for one that an honest peer would not make."""
        raise RemoteProtocolError(f"asks for a repair, and {self.spec.name} has none", peer=request.sender)

    def use_compressor(self, compressor: Compressor) -> None:
        """Compress with other settings of the same compressor from the next round on. Called between rounds."""
        self.node = replace(self.node, compressor=compressor)

    def metrics(self) -> Metrics:
        """Return the health figures of the last completed round."""
        return Metrics(push_weight=self.u, neighbor_distance=self._neighbor_distance())

    def _neighbor_distance(self) -> float | None:
        """Return the mean over the neighbours heard of ‖c_j / u_j − c_i / u_i‖₂, or None if none was heard; with robust
        mixing, over those that are not taken to lie."""
        layout, distances = self.node.layout, []
        for message in in_sender_order(self.node.peer, self._heard):
            if message is not None and message.push_weight > 0.0:
                difference = decompress_layers(message.layers, layout, self.x.dtype)
                difference /= difference.dtype.type(message.push_weight)
                add_decompressed_(difference, self._own, layout, -1.0 / self._u_sent)
                distances.append(float(np.linalg.norm(difference)))
        return mean_distance(self.node, distances)

    def state(self) -> dict[str, FloatArray | npt.NDArray[Any]]:
        """Return everything that must survive a crash between two rounds, as named arrays (scalars as float64[1])."""
        return {"x": self.x, "u": np.array([self.u])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`. Raises KeyError or ValueError if it does not fit."""
        x = state["x"]
        if x.shape != self.x.shape or x.dtype != self.x.dtype:
            raise ValueError(f"x has shape {x.shape} and type {x.dtype}, expected {self.x.shape}, {self.x.dtype}")
        self.x = np.array(x, copy=True)
        self.u = float(state["u"][0])

    def transport_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return state that must survive a crash only because others may still ask for it (Moniqua's repair sources).

        Kept apart from `state` because it is a buffer of the transport, not state of the algorithm.
        """
        return {}

    def restore_transport(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `transport_state`."""
        del state  # Nothing is kept by default.


def in_sender_order(peer: int, inbox: Mapping[int, Message]) -> Iterator[Message | None]:
    """Yield the messages by their senders, ascending, None in the peer's own place; those of NOTHING are left out."""
    for sender in sorted({*inbox, peer}):
        if sender == peer:
            yield None
        elif inbox[sender].kind is not MessageKind.NOTHING:
            yield inbox[sender]


def mean_distance(node: NodeContext, distances: list[float]) -> float | None:
    """Return the mean of distances to neighbours, None if there is none.

    With robust mixing the largest are left out: the guard acts on this figure, and no liar is to end a peer by it.
    """
    if node.robust is not None:
        ascending = sorted(distance if distance < math.inf else math.inf for distance in distances)
        distances = ascending[: max(0, len(ascending) - node.robust.attackers)]
    return sum(distances) / len(distances) if distances else None
