"""Whether the neighbours read the same data: each device splits it alone, so of different data the shares overlap."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import numpy as np
import torch

from peer.daemon.notes import notes
from peer.train.task import Data

log = logging.getLogger("sotto")


class DataCheck:
    """Compares digests of training and test set."""

    def __init__(self, train: bytes, test: bytes, name: Callable[[int], str]) -> None:
        self.note = notes.encode_data(train, test)
        """Note for a neighbour when it is connected."""
        self._own = {"training": train, "test": test}
        self._name = name
        self._warned: set[int] = set()

    def heard(self, source: int, note: bytes) -> None:
        """Log once for each neighbour if it reads other data. Raises RemoteProtocolError if it is malformed."""
        theirs = dict(zip(self._own, notes.decode_data(note), strict=True))
        different = [split for split, digest in self._own.items() if theirs[split] != digest]
        if different and source not in self._warned:
            self._warned.add(source)
            log.warning(
                "%s reads other %s data than this device: the shares of the peers then overlap, or leave samples out."
                ' Copy the same data to both, or set data.partition = "own" if each device has its own',
                self._name(source),
                " and ".join(different),
            )


DIGEST_BYTES = 16
_LOOKED_INTO = 16
"""Samples whose content counts: enough to tell two data sets apart, and quickly read."""


def data_digest(data: Data) -> bytes:
    """Return 16 bytes that depend on the labels, their order, and the content of a few samples.

    Only the mean of each sample tensor counts, to two digits: processors and decoders of images round differently.
    """
    hasher = hashlib.sha256(b"sottovoce data 1\n")
    hasher.update(data.labels.numpy().astype("<i8").tobytes())
    last = len(data) - 1
    spread = np.linspace(0, last, min(_LOOKED_INTO, len(data))).round().astype(np.int64)
    chosen = spread[np.diff(spread, prepend=-1) > 0]
    for tensor in data.batch(torch.from_numpy(chosen)):
        for sample in tensor.detach().cpu():
            hasher.update(f"{float(sample.double().mean()):.1e}\n".encode())
    return hasher.digest()[:DIGEST_BYTES]
