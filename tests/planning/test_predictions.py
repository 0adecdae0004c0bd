"""Predictions beside the rounds that docs/studies/bandwidth.md measured, within what docs/planning.md states."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from peer.config.options import load
from peer.gossip.base import Memory
from peer.lab.study import predict
from peer.links.profiles import find
from peer.planning import messages, rivals
from peer.planning.evidence import Option
from peer.planning.layers import of_model
from peer.run import plan as run_plan

RING = ("graph.kind=ring", "graph.weights=metropolis")
OWN = {
    "quant-sgp": ("graph.kind=directed-ring",),
    "sparse-push-1%": (
        "algorithm.name=sparse-push", "graph.kind=directed-ring", "compressor.fraction=0.01",
        "compressor.value_bits=none",
    ),
    "moniqua-8": ("algorithm.name=moniqua", *RING, "compressor.kind=modulo", "compressor.bits=8"),
    "moniqua-1": (
        "algorithm.name=moniqua", *RING, "compressor.kind=modulo", "compressor.bits=1", "compressor.rounding=nearest",
    ),
    "choco-8": ("algorithm.name=choco-sgd", *RING, "compressor.kind=qsgd", "compressor.bits=7"),
    "d-psgd": ("algorithm.name=d-psgd", *RING, "compressor.kind=none"),
    "allreduce": ("algorithm.name=allreduce", "graph.kind=complete", "compressor.kind=none"),
}  # fmt: skip
RESNET20 = 273_258


@cache
def weight(name: str) -> float:
    return messages.weigh(OWN[name], messages.even_sizes(RESNET20)).frame_bytes


@pytest.mark.parametrize(
    ("name", "profile", "measured_s", "short_by"),
    [
        ("allreduce", "moniqua-1mbit-1ms", 54.1, 0.05),
        ("d-psgd", "moniqua-1mbit-1ms", 15.5, 0.05),
        ("moniqua-8", "moniqua-1mbit-1ms", 3.24, 0.05),
        ("choco-8", "moniqua-1mbit-1ms", 1.44, 0.05),
        ("moniqua-1", "moniqua-1mbit-1ms", 0.708, 0.05),
        ("sparse-push-1%", "moniqua-1mbit-1ms", 0.204, 0.17),
        ("quant-sgp", "moniqua-1mbit-1ms", 0.174, 0.17),
        ("moniqua-8", "10mbit", 0.458, 0.12),
        ("sparse-push-1%", "10mbit", 0.122, 0.17),
        ("quant-sgp", "10mbit", 0.126, 0.17),
    ],
)
def test_rounds_of_ours_are_predicted(name: str, profile: str, measured_s: float, short_by: float) -> None:
    """Messages of a ResNet-20, eight peers, a step of 0.1 s. What processors take is not in a prediction, so it is
    short and never long."""
    config = load(environment={}, overrides=OWN[name])
    schedule = run_plan.build_schedule(config, Path(), 8)
    to_all = run_plan.algorithm_spec(config).memory is Memory.REPLICAS
    predicted = predict.round_seconds(schedule, predict.link_model(find(profile)), 0.1, weight(name), to_all=to_all)
    assert measured_s * (1 - short_by) < predicted < measured_s * 1.01


@pytest.mark.parametrize(
    ("model", "profile", "step_s", "name", "measured_s", "measured_kbytes", "short_by"),
    [
        ("resnet20", "moniqua-1mbit-1ms", 0.1, "ddp", 16.6, 2049.8, 0.06),
        ("resnet20", "moniqua-1mbit-1ms", 0.1, "ddp-fp16", 8.41, 1028.8, 0.06),
        ("resnet20", "moniqua-1mbit-1ms", 0.1, "ddp-powersgd", 1.35, 146.2, 0.08),
        ("resnet20", "10mbit", 0.1, "ddp", 1.78, 2050.1, 0.06),
        ("resnet20", "10mbit", 0.1, "ddp-fp16", 0.958, 1028.4, 0.06),
        ("resnet20", "10mbit", 0.1, "ddp-powersgd", 0.338, 145.2, 0.26),
        ("vgg11", "10mbit", 0.3, "ddp", 57.8, 70963.7, 0.061),
        ("vgg11", "10mbit", 0.3, "ddp-fp16", 29.9, 35430.4, 0.061),
        ("vgg11", "10mbit", 0.3, "ddp-powersgd", 1.29, 416.4, 0.49),
    ],
)
def test_rounds_of_rivals_are_predicted(
    model: str, profile: str, step_s: float, name: str, measured_s: float, measured_kbytes: float, short_by: float
) -> None:
    layers, links = of_model(model), predict.link_model(find(profile))
    option = Option.model_validate({"name": name, "title": name, "rival": name})
    averages = rivals.averages(option, layers.sizes, layers.shapes)
    assert averages is not None
    assert measured_s * (1 - short_by) < averages.round_s(8, links, step_s) < measured_s
    # The interface also counts acknowledgements.
    assert 0.94 * measured_kbytes < averages.wire_bytes(8, links) / 1000 < measured_kbytes
