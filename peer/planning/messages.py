"""Size of an option's messages for given layer sizes, their processor time, and the memory of its algorithm: from a few
rounds of its own code with random gradients.

Random numbers are the hardest to code. A network that has trained for a while sends fewer bytes: a fifth less with
top_k, and up to half with modulo codes (docs/studies/wire.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from peer import compress, gossip, wire
from peer.compress.layout import Layout
from peer.config.options import Config, load
from peer.gossip.base import NodeContext
from peer.gossip.options import LowRankOptions
from peer.gossip.topology import build_schedule
from peer.lab.study import predict
from peer.lab.study.predict import Weight
from peer.random import PhiloxSource
from peer.simulate.rounds import Simulator
from peer.train.task import Task
from peer.train.tasks import Synthetic

LARGEST = 2_000_000
"""Models with more numbers are weighed with layers that are smaller in proportion, and the frame is scaled up."""
LARGEST_IN_FACTORS = 16_000_000
"""Beyond that, work on factors is measured with matrices that have shorter sides, and scaled up; frames are whole."""

ROUND_WORK_S = 0.0014
MESSAGE_WORK_S = 0.0005
BYTE_WORK_S = 2.8e-9
"""Sockets, TLS, event loop and journal: of a round, of each message in it and of each byte that is sent. From
docs/studies/round-cost.md (one message of 3.5 kB takes 1.95 ms, packed ones of 1.1 and 44 MB take 5.2 and 124 ms) and
from the 14 messages of a round of `low-rank` in docs/studies/race.md."""

_PEERS = 4
"""A message weighs the same whatever the number of peers, and what a peer sends is about the same work."""
_SMALL = 4096
"""Numbers of the model whose state is measured: everything but headers is proportional to it."""
_MOST_PEERS = 64


def shaped_task(*, shapes: str) -> Task:
    """Return the synthetic task for layers of these shapes, which are separated by spaces ("16x3x3x3 16")."""
    layers = [tuple(map(int, shape.split("x"))) for shape in shapes.split()]
    return Synthetic(sum(map(math.prod, layers)), len(layers), samples=4096, noise=True, shapes=layers)


def weigh(settings: Sequence[str], sizes: Sequence[int]) -> Weight:
    """Return the weight of a round once messages have reached their lasting size. Raises ConfigError."""
    total = sum(sizes)
    part = min(1.0, LARGEST / total)
    smaller = [max(1, round(part * size)) for size in sizes]
    weight = _simulated(tuple(settings), tuple((size,) for size in smaller), _PEERS)
    times = total / sum(smaller)
    return Weight(weight.frame_bytes * times, weight.gossip_s * times)


def weigh_parts(settings: Sequence[str], shapes: Sequence[tuple[int, ...]], num_peers: int) -> Weight:
    """Return the weight of a round of an algorithm that adds up factors in parts: the mean of those of both sides.

    One peer and its gradients are enough for the bytes, since sums weigh about what is added up. Raises ConfigError.
    """
    config, layout = _config(settings, shapes), Layout.of_shapes(shapes)
    options, draws = config.algorithm, np.random.default_rng(0)
    frames = []
    for side in (0, 1):
        node = NodeContext(
            peer=0,
            schedule=build_schedule(num_peers, "complete"),
            layout=layout,
            draw_source=PhiloxSource(0, 0),
            compressor=compress.build("none"),
            low_rank=LowRankOptions(rank=options.rank, bits=options.factor_bits, exponents=options.factor_exponents),
        )
        algorithm = gossip.build(options.name, node, np.zeros(layout.size, np.float32))
        exchange = algorithm.begin(side, draws.standard_normal(layout.size, np.float32), 0.0)
        frames += [len(wire.encode(message, layout)) for message in exchange.sends.values()]
    # The product of matrix and factors takes most of the time, in proportion to the numbers of the matrix.
    part = min(1.0, LARGEST_IN_FACTORS / layout.size)
    smaller = [tuple(max(1, round(part ** (1 / len(shape)) * side)) for side in shape) for shape in shapes]
    weight = _simulated(tuple(settings), tuple(smaller), min(num_peers, _PEERS))
    return Weight(sum(frames) / len(frames), weight.gossip_s * layout.size / sum(sizes_of(smaller)))


def transport_s(messages: float, message_bytes: float) -> float:
    """Return the processor time to send so many messages in a round, and to receive as many."""
    return ROUND_WORK_S + messages * (MESSAGE_WORK_S + BYTE_WORK_S * message_bytes)


@lru_cache(maxsize=64)
def state_models(settings: tuple[str, ...], num_peers: int) -> float:
    """Return how many models of float32 the algorithm and its codes keep beside the model itself, on the peer that
    keeps most. Raises ConfigError."""
    config = _config([*settings, "run.rounds=2"], [(_SMALL,)])
    simulator = Simulator(config, Path(), num_peers=min(num_peers, _MOST_PEERS))
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


@lru_cache(maxsize=256)
def _simulated(settings: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], num_peers: int) -> Weight:
    """Return the weight of simulated rounds. A comparison of plans for several links asks for the same ones again."""
    return predict.weigh(_config(settings, shapes), num_peers)


def _config(settings: Sequence[str], shapes: Sequence[Sequence[int]]) -> Config:
    written = " ".join("x".join(map(str, shape)) or "1" for shape in shapes)
    own = (
        "training.task=peer.planning.messages:shaped_task",
        f'training.task_options={{shapes = "{written}"}}',
        "training.local_steps=1",
        "training.momentum=none",
        "training.schedule=constant",
        "training.learning_rate=0.05",
        "training.warmup_rounds=0",
        "training.class_balance=0.0",
        "data.partition=iid",
        "evaluation.every_rounds=0",
        # As close as models of this size come; from a higher θ on, first messages are smaller than later ones.
        "algorithm.theta_value=0.001",
    )
    return load(environment={}, overrides=[*settings, *own])
