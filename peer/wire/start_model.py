"""The start model of a run, as digests of its tensors, which two peers compare before they train together.

Parameters, trained and frozen, have to be the same on all peers: the mean of adapters over different bases means
nothing. Buffers are each device's own, so that differing ones are only named. Pure: knows no tensors. A neighbour's
digests take at most 16 kB, and no text of its gets into a sentence: names are this peer's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peer.wire.data_meaning import cut, per_entry

DIGEST_BYTES = 32
ENTRY_BYTES = 8
"""Bytes of an entry: half of them stand for name, type and shape of a tensor, the other half for its values."""
OTHER_BUFFERS = "the model of %s starts with other buffers (%s); each device keeps its own, only parameters are mixed"
_NAMED = 3
_OTHER_VALUES = "other values there"

Entry = tuple[str, bytes, bytes]
"""A tensor's name, and digests of its form and of its values."""


@dataclass(frozen=True)
class Tensors:
    """Short digests of some tensors, in the model's order."""

    entries: bytes = b""
    names: tuple[str, ...] = ()
    """Name of each entry's tensor, or of the first of several; not told."""

    @classmethod
    def of(cls, tensors: Sequence[Entry]) -> Tensors:
        """Return the digests of tensors."""
        each = per_entry(len(tensors))
        runs = [tensors[start : start + each] for start in range(0, len(tensors), each)]
        halves = ((_short(form for _, form, _ in run), _short(values for *_, values in run)) for run in runs)
        names = (run[0][0] if each == 1 else f"{run[0][0]} to {run[-1][0]}" for run in runs)
        return cls(b"".join(form + values for form, values in halves), tuple(names))

    def differences(self, told: bytes) -> str | None:
        """Say where a neighbour's digests differ from these; None if they do not."""
        ours, theirs = (cut(entries, ENTRY_BYTES) for entries in (self.entries, told))
        half = ENTRY_BYTES // 2
        for name, mine, other in zip(self.names, ours, theirs, strict=False):
            if mine[:half] != other[:half]:
                return f"{name} has another name, type or shape there"
        if len(ours) != len(theirs):
            return f"there are {'more' if len(ours) < len(theirs) else 'fewer'} of them there"
        apart = [name for name, mine, other in zip(self.names, ours, theirs, strict=False) if mine != other]
        if not apart:
            return None
        more = f" and {len(apart) - _NAMED} more" if len(apart) > _NAMED else ""
        return f"{', '.join(apart[:_NAMED])}{more} {'has' if len(apart) == 1 else 'have'} {_OTHER_VALUES}"


@dataclass(frozen=True)
class StartModel:
    """A peer's digests of its start model."""

    whole: str
    """Hex SHA-256 over all parameters and buffers, which releases before 0.3 compare."""
    digest: bytes = b""
    """SHA-256 over all parameters, trained and frozen; empty if it is not known."""
    parameters: Tensors = Tensors()
    buffers: Tensors = Tensors()
    advice: str = "compare the task's code and the file training.warm_start on both devices"
    """Remedy where the values of models differ, for a sentence; not told."""

    @classmethod
    def of(cls, whole: str, parameters: Sequence[Entry], buffers: Sequence[Entry]) -> StartModel:
        """Return the digests of a model with these tensors."""
        digest = hashlib.sha256(b"".join(form + values for _, form, values in parameters)).digest()
        return cls(whole, digest, Tensors.of(parameters), Tensors.of(buffers))

    def difference(self, digest: bytes, parameters: bytes) -> str | None:
        """Say where a neighbour's parameters differ from these; None if they are the same. Only the whole digest
        decides: entries are short, and may be anything."""
        if digest == self.digest:
            return None
        return self.parameters.differences(parameters) or "it says not where"

    def remedy(self, difference: str | None) -> str:
        """Return what to do about a difference that `difference` found, or about one that is not known."""
        if difference is None or difference.endswith((_OTHER_VALUES, "not where")):
            return self.advice
        return "build the same model on all devices, by the same script or task with the same options"


def _short(digests: Iterable[bytes]) -> bytes:
    whole = hashlib.sha256(b"".join(digests))
    return whole.digest()[: ENTRY_BYTES // 2]
