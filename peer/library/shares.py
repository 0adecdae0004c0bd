"""The samples of one peer, of a data set that all peers of this machine read."""

from __future__ import annotations

import logging
from typing import Any, TypeVar, cast

import numpy as np
import torch

from peer.errors import UsageError
from peer.library.here import place
from peer.library.place import Place
from peer.train.partition import IntArray, partition

log = logging.getLogger("sotto")

Dataset = TypeVar("Dataset")


def local(dataset: Dataset, where: Place | None = None) -> Dataset:
    """Return the part of a data set on which this peer trains.

    Under `sotto up` and in a simulation, where all peers read the same data set, that is the peer's share as `[data]`
    of the configuration deals it by the seed of the run: by labels where the data set has them (`targets`, `labels`, a
    column `label`, or whole numbers as the last tensor of a `TensorDataset`), otherwise at random. On a device, and
    where the script trains alone, it is all of it.

    Raises UsageError for a data set whose samples cannot be chosen by number, and ConfigError.
    """
    where = place() if where is None else where
    if not where.deals or where.config.data.partition == "own":
        return dataset
    samples, choose = cast("Any", dataset), getattr(dataset, "select", None)
    try:
        count = len(samples)
    except TypeError:
        raise UsageError(
            f"a {type(dataset).__name__} has no length, so its samples cannot be dealt by number; deal them in the"
            " script, by sottovoce.place().index"
        ) from None
    labels, options = _labels(samples, count), where.config.data
    kind = "iid" if labels is None else options.partition
    if kind != options.partition:
        log.warning(
            'samples are dealt at random, not by data.partition = "%s": this %s has no labels',
            options.partition,
            type(dataset).__name__,
        )
    manifest = partition(
        np.zeros(count, np.int64) if labels is None else labels,
        # A peer that joined takes a share of a longer list; nobody else's changes.
        max(where.config.num_listed, where.index + 1),
        kind,
        seed=where.config.run.seed,
        skew=options.skew,
        alpha=options.alpha,
        labels_per_peer=options.labels_per_peer,
    )
    mine = manifest.train[where.index].tolist()
    log.info("%s trains on %d of %d samples (data.partition: %s)", where.name, len(mine), count, kind)
    return cast("Dataset", choose(mine) if callable(choose) else torch.utils.data.Subset(samples, mine))


def _labels(dataset: Any, count: int) -> IntArray | None:
    """Return the label of each sample, int64[count]; None where there are none, or not one for each."""
    found = getattr(dataset, "targets", None)
    if found is None:
        found = getattr(dataset, "labels", None)
    if found is None and isinstance(dataset, torch.utils.data.TensorDataset):
        found = dataset.tensors[-1]
    if found is None and "label" in (getattr(dataset, "column_names", None) or ()):
        found = dataset["label"]
    if found is None or callable(found):
        return None
    labels = np.asarray(found)
    return labels.astype(np.int64) if labels.shape == (count,) and labels.dtype.kind in "iu" else None
