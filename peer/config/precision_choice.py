"""The precision that a device chose where `training.precision` is "fastest", and the times that decided it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Precision = Literal["float32", "bfloat16", "int8"]
"""Arithmetic of a model."""

FASTEST: Final = "fastest"
"""The value of `training.precision` with which each device chooses."""
ALL_PEERS = "all peers"
"""Stands in the place of a name where one process measured for all."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision that was chosen on a device."""

    precision: Precision
    step_s: Mapping[Precision, float] = field(default_factory=dict)
    """Median seconds of a training step in each precision that was measured; empty where nothing was to be chosen."""

    @property
    def sentence(self) -> str:
        """The precision, and how much longer a step takes in the others: "int8: 2.1 ms a step, bfloat16 1.30×"."""
        if self.precision not in self.step_s:
            return self.precision
        own = self.step_s[self.precision]
        others = sorted((seconds, name) for name, seconds in self.step_s.items() if name != self.precision)
        parts = [f"{1e3 * own:.3g} ms a step", *(f"{name} {seconds / own:.2f}×" for seconds, name in others)]
        return f"{self.precision}: {', '.join(parts)}"

    def document(self) -> dict[str, object]:
        """Return the choice as JSON has it."""
        return {"precision": self.precision, "step_s": dict(self.step_s)}

    @classmethod
    def of_document(cls, tree: object) -> PrecisionChoice:
        """Read the object that `document` described. Raises ValueError for anything else."""
        if not isinstance(tree, dict) or not isinstance(times := tree.get("step_s", {}), dict):
            raise ValueError("not a choice of precision")
        step_s = {}
        for name, seconds in times.items():
            if not isinstance(seconds, float) or not 0.0 < seconds < float("inf"):
                raise ValueError("a step takes a positive number of seconds")
            step_s[_known(name)] = seconds
        return cls(_known(tree.get("precision")), step_s)


def readable_choices(documents: Mapping[str, object]) -> dict[str, PrecisionChoice]:
    """Return name of a device → its choice, of those whose document is one."""
    found = {}
    for name, tree in documents.items():
        with contextlib.suppress(ValueError):
            found[name] = PrecisionChoice.of_document(tree)
    return found


def _known(name: object) -> Precision:
    for precision in PRECISIONS:
        if name == precision:
            return precision
    raise ValueError("not a precision")
