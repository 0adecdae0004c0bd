"""What messages of an option weigh for layers of given sizes, and what its algorithm keeps in memory: from a few rounds
of its own code with random gradients.

Random numbers are the hardest to code. A network that has trained for a while sends fewer bytes: a fifth less with
top_k, and up to half with modulo codes (docs/studies/wire.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import nn

from peer import compress, gossip, wire
from peer.compress.layout import Layout
from peer.config import Config, load
from peer.gossip.base import NodeContext
from peer.gossip.options import LowRankOptions
from peer.gossip.topology import build_schedule
from peer.random import PhiloxSource
from peer.simulate.rounds import Simulator
from peer.study import predict
from peer.train.models import Quadratic
from peer.train.task import Task
from peer.train.tasks import Synthetic

LARGEST = 2_000_000
"""Models with more numbers are weighed with layers that are smaller in proportion, and the frame is scaled up."""

_PEERS = 4
"""A message weighs the same whatever the number of peers."""
_SMALL = 4096
"""Numbers of the model whose state is measured: everything but headers is proportional to it."""
_MOST_PEERS = 64


class Sized(Synthetic):
    """The synthetic task with layers of given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sum(sizes), len(sizes), samples=4096, noise=True)
        self._sizes = tuple(sizes)

    def make_model(self) -> nn.Module:
        return Quadratic.of_shapes([(size,) for size in self._sizes])


def sized_task(*, sizes: str) -> Task:
    """Return the task for layers of these sizes, separated by spaces."""
    return Sized([int(size) for size in sizes.split()])


def frame_bytes(settings: Sequence[str], sizes: Sequence[int]) -> float:
    """Return what goes over one link in one round once messages are like all that follow. Raises ConfigError."""
    total = sum(sizes)
    part = min(1.0, LARGEST / total)
    smaller = [max(1, round(part * size)) for size in sizes]
    return predict.frame_bytes(_config(settings, smaller), _PEERS) * total / sum(smaller)


def part_bytes(settings: Sequence[str], shapes: Sequence[tuple[int, ...]], num_peers: int) -> float:
    """Return what a message of an algorithm weighs that adds up factors in parts: the mean of the rounds of both sides.

    One peer and its gradients are enough, since sums weigh about what is added up. Raises ConfigError.
    """
    config, layout = _config(settings, sizes_of(shapes)), Layout.of_shapes(shapes)
    options, draws = config.algorithm, np.random.default_rng(0)
    frames = []
    for side in (0, 1):
        node = NodeContext(
            peer=0,
            schedule=build_schedule(num_peers, "complete"),
            layout=layout,
            draw_source=PhiloxSource(0, 0),
            compressor=compress.build("none"),
            low_rank=LowRankOptions(rank=options.rank, bits=options.factor_bits),
        )
        algorithm = gossip.build(options.name, node, np.zeros(layout.size, np.float32))
        exchange = algorithm.begin(side, draws.standard_normal(layout.size, np.float32), 0.0)
        frames += [len(wire.encode(message, layout)) for message in exchange.sends.values()]
    return sum(frames) / len(frames)


def state_models(settings: Sequence[str], num_peers: int) -> float:
    """Return how many models of float32 the algorithm and its codes keep beside the model itself, on the peer that
    keeps most. Raises ConfigError."""
    simulator = Simulator(_config(settings, [_SMALL]), Path(), num_peers=min(num_peers, _MOST_PEERS))
    simulator.run()
    kept = []
    for participant in simulator.participants:
        algorithm = participant.algorithm
        arrays = [*algorithm.state().values(), *algorithm.transport_state().values()]
        codes = participant.last_codes
        kept.append(sum(array.nbytes for array in arrays) + (0 if codes is None else codes.nbytes))
    return max(kept) / (4 * _SMALL) - 1.0


def even_sizes(parameters: int, layers: int = 20) -> list[int]:
    """Return the sizes of that many layers that are as equal as they can be."""
    layers = min(layers, parameters)
    return [parameters // layers + (index < parameters % layers) for index in range(layers)]


def sizes_of(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of elements of tensors."""
    return [math.prod(shape) for shape in shapes]


def _config(settings: Sequence[str], sizes: Sequence[int]) -> Config:
    own = (
        "training.task=peer.planning.messages:sized_task",
        f'training.task_options={{sizes = "{" ".join(map(str, sizes))}"}}',
        "training.momentum=none",
        "training.schedule=constant",
        "training.learning_rate=0.05",
        "training.warmup_rounds=0",
        "training.class_balance=0.0",
        "data.partition=iid",
        "evaluation.every_rounds=0",
        "run.rounds=4",
        # As close as models of this size come; from a higher θ on, first messages are smaller than later ones.
        "algorithm.theta_value=0.001",
    )
    return load(environment={}, overrides=[*settings, *own])
