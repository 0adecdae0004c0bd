"""Other systems: what DDP over gloo, its hooks and local SGD send, and how long that takes.

All of them average by a ring: 2 (n − 1) hops, in each of which every worker passes on one n-th of the averaged data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from peer.planning.evidence import Option
from peer.simulate.network import LinkModel, VirtualNetwork

POWER_SGD_RANK = 2

HOP_OVERHEAD_BYTES = 640
"""Bytes that gloo sends beside the numbers in a hop. Measured: with messages of a ResNet-20 and of a VGG-11, the
interface of a worker of eight sends 9 kB more for each average than its numbers, TCP headers and acknowledgements
take."""


HOP_WORK_S = 0.00006
BYTE_WORK_S = 0.55e-9
"""Processor seconds for a hop of gloo's ring and for each byte that is sent: from the all-reduce of 1.1 and of 44 MB by
four workers in docs/studies/round-cost.md, 1.25 and 36.6 ms."""
_REPEATS = 5


@dataclass(frozen=True)
class Averages:
    """The averages that one worker computes in a round."""

    payloads: tuple[int, ...]
    """Bytes of the numbers of each average, one after the other."""
    every: int = 1
    """Steps between two rounds of averages."""
    work_s: float = 0.0
    """Processor time here to compute the values to be averaged."""
    models_kept: float = 0.0
    """Memory beside model, gradient and momentum, in models of float32."""

    def transport_s(self, num_peers: int) -> float:
        """Return the processor time for sending and receiving in one step."""
        sent = 2 * (num_peers - 1) * sum(_hop(payload, num_peers) for payload in self.payloads)
        hops = 2 * (num_peers - 1) * len(self.payloads)
        return (HOP_WORK_S * hops + BYTE_WORK_S * sent) / self.every

    def round_s(self, num_peers: int, links: LinkModel, step_s: float) -> float:
        """Return how long one step takes, with its part of the averages."""
        return step_s + sum(_average_s(payload, num_peers, links) for payload in self.payloads) / self.every

    def wire_bytes(self, num_peers: int, links: LinkModel) -> float:
        """Return the bytes that a worker sends for one step, and receives as well."""
        links = _with_gloo(links)
        hops = 2 * (num_peers - 1)
        return sum(hops * links.wire_bytes(_hop(payload, num_peers)) for payload in self.payloads) / self.every


def averages(option: Option, sizes: Sequence[int], shapes: Sequence[Sequence[int]] | None) -> Averages | None:
    """Return a system's averages; None where they need the shapes of layers, and these are not known."""
    model = 4 * sum(sizes)
    if option.rival == "ddp":
        return Averages((model,), models_kept=1.0)
    if option.rival == "ddp-fp16":
        return Averages((model // 2,), models_kept=1.5)
    if option.rival == "local-sgd":
        return Averages((model,), every=option.every, models_kept=1.0)
    if shapes is None:
        return None
    return Averages(power_sgd_payloads(shapes), models_kept=2.0, work_s=power_sgd_work_s(shapes))


def power_sgd_payloads(shapes: Sequence[Sequence[int]], rank: int = POWER_SGD_RANK) -> tuple[int, int, int]:
    """Return the bytes that torch's PowerSGD hook averages: tensors that it leaves whole, all P, all Q.

    A tensor becomes a matrix of its first dimension by the rest. It is left whole where two factors of this rank would
    have more than half as many numbers (`min_compression_rate` of 2), as all vectors are.
    """
    whole = left = right = 0
    for shape in shapes:
        if _is_factorized(shape, rank):
            left, right = left + rank * shape[0], right + rank * math.prod(shape[1:])
        else:
            whole += math.prod(shape)
    return 4 * whole, 4 * left, 4 * right


def power_sgd_work_s(shapes: Sequence[Sequence[int]], rank: int = POWER_SGD_RANK) -> float:
    """Return this processor's time for the factors of all matrices: P, its orthonormal basis, Q and their product, as
    torch's hook computes them; the shortest of a few times."""
    draws = np.random.default_rng(0)
    groups: dict[tuple[int, int], int] = {}
    for shape in shapes:
        if _is_factorized(shape, rank):
            matrix = shape[0], math.prod(shape[1:])
            groups[matrix] = groups.get(matrix, 0) + 1
    stacks = [
        (
            torch.from_numpy(draws.standard_normal((count, *matrix), np.float32)),
            torch.from_numpy(draws.standard_normal((count, matrix[1], rank), np.float32)),
        )
        for matrix, count in groups.items()
    ]
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for matrices, right in stacks:
            left = torch.linalg.qr(torch.bmm(matrices, right)).Q
            torch.bmm(left, torch.bmm(matrices.mT, left).mT)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _is_factorized(shape: Sequence[int], rank: int) -> bool:
    numbers, rows = math.prod(shape), shape[0] if shape else 1
    return len(shape) > 1 and (rows + numbers // max(1, rows)) * rank * 2 < numbers


def _average_s(payload: int, num_peers: int, links: LinkModel) -> float:
    # All workers send at the same time to the next one, so that all hops are alike.
    hop_s = VirtualNetwork(_with_gloo(links)).arrivals(0, [(1, _hop(payload, num_peers))], 0.0)[0]
    return 2 * (num_peers - 1) * hop_s


def _hop(payload: int, num_peers: int) -> int:
    return math.ceil(payload / num_peers)


def _with_gloo(links: LinkModel) -> LinkModel:
    return replace(links, overhead_bytes=HOP_OVERHEAD_BYTES)
