"""The split of a labelled data set among the peers, the same on every device without anybody telling it.

A partition is a function of the labels, the number of peers, the kind of split with its settings, and a seed; nothing
else. Every sample belongs to exactly one peer, and no peer is left without.

Where every device has data of its own, nothing is split, and a peer knows its own samples only (`own_samples`).

Knows labels only: no images, no torch, no files.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peer.errors import ConfigError, DataError
from peer.random import SHARED, Purpose, Stream, stream

IntArray: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Manifest:
    """The samples of each peer; those of one alone where its data is its own, and nothing is known of the others'."""

    num_samples: int
    train: Mapping[int, IntArray]
    """Peer → its training samples, int64[m_i], ascending."""
    holdout: Mapping[int, IntArray]
    """Peer → its private test samples, int64[h_i], ascending."""
    own_labels: str | None = None
    """Hex SHA-256 of the labels in their order, where the data is the peer's own."""


def own_samples(labels: npt.ArrayLike, peer: int, *, seed: int, holdout_fraction: float = 0.0) -> Manifest:
    """Return all samples of a data set with `labels: int64[m]`, which only `peer` has.

    Raises ConfigError (`data.holdout_fraction`) where too few are left to train on, DataError where the labels are no
    list of integers.
    """
    checked = _checked_labels(labels)
    everything = {peer: np.arange(checked.size, dtype=np.int64)}
    digest = hashlib.sha256(checked.astype("<i8").tobytes()).hexdigest()
    return Manifest(checked.size, *_hold_out(everything, holdout_fraction, seed), digest)


def partition(
    labels: npt.ArrayLike,
    num_peers: int,
    kind: str,
    *,
    seed: int,
    skew: float = 0.8,
    alpha: float = 0.5,
    labels_per_peer: int = 2,
    holdout_fraction: float = 0.0,
) -> Manifest:
    """Return the split of `labels: int64[m]` among the peers by a kind, each with the setting of its name.

    - skew: a fraction of each class is sorted by label and dealt in consecutive blocks, the rest at random.
    - dirichlet: each class is split among the peers in proportions drawn from Dirichlet(alpha).
    - shards: each peer holds samples of `labels_per_peer` classes only.
    - by-label: peer k of N has the samples of the labels k, k + N, …, or its share of one where labels are few.
    - iid: samples are dealt at random.

    Raises ConfigError, with the key, where the settings allow no split that uses every sample once and leaves no peer
    empty; DataError where the labels are no list of integers.
    """
    checked = _checked_labels(labels)
    if num_peers < 1:
        raise ConfigError("a split needs at least one peer", key="peers", value=num_peers, valid="1 or more")
    if checked.size < num_peers:
        raise ConfigError(
            f"{checked.size} samples cannot be split among {num_peers} peers without leaving one empty",
            key="peers",
            value=num_peers,
            valid=f"at most {checked.size} peers, or more data",
        )
    if kind == "dirichlet":
        needed = 2 if holdout_fraction > 0 and checked.size >= 2 * num_peers else 1
        owner = _deal_by_dirichlet(checked, num_peers, alpha, needed, seed)
    elif kind == "shards":
        owner = _deal_by_shards(checked, num_peers, labels_per_peer, seed)
    elif kind == "by-label":
        owner = _deal_by_label(checked, num_peers, seed)
    else:
        assert kind in ("skew", "iid")
        owner = _deal_by_skew(checked, num_peers, skew if kind == "skew" else 0.0, seed)
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=num_peers))[:-1]
    parts = dict(enumerate(np.split(by_owner, ends)))
    return Manifest(checked.size, *_hold_out(parts, holdout_fraction, seed))


def _deal_by_skew(labels: IntArray, num_peers: int, skew: float, seed: int) -> IntArray:
    """Return int64[m], the owner of each sample, for a degree of skew in [0, 1].

    "We first randomly sample 80% of each class from the training data and then sort the sampled data as per its label.
    First 20 examples from the sorted data are assigned to node 1, the next 20 to node 2 and so on. The remaining 20% of
    the data is randomly distributed" (Sparse-Push, section 5, for a skew of 0.8). Samples left over by rounding are
    dealt so that the sizes of two peers differ by at most one.
    """
    shuffled = _stream(seed, _Draw.ORDER).permutation(labels.size)
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    class_sizes = np.unique(labels, return_counts=True)[1]
    rank = np.arange(labels.size) - np.repeat(np.cumsum(class_sizes) - class_sizes, class_sizes)
    is_sorted = rank < np.repeat(np.rint(skew * class_sizes).astype(np.int64), class_sizes)

    owner = np.empty(labels.size, dtype=np.int64)
    block_sizes = _even_sizes(int(is_sorted.sum()), num_peers)
    owner[by_label[is_sorted]] = np.repeat(np.arange(num_peers), block_sizes)
    # Shuffled anew: within `by_label` the rest is sorted too.
    rest = by_label[~is_sorted]
    rest = rest[_stream(seed, _Draw.REST).permutation(rest.size)]
    owner[rest] = np.repeat(np.arange(num_peers), _even_sizes(labels.size, num_peers) - block_sizes)
    return owner


def _deal_by_dirichlet(labels: IntArray, num_peers: int, alpha: float, needed: int, seed: int) -> IntArray:
    """Return int64[m], the owner of each sample: class by class in proportions drawn from Dirichlet(α, …, α).

    A peer that would hold fewer than `needed` samples gets some of the largest peer.
    """
    shuffled = _stream(seed, _Draw.ORDER).permutation(labels.size)
    classes, dense = np.unique(labels, return_inverse=True)
    shares = _dirichlet(alpha, classes.size, num_peers, seed)
    owner = np.empty(labels.size, dtype=np.int64)
    for number in range(classes.size):
        members = shuffled[dense[shuffled] == number]
        cuts = np.rint(np.cumsum(shares[number]) * members.size).astype(np.int64)
        cuts[-1] = members.size
        owner[members] = np.repeat(np.arange(num_peers), np.diff(cuts, prepend=0))
    sizes = np.bincount(owner, minlength=num_peers)
    while sizes.min() < needed:
        peer, largest = int(np.argmin(sizes)), int(np.argmax(sizes))
        owner[shuffled[np.argmax(owner[shuffled] == largest)]] = peer
        sizes[largest] -= 1
        sizes[peer] += 1
    return owner


def _deal_by_shards(labels: IntArray, num_peers: int, labels_per_peer: int, seed: int) -> IntArray:
    """Return int64[m], the owner of each sample: every peer holds exactly `labels_per_peer` different labels.

    The labels are handed out so that each has as equal a number of holders as possible (peer after peer takes those
    with most places left, ties at random), and each class is split evenly among its holders.
    """
    classes, dense, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if not 1 <= labels_per_peer <= classes.size:
        raise ConfigError(
            f"the data has {classes.size} different labels",
            key="data.labels_per_peer",
            value=labels_per_peer,
            valid=f"1 to {classes.size}",
        )
    places = num_peers * labels_per_peer
    if places < classes.size:
        raise ConfigError(
            f"{num_peers} peers with {labels_per_peer} labels each cannot cover all {classes.size} labels, but every"
            " sample must belong to a peer",
            key="data.labels_per_peer",
            value=labels_per_peer,
            valid=f"{-(-classes.size // num_peers)} or more",
        )
    left = _even_sizes(places, classes.size)[
        np.argsort(_stream(seed, _Draw.LABELS).permutation(classes.size), kind="stable")
    ]
    ties = _stream(seed, _Draw.TIES).words(num_peers * classes.size).reshape(num_peers, classes.size)
    holders: list[list[int]] = [[] for _ in range(classes.size)]
    for peer in range(num_peers):
        for number in np.lexsort((ties[peer], -left))[:labels_per_peer].tolist():
            holders[number].append(peer)
            left[number] -= 1
    shuffled = _stream(seed, _Draw.ORDER).permutation(labels.size)
    owner = np.empty(labels.size, dtype=np.int64)
    for number, peers in enumerate(holders):
        if class_sizes[number] < len(peers):
            raise ConfigError(
                f"label {classes[number]} has {class_sizes[number]} samples, too few for {len(peers)} peers to share",
                key="data.labels_per_peer",
                value=labels_per_peer,
                valid="fewer labels for each peer, fewer peers, or dirichlet",
            )
        members = shuffled[dense[shuffled] == number]
        owner[members] = np.repeat(np.array(peers, dtype=np.int64), _even_sizes(members.size, len(peers)))
    return owner


def _hold_out(
    parts: Mapping[int, IntArray], fraction: float, seed: int
) -> tuple[dict[int, IntArray], dict[int, IntArray]]:
    """Return (train, holdout), peer by peer; where `fraction` > 0 each peer holds out at least one sample and trains on
    another."""
    if fraction == 0:
        return dict(parts), {peer: part[:0] for peer, part in parts.items()}
    smallest = min(parts, key=lambda peer: parts[peer].size)
    if parts[smallest].size < 2:
        raise ConfigError(
            f"peer {smallest} has only one sample, which cannot be both trained on and held out",
            key="data.holdout_fraction",
            value=fraction,
            valid="0, or more data for each peer",
        )
    train, holdout = {}, {}
    for peer, part in parts.items():
        count = min(max(1, round(fraction * part.size)), part.size - 1)
        mixed = part[stream(seed, peer, Purpose.HOLD_OUT).permutation(part.size)]
        holdout[peer] = np.sort(mixed[:count])
        train[peer] = np.sort(mixed[count:])
    return train, holdout


def _even_sizes(total: int, parts: int) -> IntArray:
    """Return int64[parts] that sum to `total` and differ by one at most, the larger ones first.

    First, so that no part shrinks when `total` grows.
    """
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _deal_by_label(labels: IntArray, num_peers: int, seed: int) -> IntArray:
    """Return int64[m], the owner of each sample: label l of L is that of peer l mod N; where there are fewer labels
    than peers, the samples of each are dealt at random to the peers k with k mod L = l."""
    classes, dense, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = _stream(seed, _Draw.ORDER).permutation(labels.size)
    rank = np.empty(labels.size, dtype=np.int64)
    rank[shuffled[np.argsort(dense[shuffled], kind="stable")]] = np.concatenate([np.arange(size) for size in sizes])
    first = dense % num_peers
    sharers = -((first - num_peers) // classes.size)
    owner: IntArray = first + classes.size * (rank % sharers)
    if not np.bincount(owner, minlength=num_peers).all():
        problem, valid = "a label has fewer samples than it has peers", "fewer, or more data"
        raise ConfigError(problem, key="peers", value=num_peers, valid=valid)
    return owner


def _dirichlet(alpha: float, rows: int, columns: int, seed: int) -> Float64Array:
    """Return float64[rows, columns] whose rows are draws from the symmetric Dirichlet(α).

    Gamma variates by Marsaglia and Tsang (2000), as logarithms: for small α the variates themselves underflow, and a
    row of zeros has no proportions. numpy's own sampler may change its stream from version to version.
    """
    count = rows * columns
    shape = alpha if alpha >= 1 else alpha + 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    log_gamma = np.empty(count)
    waiting = np.arange(count)
    attempt = 0
    while waiting.size:
        # One normal number and one uniform for each variate and attempt, whether it still waits or not: what a variate
        # becomes does not depend on the others.
        normal = _stream(seed, _Draw.PROPORTIONS, 2 * attempt).normals(count)[waiting]
        uniform = _stream(seed, _Draw.PROPORTIONS, 2 * attempt + 1).uniforms(count, np.float64)[waiting]
        base = 1.0 + c * normal
        v = np.where(base > 0, base, 1.0) ** 3
        accepted = (base > 0) & (np.log1p(-uniform) < 0.5 * normal**2 + d - d * v + d * np.log(v))
        log_gamma[waiting[accepted]] = np.log(d * v[accepted])
        waiting = waiting[~accepted]
        attempt += 1
    if alpha < 1:
        boost = _stream(seed, _Draw.BOOST).uniforms(count, np.float64)
        log_gamma += np.log1p(-boost) / alpha
    table = log_gamma.reshape(rows, columns)
    shares = np.exp(table - table.max(axis=1, keepdims=True))
    normalized: Float64Array = shares / shares.sum(axis=1, keepdims=True)
    return normalized


class _Draw(enum.IntEnum):
    """Purposes of a partition's random streams; part of what keeps splits the same."""

    ORDER = 0
    REST = 1
    LABELS = 2
    TIES = 3
    PROPORTIONS = 4
    BOOST = 5


def _stream(seed: int, draw: _Draw, attempt: int = 0) -> Stream:
    return stream(seed, SHARED, Purpose.PARTITION, round=attempt, layer=draw)


def _checked_labels(labels: npt.ArrayLike) -> IntArray:
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise DataError(
            f"labels must be a list of at least one integer, not {array.dtype} of shape {array.shape}; give the data"
            " set one integer label per sample"
        )
    return array.astype(np.int64)
