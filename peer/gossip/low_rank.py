"""All-reduce of low-rank factors: exact sums of a few vectors for each matrix, in place of whole gradients.

After PowerSGD (Vogels et al. 2019), whose two factors take turns (Zhang et al. 2023, ACP-SGD), with the sum made in
parts: each member owns a part of the numbers, adds up all contributions to it, and tells everybody the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress import block_float
from peer.compress.block_float import BlockFloat, Exponents, Sizes
from peer.compress.payload import FloatArray, Levels, Payload
from peer.gossip.base import AlgorithmSpec, GraphNeed, Memory, NodeContext, in_sender_order
from peer.gossip.factors import Factors
from peer.gossip.partitioned import Part, PartitionedAllReduce
from peer.wire.message import Message

Vector = npt.NDArray[np.float64]


class LowRank(PartitionedAllReduce):
    """x ← x − γ · momentum(U), where U is the mean of all peers' contributions of M_j = g_j + E_j, the same on all
    peers.

    In even rounds, with Q of the round before:  P = mean_j C[M_j Q],  U = P Qᵀ,  then P ← orthonormal(P)
    In odd rounds, with P of the round before:   Q = mean_j C[M_jᵀ P],  U = P Qᵀ,  then Q ← orthonormal(Q)
    E_i ← M_i − c_i, where c_i is what peer i contributed to U, multiplied out: projected, and rounded by C.

    Layers without a basis (`factors`) are their own factor. C is block floating point, each vector of a factor with an
    exponent of its own, or all vectors of a layer with the largest of them (`LowRankOptions`). The members share the
    numbers of the factors (`partitioned`), and an owner rounds the sum by C again. The error of that rounding goes to
    the owner's E, so that Σ c_j = n U and Σ E_j + n U = Σ M_j, but for rounding in the types of x and E.

    All peers whose processors round alike hold one basis too, to the bit. When members change, it begins anew.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="low-rank",
        summary="Exact sums of low-rank factors of the gradients: nearly all-reduce, at a hundredth of its bytes.",
        source="Vogels et al. 2019, PowerSGD; Zhang et al. 2023, ACP-SGD; summed in block floating point",
        graph=GraphNeed.COMPLETE,
        changes_members=True,
        uses_averaging_rate=False,
        exchanges=2,
        sends_factors=True,
        momentum_of_mean=True,
        memory=Memory.ERRORS,
        tells_all=1,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        self._factors = Factors(node.layout, node.low_rank.rank)
        super().__init__(node, x0, *self._factors.sizes)
        self._bits = node.low_rank.bits
        self._by_layer = node.low_rank.exponents == "layer"
        self._basis: FloatArray | None = None
        """Basis of the coming round; None if it is drawn."""
        self._least: Exponents | int = block_float.LOWEST
        """The least exponents of the sums of the own part, if layers have one."""
        self._vector: Vector = np.zeros(0)
        """This peer's contribution to the factors of the round."""
        self._mean: Vector = np.zeros(0)

    def _contribute(self, t: int) -> Mapping[int, Payload]:
        if self._basis is None:
            self._basis = self._factors.first_basis(t % 2, self.node.draw_source.draws(t)).astype(self.x.dtype)
        factors = self._factors.project(self.error_memory, self._basis, t % 2)
        self._vector, self._mean = np.zeros(factors.size), np.zeros(factors.size)
        contributions, parts = {}, [self._shares(t).parts[owner] for owner in self._shares(t).owners]
        pieces = [part.pieces for part in parts]
        encoded = block_float.split(self._encode(factors, np.concatenate(pieces)), pieces)
        for owner, part, own in zip(self._shares(t).owners, parts, encoded, strict=True):
            block = _block(self._imposed(0, owner) or own)
            self._vector[part.numbers] = block_float.decode(block, part.pieces)
            if owner == self.node.peer and self._by_layer:
                # The own ones alone: with those of others, one that lies could have a sum rounded to nothing.
                self._least = block_float.integers(block[0])
            contributions[owner] = block
        return contributions

    def _encode(
        self, values: FloatArray, pieces: Sizes, start: int = 0, least: Exponents | int = block_float.LOWEST
    ) -> BlockFloat:
        """Return the numbers of the factors from number `start` on in C, by pieces of vectors: int64[pieces].

        `least`: exponents below which none is chosen, int64[pieces], where layers share theirs.
        """
        if not self._by_layer:
            return block_float.encode(values, pieces, self._bits)
        ends = np.cumsum(self._factors.layer_sizes[self._t % 2])
        layers, largest = np.searchsorted(ends, start + np.cumsum(pieces)), np.full(ends.size, block_float.LOWEST)
        np.maximum.at(largest, layers, block_float.exponents(values, pieces, self._bits))
        return block_float.encode(values, pieces, self._bits, least=np.maximum(largest[layers], least))

    def _add_up(self, inbox: Mapping[int, Message], imposed: Payload | None) -> Payload:
        part = self._shares(self._t).parts[self.node.peer]
        numbers, pieces = part.numbers, part.pieces
        total = np.zeros(numbers.stop - numbers.start)
        for message in in_sender_order(self.node.peer, inbox):
            total += self._vector[numbers] if message is None else block_float.decode(_block(message.layers), pieces)
        self._shorten_(total, 2.0 / (len(inbox) + 1))
        block = _block(imposed or self._encode(total, pieces, numbers.start, self._least))
        told = block_float.decode(block, pieces)
        self._vector[numbers] -= total - told
        self._mean[numbers] = told / (len(inbox) + 1)
        return block

    def _mean_of(self, inbox: Mapping[int, Message]) -> FloatArray:
        for owner in self._shares(self._t).owners:
            part = self._shares(self._t).parts[owner]
            if owner in inbox:
                num_contributors = round(1.0 / inbox[owner].mixing_weight)
                told = block_float.decode(_block(inbox[owner].layers), part.pieces)
                self._mean[part.numbers] = told / num_contributors
            elif owner != self.node.peer:
                self._vector[part.numbers] = 0.0
        t, side, basis = self._t, self._t % 2, self._basis
        assert basis is not None
        own, rounding = self._vector.astype(self.x.dtype), self.rounding(t, 2)
        self._factors.subtract_multiplied_out_(self.error_memory, own, basis, side, rounding)
        mean = self._factors.multiply_out(self._mean.astype(self.x.dtype), basis, side)
        draws = self.node.draw_source.draws(t)
        self._basis = self._factors.next_basis(self._mean, side, draws).astype(self.x.dtype)
        return mean

    def _can_read(self, layers: Payload) -> bool:
        return block_float.read(layers, self._bits) is not None

    def _fits(self, layers: Payload, part: Part) -> bool:
        exponents, codes = _block(layers)
        return (exponents.codes.size, codes.codes.size) == (part.pieces.size, int(part.pieces.sum()))

    def _length(self, layers: Payload, part: Part) -> float:
        return float(np.linalg.norm(block_float.decode(_block(layers), part.pieces)))

    # State.

    def start_anew(self) -> None:
        super().start_anew()
        self._basis = None

    def state(self) -> dict[str, Any]:
        return super().state() | ({} if self._basis is None else {"basis": self._basis})

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self._basis = None
        if "basis" in state:
            self._basis = np.array(state["basis"], self.x.dtype)
            if self._basis.size not in self._factors.basis_size:
                raise ValueError(f"a saved basis has {self._basis.size} numbers, not one of {self._factors.basis_size}")


def _block(layers: Payload) -> BlockFloat:
    """Return the layers of a message that passed `check_codes`."""
    exponents, codes = layers
    assert isinstance(exponents, Levels)
    assert isinstance(codes, Levels)
    return exponents, codes
