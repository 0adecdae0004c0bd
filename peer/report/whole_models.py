"""References for a run's bytes: other ways to train the same model, which send it whole as float32 numbers."""

from __future__ import annotations

from dataclasses import dataclass

from peer.state.metrics import Summary

WHOLE_MODELS = "whole float32 models in every round"
"""The reference of "saved" in every table, to the same receivers."""

_SYNCED_EVERY = (8, 32)
"""Rounds between two means of local SGD, as `sotto lab plan` compares them."""


@dataclass(frozen=True)
class Reference:
    """Another way to train."""

    name: str
    what: str
    num_bytes: int
    """Bytes of all peers in the whole run."""


def reduction(summary: Summary, num_bytes: int | None) -> float | None:
    """Return the bytes of whole float32 models in every round over `num_bytes`; None where either is 0 or unknown."""
    if not num_bytes or not summary.full_precision_payload_bytes:
        return None
    return summary.full_precision_payload_bytes / num_bytes


def references(summary: Summary) -> list[Reference]:
    """Return the bytes of other ways in as many rounds, computed: numbers only, without headers."""
    found = []
    if summary.full_precision_payload_bytes:
        what = "to the same receivers"
        found.append(Reference(WHOLE_MODELS.capitalize(), what, summary.full_precision_payload_bytes))
    rounds = summary.completed_rounds or summary.rounds
    what = "exact mean of all models by a ring of float32 messages"
    for every in (1, *_SYNCED_EVERY):
        often = "in every round" if every == 1 else f"every {every} rounds"
        found.append(Reference(f"Local SGD, mean {often}", what, _mean_bytes(summary) * (rounds // every)))
    found.append(Reference("local", "each peer trains alone", 0))
    return found


def equal_interval(summary: Summary) -> float | None:
    """Return the rounds between two means with which local SGD sends as much as this run did; None if either sends
    nothing."""
    total = _mean_bytes(summary) * (summary.completed_rounds or summary.rounds)
    return total / summary.payload_bytes if total and summary.payload_bytes else None


def _mean_bytes(summary: Summary) -> int:
    # 2 (n − 1) hops, in each of which every peer passes on one n-th of the model.
    return 2 * (summary.num_peers - 1) * 4 * summary.parameters
