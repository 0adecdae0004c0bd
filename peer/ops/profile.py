"""The cost of training a model for one peer, in each precision: memory, operations, messages (the low-precision paper's
figure 3, measured).

Memory is that of a process of its own which does nothing but train: bytes kept for the backward pass are counted tensor
by tensor, the peak of a step comes from the kernel (Linux). Multiplications are counted from the shapes of linear
layers, convolutions and attention, which are nearly all; messages are encoded and measured.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from peer import compress
from peer.compress.base import compress_layers
from peer.compress.layout import Layout
from peer.config.precision_choice import PRECISIONS, Precision
from peer.errors import ConfigError, SottoError
from peer.random import PeerDraws
from peer.train import models
from peer.train.bfloat16 import compute_in_bfloat16_
from peer.train.full_precision.norms import NORMS, Norm
from peer.train.full_precision.text_layers import Attention
from peer.train.layers import EIGHT_BIT, FULL_PRECISION, Layers
from peer.train.threads import use_one_thread
from peer.wire import Message, MessageKind, encode

CLASSES = 10
STEPS = 9
"""Steps that are timed; the median counts."""
FRUGAL: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}
"""The environment in which a process gives freed memory back at once, so that its peak is its need."""


@dataclass(frozen=True)
class Workload:
    """The model and batch to measure."""

    model: str
    batch: int = 32
    norm: Norm = "range-evonorm"
    size: int = 32
    """Pixels of a side, or pieces of a sentence."""


@dataclass(frozen=True)
class StepCost:
    """Cost of a training step in one precision."""

    saved_bytes: int
    """Kept from the forward for the backward pass, without the parameters."""
    peak_bytes: int | None
    """Most bytes that a step adds to the memory of the process; None where the kernel does not tell."""
    step_s: float
    """CPU seconds of one thread, forward and backward pass, median."""


@dataclass(frozen=True)
class Products:
    """Multiply-and-add operations of a step, by purpose."""

    forward: int
    input_gradient: int
    weight_gradient: int


@dataclass(frozen=True)
class Profile:
    """The report on one model."""

    workload: Workload
    parameters: int
    products: Products
    costs: Mapping[Precision, StepCost]
    messages: Mapping[str, int]
    """Compressor in words → bytes of a frame to one neighbour."""

    def weight_bytes(self, precision: Precision) -> int:
        """Return the bytes of the weights and, in 8 bits, their codes; the float32 weights are those that gossip
        moves."""
        return 4 * self.parameters + (self.parameters if precision == "int8" else 0)

    def operations(self, precision: Precision) -> dict[str, int]:
        """Return type of the operands → multiplications of a step."""
        total = self.products.forward + self.products.input_gradient + self.products.weight_gradient
        if precision == "float32":
            return {"float32": total, "bfloat16": 0, "int8": 0}
        if precision == "bfloat16":
            return {"float32": 0, "bfloat16": total, "int8": 0}
        eight = self.products.forward + self.products.input_gradient
        return {"float32": 0, "bfloat16": self.products.weight_gradient, "int8": eight}


WHOLE, EIGHT_BITS = "whole, float32", "8 bits a number (modulo)"
COMPRESSORS: Mapping[str, tuple[Literal["weights", "step"], Mapping[str, object]]] = {
    WHOLE: ("weights", {"kind": "none"}),
    EIGHT_BITS: ("weights", {"kind": "modulo", "bits": 8, "theta": 1e-3}),
    "top 1 %": ("step", {"kind": "top_k", "fraction": 0.01}),
    "top 2 % in 4 bits": ("step", {"kind": "top_k", "fraction": 0.02, "value_bits": 4}),
}
"""Data sent, and their compressor. The paper's fourfold saving in communication is that of the 8-bit codes."""

_SIZED = ("resnet18", "mobilenetv2", "vgg11", "vgg16")
_NORMED = ("resnet20", "resnet54", "resnet110", "resnet18", "mobilenetv2")
_IMAGE_MODELS = (*_NORMED, "vgg11", "vgg16")
MODELS = ("logistic", "mlp", *_IMAGE_MODELS, "distilbert")


def profile(workload: Workload) -> Profile:
    """Measure a model, each precision in processes of its own. Raises ConfigError for a model or size that is none."""
    check(workload)
    model = make_model(workload, FULL_PRECISION)
    return Profile(
        workload,
        sum(parameter.numel() for parameter in model.parameters()),
        count_products(model, workload),
        {precision: _measure_apart(workload, precision) for precision in PRECISIONS},
        count_messages(model, workload),
    )


def check(workload: Workload) -> None:
    """Raise ConfigError unless the workload can be run."""
    if workload.model not in MODELS:
        raise ConfigError("unknown model", key="MODEL", value=workload.model, valid=", ".join(MODELS))
    if workload.model in _IMAGE_MODELS and workload.model not in _SIZED and workload.size != 32:
        raise ConfigError("needs images of 32 × 32 pixels", key=workload.model, value=workload.size)
    if workload.norm not in NORMS:
        raise ConfigError("unknown norm", key="--norm", value=workload.norm, valid=", ".join(NORMS))
    if workload.batch < 1 or not 8 <= workload.size <= 512:
        raise ConfigError("is out of range", key="--batch, --size", value=(workload.batch, workload.size))


def make_model(workload: Workload, layers: Layers) -> nn.Module:
    """Return a new model in training mode."""
    if workload.model == "logistic":
        return models.MODELS["logistic"](784, CLASSES, layers)
    if workload.model == "mlp":
        return models.MODELS["mlp"]((784, 512, 512, CLASSES), layers)
    if workload.model == "distilbert":
        return models.MODELS["distilbert"](CLASSES, layers=layers)
    options: dict[str, object] = {"layers": layers}
    if workload.model in _NORMED:
        options["norm"] = workload.norm
    if workload.model in _SIZED:
        options["image_size"] = workload.size
    return models.MODELS[workload.model](CLASSES, **options)


def make_inputs(workload: Workload) -> torch.Tensor:
    """Return a batch of noise."""
    if workload.model == "distilbert":
        return torch.randint(1, 30_000, (workload.batch, workload.size))
    if workload.model in _IMAGE_MODELS:
        return torch.randn(workload.batch, 3, workload.size, workload.size)
    return torch.randn(workload.batch, 784)


def measure(workload: Workload, precision: Precision) -> StepCost:
    """Measure the steps of a model in this process."""
    use_one_thread()
    torch.manual_seed(0)
    model = make_model(workload, EIGHT_BIT if precision == "int8" else FULL_PRECISION)
    if precision == "bfloat16":
        compute_in_bfloat16_(model)
    inputs = make_inputs(workload)
    labels = torch.arange(workload.batch) % CLASSES
    parameters = list(model.parameters())

    def step() -> None:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        torch.autograd.grad(loss, parameters)

    gc.collect()
    peak = _peak_of(step)
    saved = kept_bytes(model, lambda: model(inputs))
    times = []
    for _ in range(STEPS + 1):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return StepCost(saved, peak, sorted(times[1:])[STEPS // 2])


def kept_bytes(model: nn.Module, forward: Callable[[], torch.Tensor], *others: torch.Tensor) -> int:
    """Return the bytes of all tensors that a forward pass keeps for its backward pass, each storage once, without the
    model's parameters and `others`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *others)}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    # An int8 network keeps its tensors on its own tape.
    inside = int(getattr(model, "last_saved_bytes", 0))
    del output
    return sum(kept.values()) + inside


def count_products(model: nn.Module, workload: Workload) -> Products:
    """Return the multiplications of a step of a model in full precision. The first layer's input needs no gradient."""
    forward: list[int] = []
    attention: list[int] = []

    def on_product(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        forward.append(output.numel() * module.get_parameter("weight")[0].numel())

    def on_attention(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        # Queries by keys, and their product by values.
        attention.append(2 * output.numel() * output.shape[1])

    hooks = {nn.Linear: on_product, nn.Conv2d: on_product, Attention: on_attention}
    handles = [
        module.register_forward_hook(hook)
        for module in model.modules()
        for kind, hook in hooks.items()
        if isinstance(module, kind)
    ]
    with torch.no_grad():
        model(make_inputs(Workload(workload.model, 1, workload.norm, workload.size)))
    for handle in handles:
        handle.remove()
    weighted, mixed, batch = sum(forward), sum(attention), workload.batch
    reaches_input = workload.model != "distilbert"
    inner = weighted - (forward[0] if reaches_input else 0)
    return Products(batch * (weighted + mixed), batch * (inner + 2 * mixed), batch * weighted)


def count_messages(model: nn.Module, workload: Workload) -> dict[str, int]:
    """Return the bytes of a frame for each of COMPRESSORS: of the weights after one step, or of that step."""
    named = dict(model.named_parameters())
    batch = min(workload.batch, 8)
    inputs = make_inputs(Workload(workload.model, batch, workload.norm, workload.size))
    loss = nn.functional.cross_entropy(model(inputs), torch.arange(batch) % CLASSES)
    parts = torch.autograd.grad(loss, list(named.values()))
    step = np.concatenate([part.reshape(-1).numpy() for part in parts])
    weights = np.concatenate([parameter.detach().reshape(-1).numpy() for parameter in named.values()])
    layout = Layout(tuple(named), tuple(parameter.numel() for parameter in named.values()))
    sizes = {}
    for words, (vector, settings) in COMPRESSORS.items():
        chosen = weights - np.float32(0.1) * step if vector == "weights" else step
        layers = compress_layers(compress.build(**settings), chosen, layout, PeerDraws(0, 0, 0))  # type: ignore[arg-type]
        sizes[words] = len(encode(Message(MessageKind.GOSSIP, 0, 0, mixing_weight=0.5, layers=layers), layout))
    return sizes


def _measure_apart(workload: Workload, precision: Precision) -> StepCost:
    """Measure in new processes: one that gives freed memory back at once and tells the peak, and one that is timed."""
    fast = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
    memory, timed = (_child(workload, precision, environment) for environment in (FRUGAL, fast))
    return StepCost(memory.saved_bytes, memory.peak_bytes, timed.step_s)


def _child(workload: Workload, precision: Precision, environment: Mapping[str, str]) -> StepCost:
    ran = subprocess.run(
        [sys.executable, "-m", "peer.ops.profile", json.dumps({**asdict(workload), "precision": precision})],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SottoError(f"{workload.model} in {precision} cannot be measured: {reason}")
    return StepCost(**json.loads(ran.stdout))


def _peak_of(step: Callable[[], None]) -> int | None:
    """Return by how much the resident memory rose at most during the second of two steps: the first one loads libraries
    and sets ranges."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    before = _status(status, "VmRSS")
    if before is None:
        return None
    step()
    gc.collect()
    try:
        reset.write_text("5", encoding="utf-8")
    except OSError:
        return None
    kept = _status(status, "VmRSS")
    step()
    peak = _status(status, "VmHWM")
    return None if peak is None or kept is None else peak - kept


def _status(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found[0]) if found else None


def main() -> None:
    """Measure the workload that the command line gives as JSON, and print the result as JSON."""
    chosen = json.loads(sys.argv[1])
    precision = chosen.pop("precision")
    print(json.dumps(asdict(measure(Workload(**chosen), precision))))


if __name__ == "__main__":
    main()
