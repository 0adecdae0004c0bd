"""Events for a training script while it trains. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """A round of this peer is complete."""

    round: int
    """Rounds completed, this one included."""
    loss: float | None
    """Mean of what `Peer.step` was given in this round; None if that was nothing."""
    neighbor_distance: float | None
    """Mean distance to the models of the neighbours; None in algorithms that do not see them."""
    push_weight: float
    """The push-sum weight u; 1 in algorithms without one."""
    sent_bytes: int
    """Size of the messages of the round."""
    wait_s: float
    """Time in which neighbours were waited for."""


@dataclass(frozen=True, kw_only=True)
class PeersLate:
    """A round has waited for `rounds.late_after_s` for some peers, or was completed without them."""

    round: int
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemberChange:
    """A peer joins or leaves the run, or is lost."""

    name: str
    kind: Literal["join", "leave", "loss"]
    round: int
    """The first round to which the change applies."""


@dataclass(frozen=True, kw_only=True)
class Rejoined:
    """This peer was declared lost, and takes part again: another peer's model is in the parameters, and the steps
    since the last exchange are no part of the run."""

    round: int
    """Rounds that the model in the parameters has been through."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model of a peer was measured: this peer's, or another's, as that peer says."""

    name: str
    round: int
    """Rounds that the model has been through."""
    accuracy: float | None
    """Fraction of the test samples that the model gets right, in [0, 1]; None if no sample was judged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Its other figures, by name."""
