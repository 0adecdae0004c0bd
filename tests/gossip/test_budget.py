"""The bandwidth budget on a clock of numbers: what it lets through, what it chooses, what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from peer.compress import build
from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.payload import Rounding
from peer.gossip.budget import BURST_S, FILLING, LEAST_FRACTION, BandwidthBudget, nominal_bits, variants_of

HALVING = tuple(1000.0 * 2 ** (-step / 8) for step in range(25))
LINKS = (3, 5)


@dataclass
class Driver:
    """Runs rounds: messages of `size(variant)` bytes to every link, `busy(t)` seconds of other things."""

    budget: BandwidthBudget
    size: Callable[[int], int]
    busy: Callable[[int], float] = lambda t: 0.1
    now: float = 0.0
    t: int = 0
    log: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, bytes for one link, variant) of every round."""

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.now = self.budget.ready(self.t, self.now)
            num_bytes = self.size(self.budget.variant)
            for link in LINKS:
                self.budget.sent(link, num_bytes)
            self.log.append((self.now, num_bytes, self.budget.variant))
            self.now += self.busy(self.t)
            self.t += 1

    @property
    def variants(self) -> list[int]:
        return [variant for _, _, variant in self.log]

    def waited(self, start: int = 0) -> float:
        """Return how much longer the rounds from `start` on took than they were busy."""
        return self.now - self.log[start][0] - sum(self.busy(t) for t in range(start, self.t))


def proportional(cost: float = 10.0) -> Callable[[int], int]:
    return lambda variant: int(cost * HALVING[variant])


def windows(log: list[tuple[float, int, int]], seconds: float) -> Iterator[tuple[int, int]]:
    """Yield (bytes, largest message) of every window of so many seconds that begins with a message."""
    for first, (start, _, _) in enumerate(log):
        sizes = [size for time, size, _ in log[first:] if time <= start + seconds]
        yield sum(sizes), max(sizes)


def test_messages_become_just_small_enough() -> None:
    # 10 kB in 0.1 s rounds are 100 kB/s.
    driver = Driver(BandwidthBudget(40_000, LINKS, HALVING), proportional())
    driver.run(200)
    settled = driver.log[100:]
    rate = sum(size for _, size, _ in settled) / (driver.now - settled[0][0])
    assert 0.8 * 40_000 < rate <= 40_000
    assert driver.waited(100) == pytest.approx(0.0, abs=1e-9)
    assert min(driver.variants[100:]) > 0


def test_a_budget_that_is_not_needed_changes_nothing() -> None:
    driver = Driver(BandwidthBudget(200_000, LINKS, HALVING), proportional())
    driver.run(100)
    assert set(driver.variants) == {0}
    assert driver.waited() == pytest.approx(0.0, abs=1e-9)


def test_where_the_smallest_message_is_too_large_the_peer_slows_down() -> None:
    driver = Driver(BandwidthBudget(5_000, LINKS, HALVING), proportional())
    driver.run(100)
    assert driver.budget.is_least
    # 1,250 bytes at 5,000 a second: a quarter of a second a round in place of a tenth.
    seconds = (driver.log[-1][0] - driver.log[50][0]) / 49
    assert seconds == pytest.approx(0.25 / FILLING, rel=0.01)


@pytest.mark.parametrize("budget", [1_000, 5_000, 40_000, 90_000])
@pytest.mark.parametrize("seconds", [0.5, 3.0, 20.0])
def test_no_window_holds_more_than_the_budget_a_burst_and_one_message(budget: float, seconds: float) -> None:
    rng = np.random.default_rng(3)
    times = rng.exponential(0.1, 400)
    driver = Driver(BandwidthBudget(budget, LINKS, HALVING), proportional(), lambda t: float(times[t]))
    driver.run(400)
    for total, largest in windows(driver.log, seconds):
        assert total <= budget * (seconds + BURST_S) + largest
    # Over the whole run there is no burst.
    assert sum(size for _, size, _ in driver.log[:-1]) <= budget * driver.log[-1][0]


def test_slow_rounds_bring_large_messages_back() -> None:
    slow = range(200, 320)
    driver = Driver(BandwidthBudget(40_000, LINKS, HALVING), proportional(), lambda t: 1.0 if t in slow else 0.1)
    driver.run(500)
    before, during, after = driver.variants[150], driver.variants[310], driver.variants[450]
    assert before > 0
    assert during == 0
    assert abs(after - before) <= 1
    assert driver.waited(400) == pytest.approx(0.0, abs=1e-9)


def test_sizes_that_do_not_follow_the_nominal_ones_are_learned() -> None:
    # Entropy coding: the larger variants hardly differ, the smaller ones fall fast.
    sizes = (10_000, 9_900, 9_700, 9_000, 4_000, 1_000)
    costs = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    driver = Driver(BandwidthBudget(80_000, LINKS, costs), sizes.__getitem__)
    driver.run(200)
    # 4,000 bytes in 0.1 s fit, 9,000 do not: no going back and forth between the two.
    assert set(driver.variants[100:]) == {4}


def test_the_fullest_link_decides() -> None:
    budget = BandwidthBudget(40_000, LINKS, HALVING)
    now = 0.0
    for t in range(100):
        now = budget.ready(t, now) + 0.1
        budget.sent(3, int(HALVING[budget.variant]))
        budget.sent(5, int(10 * HALVING[budget.variant]))
    alone = Driver(BandwidthBudget(40_000, LINKS, HALVING), proportional())
    alone.run(100)
    assert budget.variant == alone.budget.variant


def test_what_the_kernel_counted_is_charged_and_never_twice() -> None:
    budget = BandwidthBudget(1_000, LINKS, HALVING)
    assert budget.ready(0, 0.0) == 0.0
    budget.sent(3, 900)
    budget.measured(3, 400)  # Half of it still waits in the socket.
    assert budget.ready(1, 0.0) == pytest.approx(0.9 / FILLING)
    budget.measured(3, 1_500)  # All of it, its headers, and what came beside it.
    assert budget.ready(2, 0.0) == pytest.approx(1.5 / FILLING)
    budget.measured(3, 1_500)
    budget.measured(9, 10**9)  # Not one of ours.
    assert budget.ready(3, 0.0) == pytest.approx(1.5 / FILLING)


def test_a_quiet_link_saves_up_one_burst_and_no_more() -> None:
    budget = BandwidthBudget(1_000, LINKS, HALVING)
    budget.ready(0, 0.0)
    budget.ready(1, 3600.0)
    budget.sent(3, 3_000)
    assert budget.ready(2, 3600.0) == pytest.approx(3600.0 + (3.0 - BURST_S) / FILLING)


def test_a_restored_budget_goes_on_identically() -> None:
    rng = np.random.default_rng(8)
    times = rng.exponential(0.1, 300)
    one = Driver(BandwidthBudget(30_000, LINKS, HALVING), proportional(), lambda t: float(times[t]))
    one.run(141)  # Not at a decision.
    state = {name: array.copy() for name, array in one.budget.state().items()}
    other = Driver(BandwidthBudget(30_000, LINKS, HALVING), one.size, one.busy, one.now, one.t)
    other.budget.restore(state)
    one.log.clear()
    one.run(150)
    other.run(150)
    assert one.log == other.log


def test_a_state_of_other_links_or_variants_is_refused() -> None:
    state = BandwidthBudget(1_000, LINKS, HALVING).state()
    with pytest.raises(ValueError, match="other links"):
        BandwidthBudget(1_000, (3,), HALVING).restore(state)
    with pytest.raises(ValueError, match="other links"):
        BandwidthBudget(1_000, LINKS, HALVING[:3]).restore(state)
    for arguments in ((0.0, LINKS, HALVING), (1.0, LINKS, ()), (1.0, LINKS, (1.0, 0.0))):
        with pytest.raises(ValueError, match="above 0"):
            BandwidthBudget(*arguments)


@pytest.mark.parametrize(
    ("compressor", "count"),
    [
        (build("top_k", fraction=0.02, value_bits=4), 25),
        (build("random_k", fraction=0.02, unbiased=True), 25),
        (build("qsgd", bits=8), 8),
        (build("modulo", bits=6, rounding=Rounding.STOCHASTIC), 5),
        (build("modulo", bits=3), 3),
        (build("none"), 1),
        (build("sign"), 1),
    ],
)
def test_variants_are_the_same_compressor_ever_smaller(compressor: Compressor, count: int) -> None:
    layout = Layout.of_sizes((100_000, 10))
    variants = variants_of(compressor)
    assert variants[0] == compressor
    assert len(variants) == count
    assert {(v.kind, v.unbiased) for v in variants} == {(compressor.kind, compressor.unbiased)}
    sizes = [nominal_bits(variant, layout) for variant in variants]
    assert all(a > b for a, b in pairwise(sizes))


def test_a_fraction_falls_to_an_eighth() -> None:
    assert variants_of(build("top_k", fraction=0.08))[-1].fraction == pytest.approx(0.08 * LEAST_FRACTION)  # type: ignore[attr-defined]
