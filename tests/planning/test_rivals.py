"""What other systems send."""

from __future__ import annotations

import math

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from peer.lab.study import predict
from peer.links.profiles import Profile
from peer.planning import rivals
from peer.planning.evidence import Option
from peer.planning.layers import of_model

LINK = predict.link_model(Profile(up_kbit=8000, down_kbit=8000, latency_ms=50))


def rival(name: str, every: int = 1) -> Option:
    return Option.model_validate({"name": name, "title": name, "rival": name, "every": every})


@pytest.mark.parametrize("model", ["resnet20", "resnet18", "vgg11"])
def test_power_sgd_leaves_whole_what_torch_leaves_whole(model: str) -> None:
    shapes = of_model(model).shapes
    assert shapes is not None
    numbers = 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape) // shape[0]
        compress, _, compressed = powerSGD_hook._should_compress(rows, columns, 2, 2.0)
        numbers += compressed if len(shape) > 1 and compress else math.prod(shape)
    assert sum(rivals.power_sgd_payloads(shapes)) == 4 * numbers


def test_power_sgd_of_a_resnet20_sends_what_the_independent_table_says() -> None:
    shapes = of_model("resnet20").shapes
    assert shapes is not None
    assert sum(rivals.power_sgd_payloads(shapes)) * 2 * 7 / 8 == pytest.approx(108_000, rel=0.005)


def test_a_ring_sends_nearly_two_models_whatever_the_number_of_workers() -> None:
    ddp = rivals.averages(rival("ddp"), [1_000_000], None)
    assert ddp is not None
    for workers in (2, 8, 64):
        sent = ddp.wire_bytes(workers, LINK)
        numbers = 2 * (workers - 1) / workers * 4_000_000
        assert numbers * 1.04 < sent < numbers * 1.06 + 2 * workers * 700


def test_every_hop_waits_for_the_latency() -> None:
    ddp = rivals.averages(rival("ddp"), [8], None)
    assert ddp is not None
    assert ddp.round_s(8, LINK, 0.1) == pytest.approx(0.1 + 14 * 0.05, abs=0.02)
    # Three averages, one after the other.
    three = rivals.averages(rival("ddp-powersgd"), [8], [(8,)])
    assert three is not None
    assert three.round_s(8, LINK, 0.1) == pytest.approx(0.1 + 3 * 14 * 0.05, abs=0.05)


def test_local_sgd_divides_the_average_by_its_steps() -> None:
    every = rivals.averages(rival("local-sgd", 8), [1_000_000], None)
    ddp = rivals.averages(rival("ddp"), [1_000_000], None)
    assert every is not None
    assert ddp is not None
    assert every.wire_bytes(8, LINK) == ddp.wire_bytes(8, LINK) / 8
    assert every.round_s(8, LINK, 0.1) - 0.1 == pytest.approx((ddp.round_s(8, LINK, 0.1) - 0.1) / 8)


def test_power_sgd_of_a_mere_number_is_not_guessed() -> None:
    assert rivals.averages(rival("ddp-powersgd"), [1_000_000], None) is None
