"""Momentum and weight decay, against formulas written out; quasi-global momentum is also in the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from peer.compress.layout import Layout
from peer.errors import ConfigError
from peer.records import ADAPTIVE
from peer.train.momentum import KINDS, Momentum


def test_weight_decay_comes_before_momentum():
    g, z = np.array([1.0, -2.0]), np.array([10.0, 20.0])
    assert np.allclose(Momentum(weight_decay=0.1).direction(g, z), [2.0, 0.0])
    heavy = Momentum("heavy-ball", beta=0.5, weight_decay=0.1)
    heavy.direction(g, z)
    assert np.allclose(heavy.direction(g, z), [3.0, 0.0])
    assert np.array_equal(g, [1.0, -2.0])


def test_heavy_ball_and_nesterov():
    g = [np.array([1.0]), np.array([2.0])]
    heavy, nesterov = Momentum("heavy-ball", beta=0.9), Momentum("nesterov", beta=0.9)
    z = np.zeros(1)
    assert [float(heavy.direction(v, z)[0]) for v in g] == pytest.approx([1.0, 2.9])
    assert [float(nesterov.direction(v, z)[0]) for v in g] == pytest.approx([1.9, 2 + 0.9 * 2.9])


@pytest.mark.parametrize("kind", KINDS)
def test_how_long_the_part_of_a_new_gradient_is(kind: str) -> None:
    z, g = np.zeros(1), np.array([3.0])
    fresh, kept = Momentum(kind, beta=0.8), Momentum(kind, beta=0.8)
    if kind in ADAPTIVE:
        assert fresh.first_step == 0.0
        assert np.allclose(fresh.direction(g, z), kept.direction(1000.0 * g, z))
        return
    assert np.allclose(fresh.direction(g, z), fresh.first_step * g)
    kept.direction(np.ones(1), z)
    beside = Momentum(kind, beta=0.8)
    beside.restore(kept.state())
    assert np.allclose(kept.direction(1.0 + g, z) - beside.direction(np.ones(1), z), kept.first_step * g)


@pytest.mark.parametrize("kind", ["qg", "qg-nesterov"])
def test_quasi_global_momentum_follows_what_the_round_did_to_z(kind):
    m = Momentum(kind, beta=0.9, mu=0.8)
    z0, z1, g = np.array([1.0]), np.array([0.0]), np.array([2.0])
    first = {"qg": 2.0, "qg-nesterov": 2 + 0.9 * 2}[kind]
    assert float(m.direction(g, z0)[0]) == pytest.approx(first)
    m.after_round(z0, z1, 0.5)
    hat = 0.2 * 1.0 / 0.5
    second = {"qg": 0.9 * hat + 2, "qg-nesterov": 2 + 0.9 * (0.9 * hat + 2)}[kind]
    assert float(m.direction(g, z1)[0]) == pytest.approx(second)
    m.after_round(z1, z0, 0.0)
    assert float(m.direction(g, z1)[0]) == pytest.approx(second), "γ = 0 leaves the momentum"


def test_mu_is_beta_unless_set():
    assert Momentum("qg", beta=0.7).mu == 0.7


def test_adam_is_adam():
    rng = np.random.default_rng(0)
    adam = Momentum("adam", beta=0.9, beta2=0.99, epsilon=1e-8)
    m = v = np.zeros(5)
    for t in range(1, 20):
        g = rng.normal(size=5)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        wanted = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        assert np.allclose(adam.direction(g, np.zeros(5)), wanted, rtol=1e-12)


@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_adamw_and_clipping_are_those_of_pytorch(clip_norm):
    rng = np.random.default_rng(3)
    ours, z = Momentum("adamw", beta=0.9, beta2=0.95, weight_decay=0.1, clip_norm=clip_norm), rng.normal(size=50_000)
    theirs = torch.nn.Parameter(torch.from_numpy(z.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for g in rng.normal(size=(6, z.size)) * np.array([0.001, 1.0, 0.01, 3.0, 0.0, 0.1])[:, None]:
        before = g.copy()
        z = z - 0.01 * ours.direction(g, z)
        assert np.array_equal(g, before), "the caller's gradient stays"
        theirs.grad = torch.from_numpy(g)
        torch.nn.utils.clip_grad_norm_([theirs], clip_norm)
        optimizer.step()
    np.testing.assert_allclose(z, theirs.detach().numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (6, 2, 3)])
def test_muon_is_that_of_pytorch(shape: tuple[int, ...]) -> None:
    layout = Layout(("embedding", "hidden", "norm"), (40, math.prod(shape), 8), ((5, 8), shape, (8,)), hidden=(1,))
    rng = np.random.default_rng(3)
    z, (beside, part, behind) = rng.normal(size=layout.size), layout.slices
    ours = Momentum("muon", beta=0.9, beta2=0.95, weight_decay=0.1, layout=layout)
    adamw = Momentum("adamw", beta=0.9, beta2=0.95, weight_decay=0.1)
    matrix = torch.nn.Parameter(torch.from_numpy(z[part].copy()).reshape(shape[0], -1))
    theirs = torch.optim.Muon(
        [matrix], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", ns_steps=5
    )
    for g in rng.normal(size=(6, layout.size)):
        before, direction = z.copy(), ours.direction(g, z).copy()
        of_adam = adamw.direction(g, z)
        assert all(np.array_equal(direction[each], of_adam[each]) for each in (beside, behind))
        z = z - 0.01 * direction
        matrix.grad = torch.from_numpy(g[part]).reshape(matrix.shape)
        theirs.step()
        # PyTorch's five steps are in bfloat16: each rounds by up to 2⁻⁹, and the next enlarges that at most 3.44 times.
        moved = np.linalg.norm(z[part] - before[part])
        assert np.linalg.norm(z[part] - matrix.detach().numpy().ravel()) < 0.05 * moved
        z[part] = matrix.detach().numpy().ravel()


def test_muon_makes_steps_orthogonal() -> None:
    layout = Layout.of_shapes([(32, 64)])
    g = np.random.default_rng(0).normal(size=layout.size) * 1e-5
    direction = Momentum("muon", layout=replace(layout, hidden=(0,))).direction(g, np.zeros_like(g))
    values = np.linalg.svd(direction.reshape(32, 64), compute_uv=False) / (0.2 * 8)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_muon_takes_vectors_side_by_side_and_goes_on_from_its_state() -> None:
    layout = replace(Layout.of_shapes([(4, 3), (5,), (3, 6), (7,)]), hidden=(0, 2))
    rng, singles = np.random.default_rng(2), [Momentum("muon", layout=layout) for _ in range(3)]
    together = Momentum("muon", layout=layout)
    for gradients in rng.normal(size=(4, 3, layout.size)).astype(np.float32):
        anew = Momentum("muon", layout=layout)
        anew.restore(together.state())
        found = anew.direction(gradients.ravel(), np.zeros_like(gradients.ravel())).copy()
        alone = [each.direction(g, np.zeros_like(g)).copy() for each, g in zip(singles, gradients, strict=True)]
        assert np.array_equal(np.concatenate(alone), found)
        together = anew
    assert (together.size_of("m"), together.size_of("v")) == (42, 12) == (42, len(singles[0].state()["v"]))


def test_only_longer_gradients_are_shortened_whatever_comes_behind():
    long, z = np.array([3.0, 4.0]), np.array([1.0, 1.0])
    assert np.allclose(Momentum(clip_norm=1.0).direction(long, z), [0.6, 0.8])
    assert np.allclose(Momentum(clip_norm=1.0, weight_decay=0.5).direction(long, z), [1.1, 1.3])
    assert np.array_equal(Momentum(clip_norm=5.0).direction(long, z), long)
    broken = Momentum(clip_norm=1.0).direction(np.array([np.inf, 1.0]), z)
    assert not np.isfinite(broken).all(), "a gradient that is none is not hidden"


@pytest.mark.parametrize("kind", KINDS)
def test_restored_momentum_goes_on_bit_for_bit_in_float32(kind):
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(10, 3, 40)).astype(np.float32)
    one, other = (Momentum(kind, weight_decay=0.01, clip_norm=6.0) for _ in range(2))
    for k, (g, z, after) in enumerate(vectors):
        if k == 5:
            saved = {name: np.array(value) for name, value in one.state().items()}
            other.restore(saved)
        direction = one.direction(g, z).copy()
        assert direction.dtype == np.float32
        one.after_round(z, after, 0.1)
        if k >= 5:
            assert other.direction(g, z).tobytes() == direction.tobytes()
            other.after_round(z, after, 0.1)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"kind": "adamax"}, "kind"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"kind": "qg", "beta": 1.0}, "beta"),
        ({"kind": "qg", "mu": -0.1}, "mu"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
    ],
)
def test_wrong_settings_are_named(settings, word):
    with pytest.raises(ConfigError, match=word):
        Momentum(**settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_direction_in_the_memory_of_the_gradient_has_the_same_bits(kind):
    rng = np.random.default_rng(2)
    one, other = (Momentum(kind, weight_decay=0.01, clip_norm=200.0) for _ in range(2))
    for g, z in rng.normal(size=(4, 2, 70_000)).astype(np.float32):
        expected, given = one.direction(g, z).copy(), g.copy()
        assert other.direction_(given, z).tobytes() == expected.tobytes()
    # A momentum that is no direction itself puts it there, and keeps nothing of it.
    direction = other.direction_(given, z)
    assert direction is (other.state()["m"] if kind == "heavy-ball" else given)
