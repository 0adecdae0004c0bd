"""The report on what a model costs: counted by hand where that can be done, measured where it cannot."""

from __future__ import annotations

import json

import pytest
import torch

from peer.errors import ConfigError
from peer.ops.peer_processes import peer_environment
from peer.ops.profile import (
    EIGHT_BITS,
    FRUGAL,
    MODELS,
    WHOLE,
    Products,
    Workload,
    _child,
    check,
    count_messages,
    count_products,
    make_inputs,
    make_model,
    measure,
)
from peer.train.layers import FULL_PRECISION
from peer.train.models.distilbert import DistilBertSize, distilbert
from tests.cli.runner import sotto


def products(workload: Workload) -> tuple[int, int, int]:
    found = count_products(make_model(workload, FULL_PRECISION), workload)
    return found.forward, found.input_gradient, found.weight_gradient


def test_products_of_an_mlp_are_those_of_its_matrices():
    first, rest = 784 * 512, 512 * 512 + 512 * 10
    assert products(Workload("mlp", 4)) == (4 * (first + rest), 4 * rest, 4 * (first + rest))


def test_products_of_resnet20_are_the_41_million_of_its_paper():
    forward, inner, weights = products(Workload("resnet20", 1))
    # 40.55 M, and the 1×1 convolutions of two shortcuts.
    assert forward == weights == 40_551_040 + 2 * 16 * 32 * 256
    assert inner == forward - 32 * 32 * 16 * 27


def test_attention_has_products_without_weights():
    n, d = 16, 32
    model = distilbert(10, DistilBertSize(width=d, blocks=2, heads=4, hidden=64))
    found = count_products(model, Workload("distilbert", 3, size=n))
    linear = 3 * (2 * (4 * d * d + 2 * d * 64) * n + d * d + d * 10)
    mixed = 3 * 2 * 2 * n * n * d
    assert found == Products(linear + mixed, linear + 2 * mixed, linear)


def test_codes_of_8_bits_take_a_quarter():
    workload = Workload("mlp", 4)
    model = make_model(workload, FULL_PRECISION)
    sizes = count_messages(model, workload)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Entropy coding finds something in the exponents of float32.
    assert 0.75 * 4 * parameters < sizes[WHOLE] < 1.01 * 4 * parameters
    assert sizes[EIGHT_BITS] == pytest.approx(parameters, rel=0.05)
    assert sizes["top 2 % in 4 bits"] < sizes["top 1 %"] < 0.02 * sizes[WHOLE]


def test_what_is_kept_for_the_backward_pass_is_counted():
    """Input and both hidden layers of 4 samples, and what the loss is not part of; in 8 bits a quarter."""
    workload = Workload("mlp", 4)
    full, eight = (measure(workload, precision) for precision in ("float32", "int8"))
    assert full.saved_bytes == 4 * 4 * (784 + 512 + 512)
    assert full.saved_bytes / eight.saved_bytes == pytest.approx(4, rel=0.15)
    assert full.step_s > 0
    assert eight.peak_bytes is None or eight.peak_bytes >= 0


def test_the_peak_holds_what_is_kept_whatever_else_the_environment_says_of_freed_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in peer_environment().items():
        if name.startswith("MALLOC_"):
            monkeypatch.setenv(name, value)
    cost = _child(Workload("resnet20"), "int8", FRUGAL)
    assert cost.peak_bytes is None or cost.peak_bytes > cost.saved_bytes


def test_bfloat16_keeps_half_of_the_activations_and_a_copy_of_the_weights():
    half = measure(Workload("mlp", 4), "bfloat16")
    # The first layer computes no gradient of its input, so it keeps no copy of its weights.
    assert half.saved_bytes == 2 * (4 * (784 + 512 + 512) + 512 * 512 + 512 * 10)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "distilbert"])
def test_inputs_fit_their_models(model: str):
    workload = Workload(model, 1)
    check(workload)
    with torch.no_grad():
        output = make_model(workload, FULL_PRECISION).eval()(make_inputs(workload))
    assert output.shape == (1, 10)
    assert isinstance(output, torch.Tensor)


@pytest.mark.parametrize(
    ("workload", "sentence"),
    [
        (Workload("quadratic"), "MODEL: unknown model .*valid: logistic, mlp"),
        (Workload("resnet20", size=64), "needs images of 32 × 32 pixels"),
        (Workload("resnet20", norm="layer"), "--norm: unknown norm"),  # type: ignore[arg-type]
        (Workload("vgg11", size=4), "is out of range"),
    ],
)
def test_workloads_that_cannot_be_are_refused(workload: Workload, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        check(workload)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_command_prints_every_precision():
    """In processes of their own, though not with the memory that each sets up before it starts (`FRUGAL`), which the
    peak above has."""
    result = sotto("lab", "profile", "logistic", "--batch", "8", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["parameters"] == 7850
    assert set(report["costs"]) == {"float32", "bfloat16", "int8"}
    for cost in report["costs"].values():
        assert cost["saved_bytes"] > 0
        assert cost["step_s"] > 0
    assert report["operations"]["bfloat16"] == {"float32": 0, "bfloat16": 2 * 8 * 7840, "int8": 0}
    assert report["operations"]["int8"] == {"float32": 0, "bfloat16": 8 * 7840, "int8": 8 * 7840}


def test_the_table_shows_ratios(monkeypatch: pytest.MonkeyPatch):
    from peer.ops import profile as module
    from peer.ops.profile import StepCost

    monkeypatch.setattr(
        module,
        "_measure_apart",
        lambda workload, precision: StepCost(400, 900, 0.02) if precision == "float32" else StepCost(100, None, 0.01),
    )
    printed = sotto("lab", "profile", "logistic").stdout
    assert "4.0×" in printed
    assert "20.0 ms" in printed
