"""Data sets in memory, and the common kind of task: what most tasks, built in or your own, are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peer.config.precision_choice import Precision
from peer.errors import DataError
from peer.train.layers import FULL_PRECISION, Layers
from peer.train.metrics import Metric
from peer.train.precision import no_eight_bits, takes_layers
from peer.train.task import Data

Batch = tuple[torch.Tensor, ...]


class TensorData:
    """A data set of tensors that share their first dimension: inputs first, targets last."""

    def __init__(self, *tensors: torch.Tensor, labels: torch.Tensor | None = None) -> None:
        """Hold the tensors, not copies. `labels: int64[m]` are the targets unless given.

        Raises DataError if lengths differ, the set is empty, or there are no integer labels.
        """
        if not tensors or any(tensor.ndim == 0 for tensor in tensors):
            raise DataError("a data set needs at least one tensor with one sample in each row")
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise DataError(f"the tensors of a data set need the same number of samples, and at least one: {lengths}")
        chosen = tensors[-1] if labels is None else labels
        if chosen.shape != (lengths[0],) or chosen.is_floating_point() or chosen.is_complex():
            raise DataError(
                f"a data set needs one integer label per sample, by which it is split among the peers; these have "
                f"shape {list(chosen.shape)} and type {chosen.dtype}: pass labels= if the targets are not classes"
            )
        self._tensors = tensors
        self.labels = chosen.to("cpu", torch.int64)
        """int64[m], on the CPU."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Return new tensors with the rows at `indices: int64[b]`, on the device of the data set."""
        return tuple(tensor.index_select(0, indices.to(tensor.device)) for tensor in self._tensors)

    def to(self, device: torch.device) -> TensorData:
        """Return the data set with its tensors on `device`."""
        return TensorData(*(tensor.to(device) for tensor in self._tensors), labels=self.labels)


class ImageData:
    """Images kept as bytes and normalised batch by batch: a quarter of the memory of float32."""

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, *, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        """Hold `images: uint8[m, c, h, w]` and `labels: int64[m]`; `mean` and `std`, one a channel,
        are those of pixels in [0, 1]."""
        self._images, self.labels = images, labels.to("cpu", torch.int64)
        self._targets = self.labels.to(images.device)
        self._mean, self._std = mean, std
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=images.device).view(-1, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device).view(
            -1, 1, 1
        )

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Return normalised images float32[b, c, h, w] and labels int64[b]."""
        indices = indices.to(self._images.device)
        pixels = self._images.index_select(0, indices).to(torch.float32)
        return pixels.mul_(self._scale).add_(self._shift), self._targets.index_select(0, indices)

    def to(self, device: torch.device) -> ImageData:
        """Return the data set with its images on `device`."""
        return ImageData(self._images.to(device), self.labels, mean=self._mean, std=self._std)


def logits_of(model: torch.nn.Module, batch: Batch | dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's logits float32[b, classes] and the targets, which come last in a batch; the tensors before
    them are the model's arguments, keyword arguments for a dict."""
    if isinstance(batch, dict):
        *names, last = batch
        return model(**{name: batch[name] for name in names}), batch[last]
    *inputs, targets = batch
    return model(*inputs), targets


def cross_entropy(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the model's logits against the targets."""
    return torch.nn.functional.cross_entropy(*logits_of(model, batch))


@dataclass(kw_only=True)
class Classification:
    """A task that names one class for each sample: cross-entropy to train, the largest logit to judge."""

    name: str
    num_classes: int
    model: Callable[[], torch.nn.Module] | Callable[[Layers], torch.nn.Module]
    """Makes a new model that returns logits float32[b, num_classes]; where it has an argument `layers`, it builds the
    model of these layers, and can build it in 8 bits."""
    train: Data | Callable[[], Data]
    """The training set, or a function that reads it when it is first asked for."""
    test: Data | Callable[[], Data]
    """The test set, likewise."""
    augmentation: Callable[[Batch, torch.Tensor], Batch] | None = None
    """Changes a training batch, with `uniforms: float32[b, 4]` as its only randomness."""
    precision: Precision = "float32"
    """Precision in which the task is trained unless the configuration says otherwise."""
    metrics: Sequence[Metric] = ()
    """Figures of a test set beside accuracy; models are compared by the first."""
    measures: Callable[[torch.nn.Module, Batch], dict[str, torch.Tensor]] | None = None
    """Returns the values of a batch that `metrics` are computed from."""
    meaning: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Meaning of its numbers, by kind ("classes", "features", …): names in their order. Devices with other names of a
    kind refuse each other."""
    _read: dict[str, Data] = field(default_factory=dict, init=False, repr=False, compare=False)

    def make_model(self, layers: Layers = FULL_PRECISION) -> torch.nn.Module:
        make: Any = self.model
        if takes_layers(make):
            return make(layers=layers)  # type: ignore[no-any-return]
        if layers is not FULL_PRECISION:
            raise no_eight_bits(self.name)
        return make()  # type: ignore[no-any-return]

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model, batch)

    def adjusted_loss(self, model: torch.nn.Module, batch: Batch, adjustment: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the logits plus `adjustment: float32[b, num_classes]`; −∞ takes a class out
        of the sum."""
        logits, targets = logits_of(model, batch)
        if (outputs := logits.shape[-1]) != adjustment.shape[-1]:
            raise DataError(f"the model of task {self.name} has {outputs} outputs; num_classes is {self.num_classes}")
        return torch.nn.functional.cross_entropy(logits + adjustment, targets)

    def train_data(self) -> Data:
        return self._data("train", self.train)

    def test_data(self) -> Data:
        return self._data("test", self.test)

    def correct(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits, targets = logits_of(model, batch)
        return logits.argmax(dim=1) == targets

    def measure(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {} if self.measures is None else self.measures(model, batch)

    def keeps(self, *methods: str) -> bool:
        """Return whether methods are those of this class, in a subclass and in this object: what stands for them may
        only be used then."""
        return all(getattr(getattr(self, name), "__func__", None) is getattr(Classification, name) for name in methods)

    def judge(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of this class's `loss` and `correct` from one forward pass."""
        logits, targets = logits_of(model, batch)
        return torch.nn.functional.cross_entropy(logits, targets), logits.argmax(dim=1) == targets

    def augment(self, batch: Batch, uniforms: torch.Tensor) -> Batch:
        return batch if self.augmentation is None else self.augmentation(batch, uniforms)

    def _data(self, split: str, source: Data | Callable[[], Data]) -> Data:
        if split not in self._read:
            self._read[split] = source() if callable(source) else source
        return self._read[split]


def crop_and_flip(batch: Batch, uniforms: torch.Tensor, *, padding: int = 4) -> Batch:
    """Return square images shifted by up to `padding` pixels each way (zeros enter) and mirrored half of the time.

    `batch[0]: float32[b, c, s, s]`. Uniforms 0, 1 and 2 of a sample choose row, column and mirroring.
    """
    images, *rest = batch
    uniforms = uniforms.to(images.device)
    b, c, height, width = images.shape
    shifts = (uniforms[:, :2] * (2 * padding + 1)).to(torch.int64)
    rows = shifts[:, 0, None] + torch.arange(height, device=images.device)
    columns = shifts[:, 1, None] + torch.arange(width, device=images.device)
    columns = torch.where(uniforms[:, 2, None] < 0.5, columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    picked = rows[:, None, :, None] * (width + 2 * padding) + columns[:, None, None, :]
    picked = picked.expand(b, c, height, width).reshape(b, c, -1)
    return padded.flatten(2).gather(2, picked).view(b, c, height, width), *rest
