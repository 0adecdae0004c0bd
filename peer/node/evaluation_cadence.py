"""Rounds after which a model is evaluated, and those of them after which the others are told."""

from __future__ import annotations

from peer.config.options import EvaluationOptions


def is_evaluated(options: EvaluationOptions, done: int, rounds: int) -> bool:
    """Return whether a peer evaluates its model when it has done so many of the run's `rounds`: always at the end."""
    return _is_due(options.every_rounds, done, rounds)


def is_shared(options: EvaluationOptions, done: int, rounds: int) -> bool:
    """Return whether that evaluation is passed on to the other peers."""
    return _is_due(options.every_rounds * options.share_every, done, rounds)


def _is_due(every: int, done: int, rounds: int) -> bool:
    return done == rounds or (every > 0 and done % every == 0)
