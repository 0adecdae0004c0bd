"""Which samples a batch holds: a function of seed, peer and step number, with no position to save."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from peer.errors import DataError
from peer.random import SHARED, Purpose, stream


@dataclass(frozen=True)
class BatchDraw:
    """The samples of one batch."""

    indices: npt.NDArray[np.int64]
    """int64[b], positions in the training set."""
    epochs: npt.NDArray[np.int64]
    """int64[b], the pass over the shard that each belongs to."""


class BatchSchedule:
    """A peer's shard, dealt without replacement: each epoch is a new permutation, and batch k holds positions
    k·b … (k+1)·b − 1 of the epochs put one after the other, so a batch may straddle two of them."""

    def __init__(self, indices: npt.NDArray[np.int64], batch_size: int, *, seed: int, peer: int) -> None:
        """Deal `indices: int64[m]` in batches of `batch_size`. Raises DataError if there are none."""
        if not len(indices):
            raise DataError(f"peer {peer} has no training samples; use more data or fewer peers")
        self.indices, self.batch_size, self._seed, self._peer = indices, batch_size, seed, peer
        self._epoch, self._order = -1, indices

    def batch(self, step: int) -> BatchDraw:
        """Return the batch of a step, counted from 0 over the whole run."""
        m, first = len(self.indices), step * self.batch_size
        positions = np.arange(first, first + self.batch_size)
        epochs = positions // m
        if epochs[0] == epochs[-1]:
            return BatchDraw(self._permuted(int(epochs[0]))[positions - epochs[0] * m], epochs)
        parts = []
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            start, stop = max(first - epoch * m, 0), min(first + self.batch_size - epoch * m, m)
            parts.append(self._permuted(epoch)[start:stop])
        return BatchDraw(np.concatenate(parts), epochs)

    def _permuted(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the shard in the order of an epoch; the last one asked for is kept."""
        if epoch != self._epoch:
            order = stream(self._seed, self._peer, Purpose.BATCH, epoch).permutation(len(self.indices))
            self._epoch, self._order = epoch, self.indices[order]
        return self._order


def augmentation_uniforms(seed: int, draw: BatchDraw, num_samples: int) -> npt.NDArray[np.float32]:
    """Return the uniforms that augment a batch, float32[b, 4]: a function of seed, sample and epoch."""
    result = np.empty((len(draw.indices), 4), np.float32)
    for epoch in np.unique(draw.epochs):
        chosen = draw.epochs == epoch
        result[chosen] = _epoch_uniforms(seed, int(epoch), num_samples)[draw.indices[chosen]]
    return result


@lru_cache(maxsize=8)
def _epoch_uniforms(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.float32]:
    """All peers of a process share the table of an epoch: one long draw costs less than one draw for each sample."""
    return stream(seed, SHARED, Purpose.AUGMENT, epoch).uniforms(4 * num_samples).reshape(-1, 4)
