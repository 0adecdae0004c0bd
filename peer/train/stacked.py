"""The local steps of all peers of one process at once: parameters stacked to [peers, ...], one operator for all.

For simulations. Small models cost a fraction of what they cost one by one, and a GPU is kept busy. Gradients equal
those of `Trainer` within float32 rounding, not bit for bit: a batched product adds up in another order. Samples, start,
momentum and schedule are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call, vmap

from peer.config.options import TrainingOptions
from peer.errors import DataError, TaskError
from peer.train.bfloat16 import computes_in_bfloat16
from peer.train.data import Batch, Classification, ImageData, TensorData, crop_and_flip
from peer.train.eight_bit import Network
from peer.train.evaluation import Evaluation, evaluate_model
from peer.train.label_adjustment import Loss, count_classes, deal_locally, training_loss
from peer.train.local_step import (
    StartedTraining,
    Vector,
    checked_indices,
    make_momentum,
    seed_operators,
)
from peer.train.memory import aligned
from peer.train.momentum import shortening
from peer.train.own_task import errors_of, inner_task
from peer.train.private_step import LossModule
from peer.train.sampling import BatchDraw, augmentation_uniforms, joined
from peer.train.task import Data, Task

Matrix: TypeAlias = npt.NDArray[np.float32]
How: TypeAlias = Literal["auto", "stacked", "one by one"]

_NUMBERS_AT_ONCE = 2**20
"""Parameters of a group of peers on a CPU: more do not fit the cache, and blocks of more than 32 MiB cost a page fault
for every page each time."""


@dataclass(frozen=True)
class StackedStep:
    """The result of a round's local steps, a row for each peer."""

    gradients: Matrix
    """G of each peer, float32[peers, n]: read only, and good until the next local step."""
    losses: npt.NDArray[np.float64]
    """float64[peers], as `LocalStep.loss`."""
    samples: int
    """Samples of each peer."""


class StackedTrainer(StartedTraining):
    """The local steps of many peers, with a row for each; the arguments are those of `Trainer`."""

    def __init__(
        self,
        task: Task,
        options: TrainingOptions,
        *,
        rounds: int,
        seed: int,
        shards: Sequence[npt.NDArray[np.int64]],
        device: str = "cpu",
        base: Path | None = None,
        how: How = "auto",
    ) -> None:
        """Set up one peer for each of `shards`, indices of its training samples.

        `how` "auto" computes one peer after the other where stacking does not pay: models with convolutions on a CPU,
        which become grouped convolutions (measured: no faster for ResNet-20). Networks in 8 bits are computed so in any
        case: their ranges and codes are those of one peer. The same holds for convolutions in bfloat16 on a CPU, whose
        images lie with their channels last. Raises the errors of `Trainer`.
        """
        super().__init__(task, options, rounds=rounds, seed=seed, device=device, base=base)
        self.train_data, self._test = _on_device(self.train_data, self.device), _on_device(self._test, self.device)
        self._shards = [checked_indices(shard, len(self.train_data)) for shard in shards]
        totals = count_classes(task) if task.num_classes else None
        dealt = [
            deal_locally(task, options, shard, self.rate, seed=seed, peer=peer, totals=totals)
            for peer, shard in enumerate(self._shards)
        ]
        self._schedules = [schedule for schedule, _ in dealt]
        self._adjustments = [adjustment for _, adjustment in dealt]
        self._adjusts = any(adjustment is not None for adjustment in self._adjustments)
        # Shifting and mirroring treats every sample alone, so that all peers' samples can be one batch.
        kind = inner_task(task)
        self._augments_together = (
            isinstance(kind, Classification) and kind.augmentation is crop_and_flip and kind.keeps("augment")
        )

        model, trained = self._start()
        stacks = how == "stacked" or (how == "auto" and (self.device.type == "cuda" or not _has_convolutions(model)))
        eight_bit = any(isinstance(module, Network) for module in model.modules())
        channels_last = self.device.type == "cpu" and computes_in_bfloat16(model) and _has_convolutions(model)
        engine = _Stacked if stacks and not eight_bit and not channels_last else _OneByOne
        loss = training_loss(task, adjusted=self._adjusts)
        self._engine: _OneByOne = engine(task, loss, model, trained, self.num_peers, seed)
        size = self.num_peers if self.device.type == "cuda" else max(1, _NUMBERS_AT_ONCE // self.layout.size)
        self.groups = [range(first, min(first + size, self.num_peers)) for first in range(0, self.num_peers, size)]
        """The peers that are computed together. The last bits of a peer's gradient depend on its group."""
        self._group_size = size
        # It sees the gradients of a group as one, and each has a norm of its own.
        unclipped = options.model_copy(update={"clip_norm": None})
        self._momenta = [make_momentum(unclipped, self.layout) for _ in self.groups]

    @property
    def num_peers(self) -> int:
        return len(self._shards)

    @property
    def needs_displacement(self) -> bool:
        """Whether `after_round` has anything to do."""
        return self._momenta[0].needs_round

    def group_of(self, peer: int) -> int:
        """Return the number of a peer's group."""
        return peer // self._group_size

    def gradients_of_group(self, number: int, z: Matrix, t: int, z_steps: npt.NDArray[np.floating[Any]]) -> StackedStep:
        """Return the local steps of round t of one of `groups` from `z: float32[group, n]`, which is not changed.

        `z_steps: float[group]` is how far z moves for each unit of gradient between local steps.
        """
        group, momentum = self.groups[number], self._momenta[number]
        steps, shape = self.options.local_steps, (len(group), self.layout.size)
        factor = z_steps.astype(np.float32)[:, None]
        moved = z
        total: Matrix | None = None
        direction: Matrix | None = None
        losses = np.zeros(len(group))
        for local in range(steps):
            if direction is not None:
                moved = moved - factor * direction
            gradient, local_losses = self._engine.gradients(moved, self._batch(t, local, group), t, local, group)
            if self.options.clip_norm is not None:
                for row in gradient:
                    row *= np.float32(shortening(row, self.options.clip_norm))
            # Momentum acts number by number, so that the peers of a group together are one long vector.
            flat = momentum.direction_(gradient.reshape(-1), moved.reshape(-1))
            direction = flat.reshape(shape)
            losses += local_losses
            if steps > 1:
                total = direction.copy() if total is None else np.add(total, direction, out=total)
        assert direction is not None
        return StackedStep(direction if total is None else total, losses / steps, steps * self.options.batch_size)

    def after_round_of_peer(self, peer: int, z_before: Vector, z_after: Vector, rate: float) -> None:
        """Let quasi-global momentum see how z of one peer moved in a round of learning rate `rate`; see
        `Trainer.after_round`."""
        number, row = divmod(peer, self._group_size)
        part = slice(row * self.layout.size, (row + 1) * self.layout.size)
        self._momenta[number].after_round(z_before, z_after, rate * self.options.local_steps, part)

    def evaluate_one(self, peer: int, z: Vector) -> Evaluation:
        """Return how one peer's model does on the test set, with the peer's own statistics of norms."""
        return self._engine.evaluate(peer, z, self._test)

    def _batch(self, t: int, local: int, peers: range) -> Batch:
        """Return the batches of some peers, each tensor stacked to [peers, b, ...]."""
        step, some = t * self.options.local_steps + local, slice(peers.start, peers.stop)
        draw = joined([schedule.batch(step) for schedule in self._schedules[some]])
        batch = self._augmented(
            draw, tuple(part.to(self.device) for part in self.train_data.batch(torch.from_numpy(draw.indices)))
        )
        if not self._adjusts:
            return batch
        nothing = np.zeros((self.options.batch_size, self.task.num_classes), np.float32)
        rows = [nothing if adjustment is None else adjustment.rows(step) for adjustment in self._adjustments[some]]
        return *batch, torch.from_numpy(np.stack(rows)).to(self.device)

    def _augmented(self, draw: BatchDraw, batch: Batch) -> Batch:
        """Return the samples of some peers, augmented if they are to be, each tensor stacked to [peers, b, ...]."""
        if not self._augments:
            return self._by_peer(batch)
        uniforms = torch.from_numpy(augmentation_uniforms(self.seed, draw, len(self.train_data))).to(self.device)
        if self._augments_together:
            return self._by_peer(self.task.augment(batch, uniforms))
        rows = zip(zip(*self._by_peer(batch), strict=True), *self._by_peer((uniforms,)), strict=True)
        augmented = [self.task.augment(row, numbers) for row, numbers in rows]
        return tuple(torch.stack(parts) for parts in zip(*augmented, strict=True))

    def _by_peer(self, batch: Batch) -> Batch:
        return tuple(part.view(-1, self.options.batch_size, *part.shape[1:]) for part in batch)


@dataclass
class _OneByOne:
    """One peer after the other, through one model."""

    task: Task
    loss: Loss
    model: torch.nn.Module
    trained: Mapping[str, torch.nn.Parameter]
    num_peers: int
    seed: int

    def __post_init__(self) -> None:
        self._parameters = list(self.trained.values())
        self._device = self._parameters[0].device
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self.buffers = {
            name: buffer.detach()[None].repeat(self.num_peers, *[1] * buffer.ndim)
            for name, buffer in self.model.named_buffers()
        }

    def gradients(
        self, z: Matrix, batch: Batch, t: int, local: int, peers: range
    ) -> tuple[Matrix, npt.NDArray[np.float64]]:
        losses = np.empty(len(z))
        gradients = torch.empty(z.shape, device=self._device)
        for row, peer in enumerate(peers):
            self._load(peer, z[row])
            seed_operators(self.seed, peer, t, local, self._device)
            loss = self.loss(self.model, aligned(tuple(part[row] for part in batch), self._device))
            with errors_of(self.task):
                parts = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
            torch.cat([part.reshape(-1) for part in parts], out=gradients[row])
            losses[row] = float(loss.detach())
            for name, buffer in self.model.named_buffers():
                self.buffers[name][peer] = buffer
        return gradients.cpu().numpy(), losses

    def evaluate(self, peer: int, z: Vector, data: Data) -> Evaluation:
        """Return the evaluation of one peer."""
        self._load(peer, z)
        return evaluate_model(self.task, self.model, data, np.arange(len(data), dtype=np.int64), self._device)

    def _load(self, peer: int, z: Vector) -> None:
        flat = torch.from_numpy(z).to(self._device)
        with torch.no_grad():
            for parameter, part in zip(self._parameters, torch.split(flat, self._sizes), strict=True):
                parameter.copy_(part.view(parameter.shape))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name][peer])


class _Stacked(_OneByOne):
    """One operator for all peers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._names = [f"model.{name}" for name in self.trained]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._loss = LossModule(self.loss, self.model)
        self._graph: _Graph | None = None
        self._may_capture = self._device.type == "cuda"

    def gradients(
        self, z: Matrix, batch: Batch, t: int, local: int, peers: range
    ) -> tuple[Matrix, npt.NDArray[np.float64]]:
        flat = torch.empty(z.shape, device=self._device)
        flat.copy_(torch.from_numpy(z))
        if self._may_capture and self._graph is None:
            self._graph = self._capture(flat, batch)
            self._may_capture = self._graph is not None
        if self._graph is not None:
            gradient, losses = self._graph.replay(flat, batch)
        else:
            buffers = {name: buffer[peers.start : peers.stop] for name, buffer in self.buffers.items()}
            gradient, losses = self._compute(flat, batch, buffers)
        return gradient.cpu().numpy(), losses.double().cpu().numpy()

    def _compute(
        self, flat: torch.Tensor, batch: Batch, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients float32[peers, n] and losses float32[peers]; the peers' losses share no number, so that the
        gradient of their sum is that of each."""
        flat = flat.detach().requires_grad_()
        parameters = {
            name: part.view(len(flat), *shape)
            for name, part, shape in zip(self._names, torch.split(flat, self._sizes, dim=1), self._shapes, strict=True)
        }
        parameters |= {f"model.{name}": buffer for name, buffer in buffers.items()}

        def one(own: dict[str, torch.Tensor], samples: Batch) -> Any:
            return functional_call(self._loss, own, (samples,))

        try:
            losses: torch.Tensor = vmap(one)(parameters, batch)
        except (RuntimeError, TaskError) as error:
            if "vmap" not in str(error):
                raise
            raise DataError(
                f"the model or loss of task {self.task.name} cannot be computed for all peers as one batch; dropout, "
                f".item() and branches on values prevent that ({str(error.__cause__ or error).splitlines()[0]})"
            ) from error
        with errors_of(self.task):
            (gradient,) = torch.autograd.grad(losses.sum(), flat)
        return gradient, losses.detach()

    def _capture(self, flat: torch.Tensor, batch: Batch) -> _Graph | None:
        """Return the recorded computation, or None where it cannot be recorded or does not repeat its result."""
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        try:
            graph = _Graph(partial(self._compute, buffers=self.buffers), flat, batch)
            expected = self._compute(flat, batch, self.buffers)[0]
            same = torch.allclose(graph.replay(flat, batch)[0], expected, rtol=1e-3, atol=1e-5)
        except (RuntimeError, TaskError):
            torch.cuda.synchronize(self._device)
            return None
        finally:
            # Recording ran the step several times; norm layers must not have seen it.
            for name, buffer in self.buffers.items():
                buffer.copy_(before[name])
        return graph if same else None


class _Graph:
    """A CUDA graph of one local step: hundreds of small kernels started by one call."""

    def __init__(self, compute: Any, flat: torch.Tensor, batch: Batch) -> None:
        self._flat, self._batch = flat.clone(), tuple(part.clone() for part in batch)
        # Libraries choose their kernels and workspaces in the first runs, which must not be recorded.
        aside = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(aside):
            for _ in range(3):
                compute(self._flat, self._batch)
        torch.cuda.current_stream(flat.device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = compute(self._flat, self._batch)

    def replay(self, flat: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result for these inputs, good until the next replay."""
        self._flat.copy_(flat)
        for own, part in zip(self._batch, batch, strict=True):
            own.copy_(part)
        self._graph.replay()
        gradient, losses = self._result
        return gradient, losses


def _on_device(data: Data, device: torch.device) -> Data:
    """Return the data set on the device if it is one that can move; others are moved batch by batch."""
    if isinstance(data, (TensorData, ImageData)) and device.type != "cpu":
        return data.to(device)
    return data


def _has_convolutions(model: torch.nn.Module) -> bool:
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return any(isinstance(module, kinds) for module in model.modules())
