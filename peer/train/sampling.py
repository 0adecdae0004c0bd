"""The samples of a batch: a function of seed, peer and step number, with no position to save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peer.errors import DataError
from peer.random import SHARED, Purpose, Stream, stream

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchDraw:
    """Some samples in the order in which they are drawn."""

    indices: IntArray
    """int64[b], positions in the training set."""
    epochs: IntArray
    """int64[b], how often the peer drew each sample before."""


class ClassQuotas:
    """Draws of each class in a pass over a shard of m samples: m draws in all, in proportion to n_c^(1−α).

    α = 0 draws every sample once. α = 1 draws every class of the shard equally often: it leaves some samples of large
    classes to later passes and repeats those of small ones.
    """

    def __init__(self, classes: IntArray, num_classes: int, *, balance: float | Callable[[int], float] = 0.0) -> None:
        """`classes: int64[m]` is the class of each sample of the shard; `balance` is α, or a function from the number
        of a pass to its α."""
        self.classes, self._balance = classes, balance
        self.counts: IntArray = np.bincount(classes, minlength=num_classes).astype(np.int64)
        """int64[classes], n_c."""
        self._before = 0, np.zeros_like(self.counts)

    def of_pass(self, number: int) -> IntArray:
        """Return int64[classes] with sum m, at least 1 for each class of the shard.

        Shares are rounded down, and up where that loses most: the first of equals first.
        """
        alpha = self._balance(number) if callable(self._balance) else self._balance
        weights = np.where(self.counts > 0, np.power(np.maximum(self.counts, 1.0), 1.0 - alpha), 0.0)
        exact = self.counts.sum() * weights / weights.sum()
        quotas: IntArray = np.floor(exact).astype(np.int64)
        most_lost = np.argsort(quotas - exact, kind="stable")
        quotas[most_lost[: self.counts.sum() - quotas.sum()]] += 1
        return quotas

    def before_pass(self, number: int) -> IntArray:
        """Return int64[classes], the sum over all earlier passes; the last one asked for is kept, so that a run adds
        each pass once."""
        known, drawn = self._before if self._before[0] <= number else (0, np.zeros_like(self.counts))
        for earlier in range(known, number):
            drawn = drawn + self.of_pass(earlier)
        self._before = number, drawn
        return drawn


class BatchSchedule:
    """A peer's shard in passes of m draws: batch k holds positions k·b … (k+1)·b − 1 of the passes put one after the
    other, so a batch may straddle two of them.

    Each pass is a new permutation of the shard; with quotas, of as many samples of each class as they say. Every class
    is dealt without replacement: no sample is drawn again before all others of its class were.
    """

    def __init__(
        self, indices: IntArray, batch_size: int, *, seed: int, peer: int, quotas: ClassQuotas | None = None
    ) -> None:
        """Deal `indices: int64[m]` in batches of `batch_size`. Raises DataError if there are none."""
        if not len(indices):
            raise DataError(f"peer {peer} has no training samples; use more data or fewer peers")
        self.indices, self.batch_size, self._seed, self._peer = indices, batch_size, seed, peer
        self._quotas = quotas
        self._number, self._pass = -1, BatchDraw(indices, np.zeros_like(indices))

    def passes(self, step: int) -> IntArray:
        """Return int64[b], the pass of each draw of a step's batch."""
        first = step * self.batch_size
        return np.arange(first, first + self.batch_size) // len(self.indices)

    def batch(self, step: int) -> BatchDraw:
        """Return the batch of a step, counted from 0 over the whole run."""
        m, first = len(self.indices), step * self.batch_size
        parts = []
        for number in range(first // m, (first + self.batch_size - 1) // m + 1):
            here = slice(max(first - number * m, 0), min(first + self.batch_size - number * m, m))
            whole = self._permuted(number)
            parts.append(BatchDraw(whole.indices[here], whole.epochs[here]))
        return parts[0] if len(parts) == 1 else joined(parts)

    def _permuted(self, number: int) -> BatchDraw:
        """Return the draws of a pass; the last one asked for is kept."""
        if number != self._number:
            order = stream(self._seed, self._peer, Purpose.BATCH, number).permutation(len(self.indices))
            if self._quotas is None:
                self._pass = BatchDraw(self.indices[order], np.full_like(order, number))
            else:
                self._pass = self._balanced(self._quotas, number, order)
            self._number = number
        return self._pass

    def _balanced(self, quotas: ClassQuotas, number: int, order: IntArray) -> BatchDraw:
        """Return the draws of a pass in which class c has its quota of places, dealt by `order`."""
        of_pass, before = quotas.of_pass(number), quotas.before_pass(number)
        places = np.argsort(np.repeat(np.arange(len(of_pass)), of_pass)[order], kind="stable")
        parts = []
        for number_of_class in np.flatnonzero(of_pass).tolist():
            members = self.indices[quotas.classes == number_of_class]
            first = int(before[number_of_class])
            draws = np.arange(first, first + int(of_pass[number_of_class]))
            epochs = draws // len(members)
            # Layer 0 of these streams is the order of whole passes.
            orders = [
                stream(self._seed, self._peer, Purpose.BATCH, epoch, 1 + number_of_class).permutation(len(members))
                for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
            ]
            chosen = np.concatenate(orders)[draws - epochs[0] * len(members)]
            parts.append(BatchDraw(members[chosen], epochs))
        by_class = joined(parts)
        indices, epochs = np.empty_like(by_class.indices), np.empty_like(by_class.epochs)
        indices[places], epochs[places] = by_class.indices, by_class.epochs
        return BatchDraw(indices, epochs)


def joined(draws: list[BatchDraw]) -> BatchDraw:
    """Return the draws one after the other."""
    return BatchDraw(np.concatenate([draw.indices for draw in draws]), np.concatenate([draw.epochs for draw in draws]))


_TABLES = 8
"""Tables of an epoch's uniforms that are kept."""


def augmentation_uniforms(seed: int, draw: BatchDraw, num_samples: int) -> npt.NDArray[np.float32]:
    """Return the uniforms that augment a batch, float32[b, 4]: a function of seed, sample and epoch."""
    result = np.empty((len(draw.indices), 4), np.float32)
    # Not `np.unique`, whose first call imports a megabyte.
    epochs = sorted(set(draw.epochs.tolist()))
    if len(epochs) > _TABLES:
        # Balanced drawing: each class has its own number of epochs behind it, and few samples share a table.
        for row, (sample, epoch) in enumerate(zip(draw.indices.tolist(), draw.epochs.tolist(), strict=True)):
            result[row] = _epoch_stream(seed, epoch).uniforms(4, start=4 * sample)
        return result
    for epoch in epochs:
        chosen = draw.epochs == epoch
        result[chosen] = _epoch_uniforms(seed, epoch, num_samples)[draw.indices[chosen]]
    return result


@lru_cache(maxsize=_TABLES)
def _epoch_uniforms(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.float32]:
    """All peers of a process share the table of an epoch: one long draw costs less than one draw for each sample."""
    return _epoch_stream(seed, epoch).uniforms(4 * num_samples).reshape(-1, 4)


def _epoch_stream(seed: int, epoch: int) -> Stream:
    return stream(seed, SHARED, Purpose.AUGMENT, epoch)
