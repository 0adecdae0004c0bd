"""The records of a run: the criterion that compares its models, their form, the figures of a round, and its progress.

Values without a home in any layer: drivers fill them in, and everything above reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

Better = Literal["higher", "lower"]


ADAPTIVE = ("adam", "adamw", "muon")
"""Kinds of momentum whose steps are as long as the learning rate says, however long gradients are."""


@dataclass(frozen=True)
class Criterion:
    """A figure, and which values of it are better."""

    name: str
    better: Better = "higher"

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of at least one value; NaN is worse than any other."""
        return min(values, key=self.rank)

    def rank(self, value: float) -> float:
        """Return a number that is larger for a better value."""
        if math.isnan(value):
            return -math.inf
        return value if self.better == "higher" else -value


ACCURACY = Criterion("accuracy")
"""The fraction of the samples that a model gets right, by which tasks without metrics of their own are judged."""


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """The names under which a flat vector, and what a peer holds beside it, are a model's state_dict."""

    trained: Mapping[str, tuple[int, ...]]
    """Exchanged parameters and their shapes, in the order of the vector."""
    private: tuple[str, ...]
    """Parameters that are trained and stay on their device."""
    entries: Mapping[str, str]
    """Entry of the state_dict → parameter or buffer that it holds. Entries of tied parameters hold the same one."""
    without: tuple[str, ...]
    """Parameters and buffers that the state_dict in float32 lacks."""


ModelParts: TypeAlias = tuple[ModelForm, Mapping[str, Any]]
"""The form of a model, and the tensors, by name, that neither training nor a batch changes."""


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One peer's figures of one round. Bytes are those that left this peer in this round."""

    peer: int
    round: int
    time_s: float
    """Seconds since the run began (virtual seconds in a simulation), at the end of the round."""
    loss: float | None = None
    """Mean training loss of the local steps; None in a round without one."""
    rate: float = 0.0
    """γ of the round."""
    messages: int = 0
    values: int = 0
    """Parameters described by the messages sent (a message of a model of n parameters counts n)."""
    payload_bytes: int = 0
    """Bytes of the frames' layers, without header and checksum."""
    frame_bytes: int = 0
    """Bytes of whole frames."""
    protobuf_bytes: int = 0
    """Bytes of frames in their chunks, as handed to gRPC; receipts, heartbeats and bulletins included."""
    entropy_bits: float = 0.0
    """Lower bound of the payload, in bits (`wire.entropy_bound_bits`); 0 in the rounds in which it was not taken."""
    train_s: float = 0.0
    gossip_s: float = 0.0
    """Seconds of algorithm, compression, encoding and decoding."""
    wait_s: float = 0.0
    """Seconds of waiting for neighbours."""
    cpu_s: float = 0.0
    """CPU seconds of the whole process in this round."""
    late: int = 0
    """Neighbours that this round went on without."""
    push_weight: float = 1.0
    error_norm: float | None = None
    replica_error: float | None = None
    neighbor_distance: float | None = None
    repairs: int = 0
    theta: float | None = None
    fraction: float | None = None
    """top_k, random_k: fraction of each layer that was sent (a bandwidth budget lets it vary)."""
    bits: int | None = None
    """qsgd, modulo: bits of each number (a bandwidth budget lets them vary)."""
    exchanges: int = 0
    """Asynchronous algorithms, whose rounds are single gradient steps: exchanges with neighbours since the last one."""
    staleness: float | None = None
    """Asynchronous algorithms: exchanges between reading the model and applying the gradient computed there."""


@dataclass(frozen=True, kw_only=True)
class PeerProgress:
    """Last known state of one peer. Bytes are those that it has sent since the run began."""

    name: str
    round: int = 0
    """Completed rounds."""
    loss: float | None = None
    """Training loss of the last round."""
    figure: float | None = None
    """Figure of its own model on the common test set, by the criterion of the run; as of the last evaluation."""
    payload_bytes: int = 0
    frame_bytes: int = 0
    socket_bytes: int | None = None
    """None if the kernel's counters are not at hand (a simulation)."""
    values: int = 0
    """Parameters described by its messages so far; times 4 bytes, the cost of full precision."""
    neighbors_up: int = 0
    """Neighbours with a living connection."""
    neighbors: int = 0
    """Neighbours of the whole schedule, in either direction."""
    state: str = "starting"
    """starting, connecting, training, waiting, finished, stopped, diverged, lost."""

    def after(self, record: RoundRecord) -> PeerProgress:
        """Return the state after a round more."""
        return replace(
            self,
            round=record.round + 1,
            loss=self.loss if record.loss is None else record.loss,
            payload_bytes=self.payload_bytes + record.payload_bytes,
            frame_bytes=self.frame_bytes + record.frame_bytes,
            values=self.values + record.values,
        )


ONE_PROCESS = "one process on all data"
"""The activity behind the last round: training that the run is compared with."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The whole run at one moment."""

    phase: str
    """The present activity: "preparing", "starting peers", "training", `ONE_PROCESS`."""
    rounds: int
    """Rounds of the whole run; 0 while only a training script knows."""
    elapsed_s: float
    """Real seconds since the run began, or was resumed."""
    begun_at_round: int = 0
    """Rounds that had been completed at `begun_at_s`: the first of this process is over then, which waits for all."""
    begun_at_s: float = 0.0
    peers: tuple[PeerProgress, ...] = ()
    ready: int | None = None
    """Number of peers that can begin; None if none is awaited any more."""
    criterion: Criterion = ACCURACY
    """The figure by which models are compared."""
    averaged_figure: float | None = None
    consensus_distance: float | None = None
    virtual_s: float | None = None
    """Seconds on the virtual clock of a simulation."""

    @property
    def activity(self) -> str:
        """The phase, and the number of peers known to be able to begin."""
        return self.phase if self.ready is None else f"{self.phase} {self.ready}/{len(self.peers)}"

    @property
    def round(self) -> int:
        """Rounds that every peer has completed."""
        return min((peer.round for peer in self.peers), default=0)

    @property
    def payload_bytes(self) -> int:
        return sum(peer.payload_bytes for peer in self.peers)

    @property
    def reduction(self) -> float | None:
        """Full-precision bytes of the same messages over payload bytes; None before the first message."""
        payload = self.payload_bytes
        return 4 * sum(peer.values for peer in self.peers) / payload if payload else None

    @property
    def worst_figure(self) -> float | None:
        """Figure of the worst peer, once all have been evaluated."""
        known = [peer.figure for peer in self.peers if peer.figure is not None]
        return self.criterion.worst(known) if known and len(known) == len(self.peers) else None
