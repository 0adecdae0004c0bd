"""DP-SGD: gradients clipped sample by sample, of samples drawn at random, with Gaussian noise on their sum.

After Abadi et al., "Deep learning with differential privacy" (2016), Algorithm 1: every own sample is in a batch with
probability q, independently of the others, and the gradient is

    (Σ_i g_i · min(1, C / ‖g_i‖₂) + N(0, σ² C² I)) / (q m),    m the number of own samples.

The divisor is the expected size of a batch: the true one would tell which samples there are. Momentum, averaging and
compression of that gradient are post-processing. ε is accounted for in `privacy_budget`.

Sampling and noise are the output of SHAKE-256 under a secret key, not of the generators of `peer.random`, whose 64-bit
keys are no secret. Sampling is a function of (secret, round, local step, z), and noise of the clipped sum and its own
size as well. A round repeated unchanged therefore has the same bits, and one with another sum, from another z or with
other settings, has other noise: the same noise would cancel in the difference.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call, grad, vmap

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, TaskError
from peer.random import normals_of
from peer.train.data import Batch
from peer.train.label_adjustment import Loss
from peer.train.precision import precision_of
from peer.train.task import Task

SECRET_BYTES = 32
SECRET_FILE = "secret.json"
"""File in the state folder of a peer whose local steps are private."""
_SAMPLING, _NOISE = b"sampling", b"noise"
_MOST_NUMBERS = 1 << 25
"""Most numbers in the gradients of samples that are in memory together."""
_BELOW = 1.0 - 2.0**-20
"""Clipped a little below C, so that rounding to float32 does not lead above it."""
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


@dataclass(frozen=True)
class GaussianMechanism:
    """The mechanism that makes the local steps of one peer private."""

    noise_multiplier: float
    """σ."""
    clip_norm: float
    """C."""
    secret: bytes = field(repr=False)
    """SECRET_BYTES that nobody else knows. Anybody who knows them can take the noise away."""

    def draws(self, z: npt.NDArray[np.float32], t: int, local: int) -> PrivateDraws:
        """Return the random numbers of one local step from `z: float32[n]`."""
        name = hashlib.blake2b(z.tobytes(), digest_size=32, key=self.secret, person=b"sotto privacy")
        name.update(struct.pack("<QQ", t, local))
        return PrivateDraws(name.digest())


@dataclass(frozen=True)
class PrivateDraws:
    """The random numbers of one private step."""

    key: bytes = field(repr=False)

    def chosen(self, num_samples: int, rate: float) -> npt.NDArray[np.int64]:
        """Return which of `num_samples` samples are in the batch, int64[b], ascending: each with probability `rate`."""
        uniforms = (_words(self.key, _SAMPLING, num_samples) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.flatnonzero(uniforms < rate).astype(np.int64)

    def noise(self, total: npt.NDArray[np.float64], deviation: float) -> npt.NDArray[np.float64]:
        """Return normal numbers of that standard deviation to add to `total: float64[n]`, float64[n]."""
        name = hashlib.blake2b(total.tobytes(), digest_size=32, key=self.key, person=b"sotto noise")
        name.update(struct.pack("<d", deviation))
        return deviation * normals_of(_words(name.digest(), _NOISE, total.size) >> np.uint64(12))


class LossModule(torch.nn.Module):
    """A loss as a module, so that the parameters of its model can be replaced from outside."""

    def __init__(self, loss: Loss, model: torch.nn.Module) -> None:
        super().__init__()
        self.loss, self.model = loss, model

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.loss(self.model, batch)


class ClippedSum:
    """The sum of the gradients of samples, each shortened to a norm."""

    def __init__(self, loss: Loss, model: torch.nn.Module, names: tuple[str, ...], clip_norm: float) -> None:
        """`names`: the parameters to differentiate by, in the order of the flat gradient. Raises ConfigError for a
        model whose layers mix the samples of a batch or keep statistics of them."""
        for name, module in model.named_modules():
            if isinstance(module, _BATCH_NORMS):
                raise _refusal(
                    f"layer {name} is a {type(module).__name__}: its statistics mix the samples of a batch and would"
                    " be sent without noise; use a model with group or layer norms"
                )
        self._module, self._clip_norm = LossModule(loss, model), clip_norm
        own = dict(model.named_parameters())
        self._parameters = {f"model.{name}": own[name] for name in names}
        self._size = sum(parameter.numel() for parameter in self._parameters.values())
        self._gradients = vmap(grad(self._loss_of_one), in_dims=(None, 0), randomness="different")

    def of(self, batch: Batch) -> npt.NDArray[np.float64]:
        """Return Σ g_i · min(1, C / ‖g_i‖₂) over the samples of a batch, float64[n]. A gradient that is not finite
        counts as 0."""
        total = torch.zeros(self._size, dtype=torch.float64)
        parameters = {name: parameter.detach() for name, parameter in self._parameters.items()}
        at_once = max(1, _MOST_NUMBERS // self._size)
        for start in range(0, len(batch[0]), at_once):
            parts = self._gradients(parameters, tuple(part[start : start + at_once] for part in batch))
            flat = torch.cat([parts[name].flatten(1) for name in self._parameters], dim=1)
            norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
            scale = (self._clip_norm * _BELOW / norms).clamp(max=1.0)
            finite = norms.isfinite()
            flat = torch.where(finite[:, None], flat, 0.0)
            scale = torch.where(finite, scale, 0.0)
            total += (scale.to(flat.dtype) @ flat).double().cpu()
        return total.numpy()

    def try_on(self, batch: Batch, task: Task) -> None:
        """Compute the gradients of a few samples. Raises ConfigError where that fails: where layers change buffers as
        they train, too, since torch refuses that."""
        try:
            self.of(batch)
        except (RuntimeError, TaskError) as error:
            raise _refusal(
                f"the gradients of single samples of task {task.name} cannot be computed by torch.func.vmap: "
                f"{str(error).splitlines()[0].rstrip('.')}"
            ) from error

    def _loss_of_one(self, parameters: dict[str, torch.Tensor], sample: Batch) -> torch.Tensor:
        loss: torch.Tensor = functional_call(self._module, parameters, (tuple(part[None] for part in sample),))
        return loss


def noised_mean(
    total: npt.NDArray[np.float64], draws: PrivateDraws, mechanism: GaussianMechanism, expected_size: float
) -> npt.NDArray[np.float32]:
    """Return (total + σ C · noise) / expected_size, float32[n]."""
    noise = draws.noise(total, mechanism.noise_multiplier * mechanism.clip_norm)
    return ((total + noise) / expected_size).astype(np.float32)


def _words(key: bytes, purpose: bytes, size: int) -> npt.NDArray[np.uint64]:
    """Return random 64-bit integers, uint64[size]."""
    return np.frombuffer(hashlib.shake_256(key + purpose).digest(8 * size), "<u8").astype(np.uint64)


def check_options(task: Task, options: TrainingOptions, num_samples: int) -> None:
    """Raise ConfigError for what only task and samples tell; `peer.run.plan.privacy_findings` looks at all else."""
    if (precision := precision_of(task, options)) != "float32":
        raise ConfigError(
            f"is {precision} for task {task.name}: the ranges of its numbers follow the samples without noise, which"
            " [privacy] does not account for",
            key="training.precision",
            value=options.precision,
            valid="float32",
        )
    if not math.isfinite(sampling_rate(options, num_samples)) or sampling_rate(options, num_samples) > 1:
        raise ConfigError(
            f"is larger than the {num_samples} training samples of this device",
            key="training.batch_size",
            value=options.batch_size,
        )


def sampling_rate(options: TrainingOptions, num_samples: int) -> float:
    """Return q, the probability of a sample to be in a batch."""
    return options.batch_size / num_samples if num_samples else math.inf


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"{problem}; or leave privacy off", key="privacy")
