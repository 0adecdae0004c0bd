"""The precision that a device chose where `training.precision` is "fastest", and the times that decided it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Final, Literal, get_args

from pydantic import Field, TypeAdapter

Precision = Literal["float32", "bfloat16", "int8"]
"""Arithmetic of a model."""

FASTEST: Final = "fastest"
"""The value of `training.precision` with which each device chooses."""
ALL_PEERS = "all peers"
"""Stands in the place of a name where one process measured for all."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision that was chosen on a device."""

    precision: Precision
    step_s: Mapping[Precision, Seconds] = field(default_factory=dict)
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
        return asdict(self)

    @classmethod
    def of_document(cls, tree: object) -> PrecisionChoice:
        """Read the object that `document` described. Raises ValueError for anything else."""
        return _CHOICE.validate_python(tree)


_CHOICE = TypeAdapter(PrecisionChoice)


def readable_choices(documents: Mapping[str, object]) -> dict[str, PrecisionChoice]:
    """Return name of a device → its choice, of those whose document is one."""
    found = {}
    for name, tree in documents.items():
        with contextlib.suppress(ValueError):
            found[name] = PrecisionChoice.of_document(tree)
    return found
