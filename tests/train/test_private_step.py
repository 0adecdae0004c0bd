"""Private local steps: what a sample can change, what the noise is like, who is drawn, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.errors import ConfigError
from peer.train.data import Classification
from peer.train.local_step import Trainer
from peer.train.private_step import ClippedSum, GaussianMechanism
from tests.train.small_tasks import all_indices, descend, normed_points, points

SECRET = bytes(range(32))
CLIP = 0.05


def trainer(noise: float = 1.0, *, task: Classification | None = None, secret: bytes = SECRET, **options) -> Trainer:
    task = task or points()
    settings = {"momentum": "none", "batch_size": 24, "warmup_rounds": 0, "schedule": "constant"} | options
    return Trainer(
        task,
        TrainingOptions(**settings),
        rounds=50,
        seed=7,
        peer=0,
        train_indices=all_indices(task),
        privacy=GaussianMechanism(noise, CLIP, secret),
    )


def clipped_sum(clip_norm: float) -> tuple[ClippedSum, Classification]:
    task = points()
    torch.manual_seed(0)
    model = task.make_model()
    return ClippedSum(task.loss, model, tuple(name for name, _ in model.named_parameters()), clip_norm), task


# Sensitivity


def test_one_sample_more_changes_the_sum_by_at_most_the_clip_norm():
    total, task = clipped_sum(CLIP)
    everything = task.train_data().batch(torch.arange(96))
    whole = total.of(everything)
    for left_out in range(96):
        others = torch.arange(96) != left_out
        change = np.linalg.norm(whole - total.of(tuple(part[others] for part in everything)))
        assert change <= CLIP * (1 + 1e-5)  # Sums of 96 float32 values, none above CLIP.


def test_a_sample_with_a_gradient_beyond_bounds_changes_no_more():
    total, task = clipped_sum(CLIP)
    inputs, labels = task.train_data().batch(torch.arange(8))
    for wrong in (1e30, float("inf"), float("nan")):
        inputs[3] = wrong
        others = torch.arange(8) != 3
        change = total.of((inputs, labels)) - total.of((inputs[others], labels[others]))
        assert np.linalg.norm(change) <= CLIP * (1 + 1e-5)


def test_without_clipping_the_sum_is_that_of_the_mean_loss():
    total, task = clipped_sum(1e6)
    torch.manual_seed(0)
    model = task.make_model()
    batch = task.train_data().batch(torch.arange(40))
    parts = torch.autograd.grad(task.loss(model, batch), list(model.parameters()))
    expected = 40 * torch.cat([part.reshape(-1) for part in parts]).numpy()
    np.testing.assert_allclose(total.of(batch), expected, rtol=1e-4, atol=1e-5)


# Noise and sampling


def test_noise_is_normal_with_the_deviation_that_the_options_say():
    noisy = trainer(noise=3.0)
    z = noisy.initial_vector()
    exact = trainer(noise=1e-12)
    # The same draws but for the factor of the noise: what differs is the noise alone.
    rest = [noisy.gradient(z, t, 0.1, 0.1).gradient - exact.gradient(z, t, 0.1, 0.1).gradient for t in range(200)]
    standard = np.concatenate(rest) * 24 / (3.0 * CLIP)
    # Mean and variance of n normal numbers deviate by more than 5 standard errors in fewer than 1 of 10⁶ cases.
    n = standard.size
    assert abs(standard.mean()) < 5 / np.sqrt(n)
    assert abs(standard.var() - 1) < 5 * np.sqrt(2 / n)
    assert abs((np.abs(standard) < 1).mean() - 0.6827) < 5 * np.sqrt(0.6827 * 0.3173 / n)


def test_every_sample_is_drawn_with_the_same_probability_independently_of_others():
    mechanism, z = GaussianMechanism(1.0, 1.0, SECRET), np.zeros(4, np.float32)
    rate, rounds, m = 0.2, 4000, 50
    drawn = np.zeros((rounds, m))
    for t in range(rounds):
        drawn[t, mechanism.draws(z, t, 0).chosen(m, rate)] = 1
    error = 5 * np.sqrt(rate * (1 - rate) / rounds)
    assert np.abs(drawn.mean(axis=0) - rate).max() < error
    # The size of a batch is binomial; the variance of a sample variance is 2 σ⁴ / n for about normal numbers.
    variance = m * rate * (1 - rate)
    assert abs(drawn.sum(axis=1).var() - variance) < 5 * variance * np.sqrt(2 / rounds)


def test_draws_differ_by_secret_round_step_and_point():
    z, other = np.zeros(4, np.float32), np.ones(4, np.float32)
    mechanism = GaussianMechanism(1.0, 1.0, SECRET)
    draws = [
        mechanism.draws(z, 0, 0),
        mechanism.draws(z, 1, 0),
        mechanism.draws(z, 0, 1),
        mechanism.draws(other, 0, 0),
        GaussianMechanism(1.0, 1.0, SECRET[::-1]).draws(z, 0, 0),
    ]
    total = np.zeros(3)
    assert len({each.noise(total, 1.0).tobytes() for each in draws}) == len(draws)
    assert mechanism.draws(z, 1, 0).noise(total, 1.0).tobytes() == draws[1].noise(total, 1.0).tobytes()


def test_another_sum_in_the_same_round_has_other_noise():
    """With the same noise, the difference of what is sent would tell both sums."""
    draws = GaussianMechanism(1.0, 1.0, SECRET).draws(np.zeros(4, np.float32), 0, 0)
    noises = [
        draws.noise(np.zeros(1000), 1.0),
        draws.noise(np.full(1000, 1e-9), 1.0),
        draws.noise(np.zeros(1000), 2.0) / 2.0,
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # The correlation of 1,000 independent pairs deviates by more than 5 / √1000 in fewer than 1 of 10⁶ cases.
        assert abs(np.corrcoef(noises[one], noises[other])[0, 1]) < 5 / np.sqrt(1000)


def test_the_secret_is_in_no_text():
    assert "secret" not in repr(GaussianMechanism(1.0, 1.0, SECRET))
    assert "key" not in repr(GaussianMechanism(1.0, 1.0, SECRET).draws(np.zeros(4, np.float32), 0, 0))


# The trainer


@pytest.mark.parametrize("local_steps", [1, 3])
def test_the_same_secret_gives_the_same_bits_whatever_was_computed_before(local_steps: int):
    one, two = (trainer(local_steps=local_steps) for _ in range(2))
    z = descend(one, one.initial_vector(), range(4))
    assert z.tobytes() == descend(two, two.initial_vector(), range(4)).tobytes()
    late = trainer(local_steps=local_steps).gradient(z, 4, 0.1, 0.1)
    assert one.gradient(z, 4, 0.1, 0.1).gradient.tobytes() == late.gradient.tobytes()
    different = trainer(local_steps=local_steps, secret=SECRET[::-1]).gradient(z, 4, 0.1, 0.1)
    assert late.gradient.tobytes() != different.gradient.tobytes()


def test_a_private_step_tells_no_loss_and_no_size_of_its_batch():
    private = trainer()
    steps = [private.gradient(private.initial_vector(), t, 0.1, 0.1) for t in range(5)]
    assert [(step.loss, step.samples) for step in steps] == [(None, 24)] * 5


def test_with_little_noise_it_learns():
    private = trainer(noise=0.1, batch_size=48)
    z = private.initial_vector()
    before = private.evaluate(z).accuracy
    for t in range(50):
        z = z - np.float32(20.0) * private.gradient(z, t, 20.0, 20.0).gradient
    assert private.evaluate(z).accuracy > max(0.8, before)


# Refusals


def stateful_points() -> Classification:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.linear(inputs)

    task = points()
    task.model = Counting
    return task


def branching_points() -> Classification:
    class Branching(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            return outputs if outputs.sum() > 0 else -outputs

    task = points()
    task.model = lambda: Branching(2, 3)
    return task


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (normed_points, "BatchNorm1d: its statistics mix the samples"),
        (stateful_points, "in-place operation"),
        (branching_points, "cannot be computed by torch.func.vmap"),
    ],
)
def test_models_that_mix_samples_or_keep_what_they_saw_are_refused(task, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        trainer(task=task())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"precision": "bfloat16"}, "training.precision"),
        ({"batch_size": 97}, "training.batch_size"),
    ],
)
def test_options_that_look_at_samples_without_noise_are_refused(options: dict[str, object], key: str):
    with pytest.raises(ConfigError) as error:
        trainer(**options)
    assert error.value.key == key


def test_label_adjustment_is_left_out_where_it_is_automatic():
    task = points()
    labels = task.train.labels
    first = np.flatnonzero(labels.numpy() == 0)
    mechanism = GaussianMechanism(1.0, CLIP, SECRET)
    options = TrainingOptions(batch_size=8, label_adjustment="auto")
    private = Trainer(task, options, rounds=5, seed=0, peer=0, train_indices=first, privacy=mechanism)
    assert "label_adjustment" not in private.state()
    plain = Trainer(task, options, rounds=5, seed=0, peer=0, train_indices=first)
    assert "label_adjustment" in plain.state()


def test_a_batch_that_nobody_is_in_is_noise_alone():
    private = trainer(batch_size=1)
    z = private.initial_vector()
    mechanism = GaussianMechanism(1.0, CLIP, SECRET)
    empty = next(t for t in range(99) if not len(mechanism.draws(z, t, 0).chosen(96, 1 / 96)))
    noise = mechanism.draws(z, empty, 0).noise(np.zeros(z.size), CLIP)
    assert private.gradient(z, empty, 0.1, 0.1).gradient.tobytes() == noise.astype(np.float32).tobytes()
