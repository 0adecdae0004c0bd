"""All-reduce of compressed sums: what leaves a peer is compressed on the way to the owners of the parts and back.

After the reduction of 1-bit Adam (Tang et al. 2021), with any compressor, and with one memory where that has two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress.base import Draws, compress_layers
from peer.compress.decompress import add_decompressed_, add_kept_
from peer.compress.float_types import floats_of, store_
from peer.compress.payload import Dense, FloatArray, Kept, Levels, Payload, Sparse, num_values
from peer.compress.payload_norm import norm
from peer.gossip.base import AlgorithmSpec, GraphNeed, Memory, NodeContext
from peer.gossip.mixing import other_members
from peer.gossip.partitioned import Part, PartitionedAllReduce
from peer.wire.message import Message


class CompressedAllReduce(PartitionedAllReduce):
    """x ← x − γ · momentum(U), U from sums that are compressed twice.

    M_j = g_j + E_j. For each part p of the numbers, with owner i and n contributors:

        every other peer j:  c_j = C[M_j], sent to i, and E_j ← M_j − c_j once the sum was told
        the owner:           S = M_i + Σ_{j≠i} c_j, told to all as s = C[S]; E_i ← S − s
        all:                 U = s / n

    The owner's own numbers go nowhere, so C leaves them as they are. What it does not tell is in its E, from where it
    goes on to whoever owns the part next. So Σ E_j + n U = Σ M_j, but for rounding in the types of x and E. With the
    compressor `none` this is all-reduce with a ring's bytes.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="compressed-allreduce",
        summary="Means of compressed gradients or displacements, compressed again: one model on all peers.",
        source="Tang et al. 2021, 1-bit Adam, its compressed all-reduce; with one error memory",
        graph=GraphNeed.COMPLETE,
        compresses=True,
        changes_members=True,
        uses_averaging_rate=False,
        exchanges=2,
        momentum_of_mean=True,
        memory=Memory.ERRORS,
        tells_all=1,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0, node.layout.size_array)
        self._contributions: Mapping[int, Payload] = {}
        self._mean = self.x[:0]
        """U, as far as it was told."""

    def _contribute(self, t: int) -> Mapping[int, Payload]:
        owners, self._mean = set(self._shares(t).owners), np.zeros_like(self.x)
        self._contributions = {
            owner: self._imposed(0, owner) or self._compressed(part, self.error_memory[part.numbers])
            for owner, part in ((other, self._shares(t).parts[other]) for other in other_members(self.node, t))
            if owner in owners
        }
        return self._contributions

    def _compressed(self, part: Part, values: Kept) -> Payload:
        node, draws = self.node, _DrawsOfPart(self.node.draw_source.draws(self._t), part.first)
        return compress_layers(node.compressor, values, part.layout, draws, whole_below=node.whole_below)

    def _add_up(self, inbox: Mapping[int, Message], imposed: Payload | None) -> Payload:
        part = self._shares(self._t).parts[self.node.peer]
        own = self.error_memory[part.numbers]
        total = floats_of(own)
        for _, message in sorted(inbox.items()):
            add_decompressed_(total, message.layers, part.layout)
        self._shorten_(total, 2.0 / (len(inbox) + 1))
        told = imposed or self._compressed(part, total)
        add_decompressed_(total, told, part.layout, -1.0)
        if total is not own:
            store_(own, total, self.rounding(self._t, 2))
        self._take(part, told, len(inbox) + 1)
        return told

    def _mean_of(self, inbox: Mapping[int, Message]) -> FloatArray:
        for owner, message in inbox.items():
            part = self._shares(self._t).parts[owner]
            own, rounding = self.error_memory[part.numbers], self.rounding(self._t, 3, part.first)
            add_kept_(own, self._contributions[owner], part.layout, rounding, -1.0)
            self._take(part, message.layers, round(1.0 / message.mixing_weight))
        mean, self._mean, self._contributions = self._mean, self.x[:0], {}
        return mean

    def _take(self, part: Part, told: Payload, num_contributors: int) -> None:
        mean = self._mean[part.numbers]
        add_decompressed_(mean, told, part.layout)
        mean /= mean.dtype.type(num_contributors)

    def _can_read(self, layers: Payload) -> bool:
        return all(isinstance(layer, (Dense, Levels, Sparse)) for layer in layers)

    def _fits(self, layers: Payload, part: Part) -> bool:
        return bool(layers) and part.pieces.tolist() == [num_values(layer) for layer in layers]

    def _length(self, layers: Payload, part: Part) -> float:
        return norm(layers)


class _DrawsOfPart:
    """Draws for the pieces of a part: no piece of the model has numbers of another."""

    def __init__(self, draws: Draws, first: int) -> None:
        self._draws, self._first = draws, first

    def own(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        return self._draws.own(self._first + layer, size, dtype)

    def shared(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        return self._draws.shared(self._first + layer, size, dtype)

    def words(self, layer: int, size: int) -> npt.NDArray[np.uint32]:
        return self._draws.words(self._first + layer, size)
