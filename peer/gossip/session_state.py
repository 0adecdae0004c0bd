"""The state of a session that must survive a crash between two rounds, and its form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LateState:
    """The state of `LateNeighbors` between two rounds, when every late message that came has been applied."""

    missed: frozenset[tuple[int, int]] = frozenset()
    """(round, sender) of messages that a round went on without and that have not come yet."""
    skips_in_a_row: Mapping[int, int] = field(default_factory=dict)
    """Sender → rounds in a row that went on without it."""
    lateness: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Sender → its last latenesses in seconds, oldest first."""
    began_at: Mapping[int, float] = field(default_factory=dict)
    """Round → when the own message of it was ready, for the rounds of which messages are owed."""


@dataclass(frozen=True, kw_only=True)
class SessionState:
    """The state of a `Session` between two rounds, besides that of its algorithm."""

    round: int
    late: LateState = LateState()
    usual_weight: float = 1.0
    applied: tuple[tuple[int, int], ...] = ()
    """(round, sender) of late messages that were applied since the last round ended. Taking the state applies messages
    that have come, and the record of the coming round has to list them."""
    lost: Mapping[int, int] = field(default_factory=dict)
    """Lost peer → the first round without it here."""

    def to_json(self) -> dict[str, object]:
        """Return the state as JSON values."""
        return {
            "round": self.round,
            "missed": sorted(map(list, self.late.missed)),
            "skips_in_a_row": {str(sender): count for sender, count in self.late.skips_in_a_row.items()},
            "usual_weight": self.usual_weight,
            "applied": [list(each) for each in self.applied],
            "deadlines": {str(sender): list(window) for sender, window in self.late.lateness.items()},
            "began_at": {str(round_): began_at for round_, began_at in self.late.began_at.items()},
            "lost": sorted([peer, since] for peer, since in self.lost.items()),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, object]) -> SessionState:
        """Return the state from a result of `to_json`. Keys that the first releases did not write may be missing.
        Raises KeyError, TypeError or ValueError if it cannot be that."""
        usual_weight = state.get("usual_weight", 1.0)
        if not isinstance(usual_weight, float):
            raise TypeError("the usual weight of a session is a float")
        late = LateState(
            missed=frozenset(_pairs(state["missed"])),
            skips_in_a_row={int(sender): _integer(count) for sender, count in _items(state["skips_in_a_row"])},
            lateness={int(sender): _floats(window) for sender, window in _items(state.get("deadlines", {}))},
            began_at={int(round_): _float(at) for round_, at in _items(state.get("began_at", {}))},
        )
        return cls(
            round=_integer(state["round"]),
            late=late,
            usual_weight=usual_weight,
            applied=_pairs(state.get("applied", [])),
            lost=dict(_pairs(state.get("lost", []))),
        )


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def _float(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _floats(value: object) -> Sequence[float]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return list(map(_float, value))


def _pairs(value: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return tuple((_integer(first), _integer(second)) for first, second in value)


def _items(value: object) -> tuple[tuple[str, object], ...]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return tuple(value.items())
