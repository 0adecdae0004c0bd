"""The local step: from a flat vector z and a round number to the gradient that the gossip algorithm takes.

One `Trainer` serves one peer; daemon and simulator use the same. It is a function of (seed, peer, round, z) beside the
momentum and the buffers of the model's norm layers, which `state` returns: no generator has a state, no loader has a
position. Two trainers of the same arguments give the same bits on one machine type and torch version, because every
tensor that an operator reads starts on 64 bytes in memory of its own; operators may give other bits for other
alignments.

It knows neither peers nor messages nor disk, except to read `warm_start` and to write a model when told to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from peer.compress.decompress import add_dense_
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.config.options import TrainingOptions
from peer.config.precision_choice import Precision
from peer.errors import ConfigError, DataError, LocalProtocolError
from peer.random import SHARED, Purpose, Stream, stream
from peer.records import Criterion, ModelParts
from peer.train.data import Classification
from peer.train.evaluation import Evaluation, class_labels, evaluate_model
from peer.train.label_adjustment import LabelAdjustment, deal_locally, training_loss
from peer.train.learning_rate import learning_rate
from peer.train.memory import aligned, open_device, own_memory_
from peer.train.model_file import InParts, load_model_, model_parts, not_in_files, save_model, start_model
from peer.train.momentum import Momentum
from peer.train.moving import FrozenParameters, buffers_kept, frozen_kept, matching, set_buffer_
from peer.train.next_token import NextToken
from peer.train.own_task import OwnTask, criteria_of, errors_of, inner_task
from peer.train.precision import make_model, precision_of
from peer.train.private_step import ClippedSum, GaussianMechanism, check_options, noised_mean, sampling_rate
from peer.train.sampling import BatchDraw, BatchSchedule, augmentation_uniforms
from peer.train.statistics import collect_statistics_, statistics_of_average
from peer.train.task import Data, Task
from peer.train.threads import GENERATOR
from peer.wire.data_meaning import Meaning, meanings_of
from peer.wire.start_model import StartModel

log = logging.getLogger("sotto")

Vector: TypeAlias = npt.NDArray[np.float32]
Split: TypeAlias = Literal["test", "holdout", "train"]

_ADJUSTED = "label_adjustment"
"""Name of the entry of a state."""
_LARGE = 1 << 20
"""Numbers from which a model has its gradient flattened part by part, which takes a little longer with many parts."""
_TRIED = 8
"""Samples of the evaluation that tries an own task."""


@dataclass(frozen=True)
class LocalStep:
    """The result of a round's local steps."""

    gradient: FloatArray
    """G: momentum and weight decay included, summed over the local steps; float32[n]. Read only, and good until the
    next local step: it may lie in the momentum's own memory."""
    loss: float | None
    """Mean over the local steps of the mean loss of the batch, logit adjustment included, before each step. None of
    private steps: it tells of the samples."""
    samples: int = 0
    """Samples in the local steps, where they are known; the expected number for private steps."""


class StartedTraining:
    """What training begins with, of one peer or of many: the task and its data, learning rates, and a model."""

    def __init__(
        self, task: Task, options: TrainingOptions, *, rounds: int, seed: int, device: str, base: Path | None
    ) -> None:
        self.task, self.options, self.seed = task, options, seed
        self.device, self._base = open_device(device), base or Path()
        self.train_data, self._test = task.train_data(), task.test_data()
        """The whole training set, of which this peer has a share, and the common test set."""
        for name, data in (("training", self.train_data), ("test", self._test)):
            check_data(task, data, name)
        self.rate = partial(learning_rate, options, rounds)
        """Returns γ of a round."""
        self._augments = augments(task)

    def _start(self) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
        """Return the model on the device, in memory of its own, and the parameters that are trained; note their
        layout."""
        model = make_start_model(self.task, self.options, self.seed, self._base)
        model.train()
        trained = trained_parameters(model, self.options.only)
        own_memory_(model, self.device)
        layout = Layout.of_shapes([tuple(p.shape) for p in trained.values()], tuple(trained))
        self.layout = replace(layout, hidden=hidden_matrices(model, trained, self.task.num_classes))
        return model, trained

    def initial_vector(self) -> Vector:
        """Return the vector that every peer of the run starts from, float32[n]."""
        model = make_start_model(self.task, self.options, self.seed, self._base)
        trained = trained_parameters(model, self.options.only)
        return np.concatenate([p.detach().reshape(-1).numpy() for p in trained.values()])


class Trainer(StartedTraining):
    """The local step of one peer."""

    def __init__(
        self,
        task: Task,
        options: TrainingOptions,
        *,
        rounds: int,
        seed: int,
        peer: int,
        train_indices: npt.NDArray[np.int64],
        holdout_indices: npt.NDArray[np.int64] | None = None,
        class_shares: npt.NDArray[np.float64] | None = None,
        step_weight: float = 1.0,
        privacy: GaussianMechanism | None = None,
        alike_in_all_precisions: bool = False,
        device: str = "cpu",
        base: Path | None = None,
    ) -> None:
        """Set up training of `task` on the samples at `train_indices` of its training set; a relative
        `options.warm_start` starts at `base`.

        `class_shares`: the shares of the classes in all peers' data, where the training set is not that of all and they
        are known (`know_class_shares`).
        `step_weight`: how many times as long each step is. `privacy`: the noise of private steps; label adjustment that
        is "auto" is then off. `alike_in_all_precisions`: whether `start_model` is to be that of peers which compute in
        another precision. Raises ConfigError (`training.only`, `training.warm_start`, `peer.device`,
        `data.class_shares`, and what private steps cannot be combined with) and DataError (a model file, or a task that
        does not hold what it should).
        """
        if privacy is not None:
            check_options(task, options, len(train_indices))
            options = options.model_copy(update={"label_adjustment": False})
        super().__init__(task, options, rounds=rounds, seed=seed, device=device, base=base)
        self.peer = peer
        holdout = np.empty(0, np.int64) if holdout_indices is None else holdout_indices
        self._indices: Mapping[Split, npt.NDArray[np.int64]] = {
            "train": checked_indices(train_indices, len(self.train_data)),
            "holdout": checked_indices(holdout, len(self.train_data)),
            "test": np.arange(len(self._test), dtype=np.int64),
        }
        self._shares = class_shares
        self._schedule, self._adjustment = self._deal(options)
        self._step_weight, self._alike_in_all_precisions = step_weight, alike_in_all_precisions
        self._loss = training_loss(task, adjusted=self._adjustment is not None)
        self.model, self._trained = self._start()
        """The model that the local step runs; its trained parameters hold the z that it was last given."""
        self._frozen = FrozenParameters(self.model)
        self._parameters = list(self._trained.values())
        self._sizes = list(self.layout.sizes)
        self._flat_gradient = torch.empty(self.layout.size, device=self.device)
        self._momentum = make_momentum(options, self.layout)
        self._privacy = privacy
        if privacy is not None:
            self._clipped = ClippedSum(self._loss, self.model, tuple(self._trained), privacy.clip_norm)
            with GENERATOR:
                seed_operators(seed, peer, 0, 0, self.device)
                self._clipped.try_on(self._batch_of(self._private_draw(np.arange(min(2, len(train_indices))), 0)), task)

    @property
    def repeatable(self) -> bool:
        """Whether a local step that is computed again gives the same bits; nothing but the CPU promises that."""
        return self.device.type == "cpu"

    @property
    def meanings(self) -> tuple[Meaning, ...]:
        """Meaning of the numbers in this device's data, as far as the task knows."""
        return meanings_of(getattr(self.task, "meaning", {}))

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The figures of the task's evaluations, the one that it is judged by first."""
        return criteria_of(self.task)

    def vector(self) -> Vector:
        """Return the vector that the model holds now, float32[n]."""
        return np.concatenate([p.detach().cpu().reshape(-1).numpy() for p in self._parameters])

    def start_model(self) -> StartModel:
        """Return digests of all parameters and buffers that training starts from, frozen ones included: equal on two
        peers exactly when they train the same model from the same point. Ranges of 8-bit layers are among the buffers;
        where they must make no difference, these are the digests of the model in float32."""
        options = self.options
        if self._alike_in_all_precisions:
            options = options.model_copy(update={"precision": "float32"})
        return start_model(make_start_model(self.task, options, self.seed, self._base))

    def gradient(self, z: Vector, t: int, rate: float, z_step: float) -> LocalStep:
        """Return the local steps of round t from `z: float32[n]`, which is not changed.

        `rate` is γ; `z_step` is how far z really moves for each unit of gradient (γ · guard / u with push-sum): local
        step s + 1 starts at z − z_step · (G₁ + … + G_s), and the sum of all G is returned. The momentum moves on.
        If a loss is not finite, all zeros are returned.
        """
        steps = self.options.local_steps
        gradient, loss = self._step_gradient(z, t, 0)
        # A private loss is not told.
        is_finite = self._privacy or math.isfinite(loss)
        total = self._direction(gradient, z) if is_finite else np.zeros_like(z)
        if steps > 1:
            total, moved = total.copy(), z.copy()
            direction = total
            for local in range(1, steps):
                add_dense_(moved, direction, -z_step)
                gradient, local_loss = self._step_gradient(moved, t, local)
                loss += local_loss
                if not (self._privacy or math.isfinite(loss)):
                    total[:] = 0.0
                    break
                direction = self._direction(gradient, moved)
                total += direction
        return LocalStep(total, None if self._privacy else loss / steps, steps * self.options.batch_size)

    @property
    def needs_displacement(self) -> bool:
        """Whether `after_round` has anything to do."""
        return self._momentum.needs_round

    def after_round(self, z_before: Vector, z_after: Vector, rate: float) -> None:
        """Let quasi-global momentum see how z moved in a round of learning rate `rate`.

        With τ local steps the displacement is that of τ steps, so it is divided by τ γ, as the published code of
        quasi-global momentum does.
        """
        self._momentum.after_round(z_before, z_after, rate * self.options.local_steps)

    def try_own_task(self) -> None:
        """Compute one gradient and evaluate a few samples if the task is the user's own; nothing of it stays. To be
        called before training.

        Raises TaskError where that fails, or the loss is not finite or depends on no parameter, and DataError for a
        model that no file can hold.
        """
        if not isinstance(self.task, OwnTask):
            return
        with errors_of(self.task):
            without = not_in_files(self.model)
        if without:
            log.warning("%s of the model is no tensor, so saved models are without it", ", ".join(without))
        with frozen_kept(self.model), buffers_kept(self.model):
            loss = self.batch_loss(0)
            adjusted = self._adjustment is not None
            if not torch.isfinite(loss):
                raise self.task.loss_error(f"the loss of the first batch is {loss.item()}", adjusted=adjusted)
            depends = 0
            if loss.requires_grad:
                with errors_of(self.task):
                    depends = self._differentiate(loss, lambda part, gradient: None)
            if not depends:
                problem = "the loss depends on none of the parameters that are trained"
                raise self.task.loss_error(problem, adjusted=adjusted)
        evaluate_model(self.task, self.model, self._test, self._indices["test"][:_TRIED], self.device)

    def evaluate(self, z: InParts, split: Split = "test", *, averaged: bool = False) -> Evaluation:
        """Return how the model at z does on a split; nothing that training reads is changed.

        Norms take the statistics of this peer, or, where z is the average of all peers, those of `statistics`.
        """
        data = self._test if split == "test" else self.train_data
        self._load(z)
        with self._statistics(averaged):
            return evaluate_model(self.task, self.model, data, self._indices[split], self.device)

    def know_class_shares(self, shares: npt.NDArray[np.float64]) -> None:
        """Adjust logits by these shares of the classes in all peers' data, float64[classes], from the first step on."""
        self._shares = shares
        self._schedule, self._adjustment = self._deal(self.options)
        self._loss = training_loss(self.task, adjusted=self._adjustment is not None)

    def train_class_counts(self) -> tuple[int, ...]:
        """Return how many samples of each class this peer trains on; the task has classes."""
        labels = self.train_data.labels[torch.from_numpy(self._indices["train"])]
        return tuple(torch.bincount(labels, minlength=self.task.num_classes).tolist())

    def class_counts(self) -> tuple[int, ...]:
        """Return how many samples of each class the test set has; one number where the task has no classes."""
        labels = class_labels(self.task, self._test, torch.from_numpy(self._indices["test"]))
        return tuple(np.bincount(labels, minlength=max(1, self.task.num_classes)).tolist())

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state that the next round reads beside z: momentum, the buffers of the model, the frozen
        parameters that its code has moved, and an entry that says that labels are adjusted for, if they are.

        The vectors of the momentum are its own, not copies: write them out before the next local step.
        """
        state = {f"momentum.{name}": value for name, value in self._momentum.state().items()}
        for name, buffer in self.model.named_buffers():
            state[f"buffer.{name}"] = buffer.detach().cpu().numpy().copy()
        for name, parameter in self._frozen.moved().items():
            # NumPy lacks bfloat16, whose values float32 has.
            plain = parameter.float() if parameter.dtype == torch.bfloat16 else parameter
            state[f"frozen.{name}"] = plain.cpu().numpy().copy()
        if self._adjustment is not None:
            state[_ADJUSTED] = np.ones(1, np.uint8)
        return state

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`. Raises KeyError or ValueError if it does not fit.

        A run that began with logit adjustment goes on with it, and one that began without goes on without, unless the
        options ask for it by more than "auto".
        """
        prefix = "momentum."
        momentum = {k.removeprefix(prefix): state[k] for k in state if k.startswith(prefix)}
        for name in ("m", "v"):
            size = self._momentum.size_of(name)
            if name in momentum and momentum[name].shape != (size,):
                raise ValueError(f"momentum {name} has shape {momentum[name].shape}, expected ({size},)")
        self._momentum.restore(momentum)
        buffers, frozen = (
            {k.removeprefix(part): torch.from_numpy(np.array(state[k])) for k in state if k.startswith(part)}
            for part in ("buffer.", "frozen.")
        )
        for name, _ in self.model.named_buffers():
            if name not in buffers:
                raise KeyError(f"buffer.{name}")
        modules = dict(self.model.named_modules())
        for name, value in buffers.items():
            # Ranges of layers that compute in 8 bits are in no model of another precision.
            if name.rpartition(".")[0] in modules:
                set_buffer_(self.model, name, value)
        self._frozen.restore_(frozen)
        is_default = self.options.label_adjustment == "auto" and self.options.class_balance == 0
        if is_default and _ADJUSTED not in state:
            # States of earlier releases: their journals lead to the bits of the plain loss.
            self._adjustment = None
        elif _ADJUSTED in state and self._adjustment is None:
            # Earlier releases adjusted where all peers hold one model, too.
            _, self._adjustment = self._deal(self.options.model_copy(update={"label_adjustment": True}))
        self._loss = training_loss(self.task, adjusted=self._adjustment is not None)

    def save_model(self, z: InParts, path: Path, *, averaged: bool = False) -> None:
        """Write the whole model at z, frozen parameters and buffers included, as safetensors that the task's model in
        float32 can load; `averaged` as in `evaluate`."""
        self._load(z)
        with self._statistics(averaged):
            metadata = {"task": self.task.name, "layout": self.layout.digest}
            save_model(self.model, path, names=self._names_in_files(), metadata=metadata)

    def model_parts(self) -> ModelParts | None:
        """See `train.model_file.model_parts`. To be called before training."""
        return model_parts(self.model, self._trained, names=self._names_in_files())

    def _names_in_files(self) -> Collection[str] | None:
        """Return the entries of the task's model in float32: one that trains in 8 bits has ranges beside these. None
        for all."""
        if precision_of(self.task, self.options) != "int8":
            return None
        with GENERATOR, torch.random.fork_rng(devices=[]):
            return make_model(self.task, "float32").state_dict().keys()

    def portable_model(self, z: InParts, *, averaged: bool = False) -> torch.nn.Module:
        """Return a new model of the task at z, in float32 and in evaluation mode; `averaged` as in `evaluate`."""
        self._load(z)
        with GENERATOR, torch.random.fork_rng(devices=[]):
            model = make_model(self.task, "float32")
        with self._statistics(averaged):
            state = self.model.state_dict()
            for name, buffer in dict(model.named_buffers()).items():
                if name in state and state[name].shape != buffer.shape:
                    set_buffer_(model, name, state[name])
            model.load_state_dict({name: state[name] for name in model.state_dict()})
        return model.eval()

    def in_precision(self, z: InParts, precision: Precision) -> torch.nn.Module:
        """Return a new model at z that computes in that precision, with statistics and ranges from `statistics`."""
        self._load(z)
        model = make_model(self.task, precision).to(self.device)
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(own[name])
        collect_statistics_(model, self.task, self.train_data, seed=self.seed, device=self.device)
        return model

    def judge(self, model: torch.nn.Module) -> Evaluation:
        """Return how any model of the task does on the test set."""
        return evaluate_model(self.task, model, self._test, self._indices["test"], self.device)

    def _statistics(self, averaged: bool) -> AbstractContextManager[None]:
        if not averaged:
            return nullcontext()
        return statistics_of_average(self.model, self.task, self.train_data, seed=self.seed, device=self.device)

    def _step_gradient(self, z: Vector, t: int, local: int) -> tuple[Vector, float]:
        """Return the gradient of one local step and the loss before it; that of a private step is nan."""
        if self._privacy is None:
            return self._plain_gradient(z, t, local)
        self._load(z)
        draws = self._privacy.draws(z, t, local)
        shard = self._indices["train"]
        rate = sampling_rate(self.options, len(shard))
        draw = self._private_draw(draws.chosen(len(shard), rate), t * self.options.local_steps + local)
        total = np.zeros(self.layout.size)
        if len(draw.indices):
            with GENERATOR:
                seed_operators(self.seed, self.peer, t, local, self.device)
                total = self._clipped.of(self._batch_of(draw))
        return noised_mean(total, draws, self._privacy, self.options.batch_size), np.nan

    def _private_draw(self, positions: npt.NDArray[np.int64], step: int) -> BatchDraw:
        """Return the samples at some positions of the shard, augmented in another way in each step."""
        return BatchDraw(self._indices["train"][positions], np.full_like(positions, step))

    def _plain_gradient(self, z: Vector, t: int, local: int) -> tuple[Vector, float]:
        """Return the gradient of the mean loss of one batch at z, good until the next call, and that loss."""
        self._load(z)
        loss = self.batch_loss(t, local=local)
        with errors_of(self.task):
            if self.layout.size < _LARGE:
                parts = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
                torch.cat([part.reshape(-1) for part in parts], out=self._flat_gradient)
            else:
                self._flat_gradient.zero_()
                parts = torch.split(self._flat_gradient, self._sizes)
                self._differentiate(loss, lambda number, found: parts[number].view(found.shape).copy_(found))
        return self._flat_gradient.cpu().numpy(), float(loss.detach())

    def _differentiate(self, loss: torch.Tensor, take_part: Callable[[int, torch.Tensor], object]) -> int:
        """Call `take_part(number, gradient)` for each parameter as its gradient becomes known, so that no whole one
        exists; return the number of the parameters that the loss depends on."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}

        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            take_part(numbers.pop(id(parameter)), parameter.grad)
            parameter.grad = None

        parameters: list[Any] = self._parameters  # torch gives the method no type.
        for each in parameters:
            each.grad = None  # What the task's code left there would be added.
        hooks = [each.register_post_accumulate_grad_hook(take) for each in parameters]
        try:
            torch.autograd.backward(loss, inputs=self._parameters)
        finally:
            for hook in hooks:
                hook.remove()
        return len(self._parameters) - len(numbers)

    def batch_loss(self, t: int, module: torch.nn.Module | None = None, *, local: int = 0) -> torch.Tensor:
        """Return the mean loss of one batch of round t at the parameters that the model holds, to be differentiated.

        `module`: what is called in place of `model`, which it wraps.
        """
        batch = self._batch(t, local)
        with GENERATOR:
            seed_operators(self.seed, self.peer, t, local, self.device)
            loss = self._loss(self.model if module is None else module, batch)
        if loss.ndim:
            raise DataError(f"the loss of task {self.task.name} has shape {list(loss.shape)}; it must be a scalar")
        return loss

    def _direction(self, gradient: Vector, z: Vector) -> Vector:
        """Return G of one step, which may take the memory of the gradient. It is weighted behind the momentum: Adam's
        does not depend on the gradient's scale."""
        direction = self._momentum.direction_(gradient, z)
        if self._step_weight == 1.0:
            return direction
        return np.multiply(direction, np.float32(self._step_weight), out=gradient)

    def _load(self, z: InParts) -> None:
        """Copy z into the trained parameters, part by part."""
        if z.dtype != np.float32 or z.size != self.layout.size:
            raise LocalProtocolError(f"z is {z.dtype}[{z.size}], the model takes float32[{self.layout.size}]")
        with torch.no_grad():
            for parameter, part in zip(self._parameters, self.layout.slices, strict=True):
                parameter.copy_(torch.from_numpy(z[part]).view(parameter.shape))

    def _deal(self, options: TrainingOptions) -> tuple[BatchSchedule, LabelAdjustment | None]:
        return deal_locally(
            self.task,
            options,
            self._indices["train"],
            self.rate,
            seed=self.seed,
            peer=self.peer,
            shares=self._shares,
        )

    def _batch(self, t: int, local: int) -> tuple[torch.Tensor, ...]:
        step = t * self.options.local_steps + local
        batch = self._batch_of(self._schedule.batch(step))
        if self._adjustment is None:
            return batch
        return *batch, *aligned((torch.from_numpy(self._adjustment.rows(step)),), self.device)

    def _batch_of(self, draw: BatchDraw) -> tuple[torch.Tensor, ...]:
        """Return the samples of a draw, augmented."""
        batch = aligned(self.train_data.batch(torch.from_numpy(draw.indices)), self.device)
        if self._augments:
            uniforms = augmentation_uniforms(self.seed, draw, len(self.train_data))
            batch = aligned(self.task.augment(batch, torch.from_numpy(uniforms).to(self.device)), self.device)
        return batch


def kept_beside(state: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Return the buffers and the frozen parameters that have moved, by name, in a result of `Trainer.state`."""
    beside = [name for name in state if name.startswith(("buffer.", "frozen."))]
    return {name.partition(".")[2]: torch.from_numpy(np.array(state[name])) for name in beside}


def make_momentum(options: TrainingOptions, layout: Layout | None = None) -> Momentum:
    """Return the configured momentum of such vectors, at rest."""
    return Momentum(
        options.momentum,
        beta=options.beta,
        mu=options.mu,
        weight_decay=options.weight_decay,
        beta2=options.beta2,
        clip_norm=options.clip_norm,
        layout=layout,
    )


def make_start_model(task: Task, options: TrainingOptions, seed: int, base: Path) -> torch.nn.Module:
    """Return the model, on the CPU, that every peer of the run starts from: drawn under the run's seed, or read from
    `options.warm_start`. The state of torch's generator is left as it was."""
    with GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(start_seed(seed))
        model = make_model(task, precision_of(task, options))
    if not isinstance(model, torch.nn.Module):
        raise DataError(
            f"make_model() of task {task.name} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    if options.warm_start is not None:
        load_model_(model, base / options.warm_start)
    return model


def trained_parameters(model: torch.nn.Module, only: tuple[str, ...]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained and sent, by name, and freeze all others.

    Trained are those that require a gradient and match one of the patterns `only` (all of them if it is empty).
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.numel()]
    if not names:
        raise DataError("the model has no trainable parameters")
    chosen = set() if only else set(names)
    for pattern in only:
        if not (found := matching(names, pattern)):
            raise ConfigError("matches no parameter", key="training.only", value=pattern, valid=", ".join(names))
        chosen.update(found)
    trained = {}
    for name, parameter in model.named_parameters():
        if name in chosen:
            if parameter.dtype != torch.float32:
                raise DataError(f"parameter {name} has type {parameter.dtype}; trained parameters must be float32")
            trained[name] = parameter
        else:
            parameter.requires_grad_(False)
    return trained


def hidden_matrices(model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter], classes: int) -> tuple[int, ...]:
    """Return which of the trained parameters are weights of two dimensions or more between embeddings and last layer.
    Gains of norms are none.

    That of the last layer is the last one that is as wide as the classes, or shaped as an embedding; beside embeddings
    the only one of its shape, since a matrix of each block may be shaped as one.
    """
    embeddings, weights = list[torch.nn.Parameter](), dict[int, torch.nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and "Embedding" in type(module).__name__:
                embeddings.append(parameter)
            elif parameter.ndim > 1 and "weight" in name and "Norm" not in type(module).__name__:
                weights[id(parameter)] = parameter
    shapes = [each.shape for each in embeddings]
    last = [each for each in weights.values() if each.shape in shapes or classes in each.shape][-1:]
    if last and (not shapes or [each.shape for each in weights.values()].count(last[0].shape) == 1):
        embeddings += last
    hidden = weights.keys() - map(id, embeddings)
    return tuple(number for number, parameter in enumerate(trained.values()) if id(parameter) in hidden)


def check_data(task: Task, data: Data, name: str) -> None:
    """Raise DataError unless a data set has samples and labels that fit the task."""
    labels = data.labels
    if not isinstance(labels, torch.Tensor) or labels.device.type != "cpu":
        raise DataError(f"the labels of the {name} set of task {task.name} are no tensor on the CPU")
    if not len(data) or labels.shape != (len(data),) or labels.dtype != torch.int64:
        raise DataError(
            f"the {name} set of task {task.name} needs at least one sample and one int64 label per sample: it has "
            f"{len(data)} samples and labels {labels.dtype}{list(labels.shape)}"
        )
    low, high = int(labels.min()), int(labels.max())
    if task.num_classes and not 0 <= low <= high < task.num_classes:
        raise DataError(
            f"the {name} set of task {task.name} has labels from {low} to {high}, but num_classes is {task.num_classes}"
        )


def augments(task: Task) -> bool:
    """Return whether training batches are to be augmented, as far as one can tell."""
    kind = inner_task(task)
    if isinstance(kind, Classification):
        return not (kind.augmentation is None and kind.keeps("augment"))
    return not isinstance(kind, NextToken)


def seed_operators(seed: int, peer: int, t: int, local: int, device: torch.device) -> None:
    """Seed the global generator of torch that dropout and its like draw from, as a function of peer and local step."""
    value = operator_seed(seed, peer, t, local)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def start_seed(seed: int) -> int:
    """Return the seed of torch under which all peers of a run draw the model that they start from."""
    return _torch_seed(stream(seed, SHARED, Purpose.INIT))


def operator_seed(seed: int, peer: int, t: int, local: int) -> int:
    """Return the seed of torch for what one peer draws in a local step."""
    return _torch_seed(stream(seed, peer, Purpose.AUGMENT, t, local))


def checked_indices(indices: npt.NDArray[np.int64], num_samples: int) -> npt.NDArray[np.int64]:
    """Return indices of samples, int64[m]. Raises LocalProtocolError if one is out of range."""
    if indices.ndim != 1 or (indices.size and not 0 <= indices.min() <= indices.max() < num_samples):
        raise LocalProtocolError(f"indices of samples lie between 0 and {num_samples - 1}")
    return np.ascontiguousarray(indices, np.int64)


def _torch_seed(source: Stream) -> int:
    low, high = source.words(2)
    return int(high) << 32 | int(low)
