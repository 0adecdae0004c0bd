"""A bandwidth budget: messages small enough to keep every link of a peer below a number of bytes per second.

The budget turns down the compressor's own setting: the fraction that top_k and random_k keep, or the bits of qsgd and
modulo. The algorithm need not know, because every payload says how it was made and its error feedback keeps the rest.
Two mechanisms work together:

- A token bucket for each link. It is empty at first, fills at nearly the budget, holds `BURST_S` seconds of it, and a
  round may begin while no bucket is in debt. A message may be larger than the bucket's level; the debt is waited for
  afterwards. In any T seconds a link thus carries at most budget · (T + BURST_S) bytes and one message more, and from
  the beginning on budget · T and one message, whatever the second mechanism does.
- A decision in every `EVERY`-th round, meant to make that wait unnecessary. It takes the largest variant of the
  compressor whose messages, judging by the last rounds, fit into budget × (seconds of a round without the wait).

All receivers of a round share one payload, so that the link with the most bytes decides. If not even the smallest
variant fits, the peer waits, and slows down.

Decisions follow the clock, and are therefore state: `state` holds them, and a driver that may have to repeat rounds
keeps every decision before it sends the resulting messages, and gives it back with `replay`. Here, too, the time is an
argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.modulo import Modulo
from peer.compress.qsgd import Qsgd
from peer.compress.random_k import RandomK
from peer.compress.top_k import TopK

BURST_S = 1.0
"""Seconds of its budget that a quiet link may send at once."""

EVERY = 4
"""Rounds from one decision to the next: a decision is kept on disk before anything is sent by it."""

FILLING = 0.97
"""Fraction of the budget at which the bucket fills. The rest is for link-layer headers, which are not counted here (14
bytes a packet on Ethernet: 1 % of full packets)."""

HEADROOM = 0.95
"""Fraction of the budget that messages are chosen to use, so that rounds that vary need not wait."""

REFILL_S = 4.0
"""Approximate seconds in which a bucket below half refills to half."""

LEAST_FRACTION = 0.125
"""Fraction of the configured setting that the smallest variant keeps: the averaging rate has to suit all variants, and
one that suits much less would slow the run down more than the wait does."""

VARIANTS_PER_HALVING = 8
"""Neighbouring fractions differ by 9 %."""


def variants_of(compressor: Compressor) -> tuple[Compressor, ...]:
    """Return the compressor and its smaller variants, largest first; the compressor alone if it has none."""
    if isinstance(compressor, TopK | RandomK):
        steps = round(-VARIANTS_PER_HALVING * float(np.log2(LEAST_FRACTION)))
        fractions = [compressor.fraction * 2.0 ** (-step / VARIANTS_PER_HALVING) for step in range(steps + 1)]
        return tuple(replace(compressor, fraction=fraction) for fraction in fractions)
    if isinstance(compressor, Qsgd | Modulo):
        found: list[Compressor] = []
        for bits in range(compressor.bits, 0, -1):
            try:
                found.append(replace(compressor, bits=bits))
            except ValueError:
                break  # Stochastic rounding needs two bits.
        return tuple(found)
    return (compressor,)


def nominal_bits(compressor: Compressor, layout: Layout, whole_below: int = 0) -> float:
    """Return the approximate bits of a message, headers and entropy coding left out, for comparing variants."""
    return sum(32.0 * size if size < whole_below else size * compressor.bits_per_value(size) for size in layout.sizes)


@dataclass
class _Link:
    """Account of one link: bytes sent, and bytes that it may still send."""

    level: float = 0.0
    """Bytes in the bucket; below 0: a debt to wait for."""
    handed_over: int = 0
    """Bytes given to the link in frames."""
    measured: int = 0
    """Bytes that the kernel counted, which lag behind and include everything."""
    charged: int = 0
    """Bytes taken out of the bucket: the larger of the two."""
    since_decision: int = 0


class BandwidthBudget:
    """The buckets of one peer's outgoing links, and the compressor variant that its rounds use."""

    def __init__(self, bytes_per_s: float, links: Collection[int], costs: Sequence[float]) -> None:
        """`costs` are the nominal sizes of the variants, falling; only their ratios count."""
        if not bytes_per_s > 0.0 or not costs or any(not cost > 0.0 for cost in costs):
            raise ValueError("a budget and the sizes of messages are numbers above 0")
        self.bytes_per_s = bytes_per_s
        self.variant = 0
        """Position of the variant in use."""
        self._costs = np.log(np.array(costs))
        self._sizes = np.full(len(costs), np.nan)
        """Logarithm of the bytes that a round of each variant took, NaN if it has not been tried."""
        self._capacity = bytes_per_s * BURST_S
        self._links = {link: _Link() for link in sorted(links)}
        self._filled_at: float | None = None
        self._begun_at: float | None = None
        self._busy_s, self._rounds = 0.0, 0
        self._round_s: float | None = None

    @property
    def is_least(self) -> bool:
        """Whether messages cannot be made any smaller."""
        return self.variant == len(self._costs) - 1

    def ready(self, t: int, now: float) -> float:
        """Choose the variant of round t, which could begin now; return when it may begin, and has to."""
        self._fill(now)
        if self._begun_at is not None:
            self._busy_s += max(0.0, now - self._begun_at)
            self._rounds += 1
        if t % EVERY == 0:
            self.variant = self._decide()
            self._busy_s, self._rounds = 0.0, 0
            for link in self._links.values():
                link.since_decision = 0
        debt = max((-link.level for link in self._links.values()), default=0.0)
        self._begun_at = now + max(0.0, debt) / (FILLING * self.bytes_per_s)
        return self._begun_at

    def sent(self, link: int, num_bytes: int) -> None:
        """Note a frame that is handed to a link."""
        if link in self._links:
            self._links[link].handed_over += num_bytes
            self._charge(self._links[link])

    def measured(self, link: int, total_bytes: int) -> None:
        """Note the bytes counted on a link in all, since this object was made or restored."""
        if link in self._links:
            self._links[link].measured = max(total_bytes, self._links[link].measured)
            self._charge(self._links[link])

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state that must survive a crash between two rounds."""
        return {
            "variant": np.array([self.variant], np.int64),
            "sizes": self._sizes,
            "links": np.array(sorted(self._links), np.int64),
            "levels": np.array([link.level for link in self._links.values()]),
            "since_decision": np.array([link.since_decision for link in self._links.values()], np.int64),
            "times": np.array(
                [self._busy_s, self._rounds, _or_nan(self._round_s), _or_nan(self._filled_at), _or_nan(self._begun_at)]
            ),
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`; measuring starts at 0 again. Raises KeyError or ValueError."""
        variant, times = int(state["variant"][0]), [float(value) for value in state["times"]]
        if state["links"].tolist() != sorted(self._links) or state["sizes"].shape != self._costs.shape:
            raise ValueError("the saved budget belongs to other links or another compressor")
        self.variant, self._sizes = variant, np.array(state["sizes"], np.float64)
        for link, level, since in zip(
            self._links, state["levels"].tolist(), state["since_decision"].tolist(), strict=True
        ):
            self._links[link] = _Link(level=level, since_decision=since)
        busy_s, rounds, *optional = times
        self._busy_s, self._rounds = busy_s, int(rounds)
        self._round_s, self._filled_at, self._begun_at = (None if np.isnan(value) else value for value in optional)

    def _fill(self, now: float) -> None:
        if self._filled_at is not None:
            gained = max(0.0, now - self._filled_at) * FILLING * self.bytes_per_s
            for link in self._links.values():
                link.level = min(self._capacity, link.level + gained)
        self._filled_at = now

    def _charge(self, link: _Link) -> None:
        due = max(link.handed_over, link.measured) - link.charged
        link.charged += due
        link.level -= due
        link.since_decision += due

    def _decide(self) -> int:
        if not self._rounds or not self._links:
            return self.variant
        seconds = self._busy_s / self._rounds
        self._round_s = seconds if self._round_s is None else 0.5 * (self._round_s + seconds)
        lowest = min(link.level for link in self._links.values())
        missing = max(0.0, 0.5 * self._capacity - lowest)
        allowed = (HEADROOM * self.bytes_per_s - missing / REFILL_S) * self._round_s
        used = max(link.since_decision for link in self._links.values()) / self._rounds
        if used > 0.0:
            self._learn(float(np.log(used)))
        fitting = np.flatnonzero(self._expected_sizes() <= np.log(max(allowed, 1.0)))
        return int(fitting[0]) if fitting.size else self._costs.size - 1

    def _learn(self, size: float) -> None:
        """Note the size of a round with the variant in use; a change of it changes the others' sizes alike."""
        known = self._sizes[self.variant]
        if not np.isnan(known):
            self._sizes += size - known
        self._sizes[self.variant] = size

    def _expected_sizes(self) -> npt.NDArray[np.float64]:
        """Return the logarithm of the bytes a round would take with each variant.

        Between two variants that were tried, sizes are interpolated linearly, since entropy coding makes them fall
        differently from the nominal ones. Beyond them, sizes are proportional to the nominal ones.
        """
        tried = np.flatnonzero(~np.isnan(self._sizes))
        if not tried.size:
            return np.full_like(self._sizes, -np.inf)
        costs, ratios = self._costs[tried][::-1], (self._sizes - self._costs)[tried][::-1]
        expected: npt.NDArray[np.float64] = self._costs + np.interp(self._costs, costs, ratios)
        return expected


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
