"""Input from neighbours that no honest peer sends: counted for each neighbour, logged once for each kind.

Pure. Memory is bounded, however many different sentences a neighbour provokes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

NOTABLE = 3
"""Number of offences from which an operator should look at a neighbour: a single one may come of a memory fault or a
bug."""

_MOST_KINDS = 32
_REST = "any other"
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""The parts of a sentence that its cause does not decide."""


@dataclass
class _Record:
    count: int = 0
    last: str = ""
    kinds: Counter[str] = field(default_factory=Counter)


class Offences:
    """The offences of all neighbours of one peer since its process began."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def count(self, peer: int) -> int:
        """Return how many offences of a neighbour there were."""
        return self._records[peer].count if peer in self._records else 0

    def last(self, peer: int) -> str | None:
        """Return the sentence about the last one; None where there was none."""
        return self._records[peer].last if peer in self._records else None

    def add(self, peer: int, problem: str) -> bool:
        """Count an offence; return whether it is worth a line in the log: the first of its kind is, the tenth, the
        hundredth, and so on."""
        record = self._records.setdefault(peer, _Record())
        record.count, record.last = record.count + 1, problem
        kind = _VARYING.sub("…", problem)
        if kind not in record.kinds and len(record.kinds) >= _MOST_KINDS:
            kind = _REST
        record.kinds[kind] += 1
        return _is_power_of_ten(record.kinds[kind])

    def is_due(self, peer: int) -> bool:
        """Return whether it is time to tell the operator: at NOTABLE offences, at ten times as many, and so on."""
        tens, rest = divmod(self.count(peer), NOTABLE)
        return not rest and _is_power_of_ten(tens)


def advice(name: str) -> str:
    """Return advice for an operator about a neighbour with offences."""
    return (
        f"look at its log; if it cannot be trusted, exclude it: `sotto admin revoke CLUSTER {name}` withdraws its "
        f"certificate, `sotto remove {name}` lets the others continue without it"
    )


def _is_power_of_ten(number: int) -> bool:
    return number > 0 and str(number).strip("0") == "1"
