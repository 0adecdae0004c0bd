"""Trained models that run without this package: programs of `torch.export`, and ONNX in float32 or with int8 weights.

They compute the task's model on all tensors of a batch but the last, which are the targets. The number of samples is
free, and so is every other size in which batches differ, such as the length of texts. ONNX needs the packages of the
extra "onnx".
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from peer.errors import ConfigError, DataError
from peer.files import replacing
from peer.random import SHARED, Purpose, stream
from peer.train.own_task import OwnTask
from peer.train.startup import load_postponed
from peer.train.statistics import BATCH, SAMPLES
from peer.train.task import Data, Task

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_LOOKED_AT = 8
"""Batches whose sizes are compared."""
_EXAMPLE = 4
"""Samples of the batch that the model is traced with."""
_QUANTIZED = ["Conv", "Gemm", "MatMul"]
"""Operators of ONNX whose operands become int8."""
_TOLERANCE = 1e-3
"""Allowed difference between an output in ONNX and in PyTorch, relative to the largest: both add up float32 in orders
of their own."""


@dataclass(frozen=True)
class Example:
    """A batch to trace a model with."""

    inputs: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    """Names of keyword arguments, where batches are dicts; otherwise empty."""
    free: tuple[frozenset[int], ...]
    """Dimensions of each input whose size is not fixed."""

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return () if self.names else self.inputs

    @property
    def keywords(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.inputs, strict=True)) if self.names else {}

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, object]] | tuple[dict[int, object], ...]:
        """The free dimensions as `torch.export` takes them."""
        shapes: list[dict[int, object]] = [dict.fromkeys(free, torch.export.Dim.DYNAMIC) for free in self.free]
        return dict(zip(self.names, shapes, strict=True)) if self.names else tuple(shapes)


def example_of(task: Task, data: Data) -> Example:
    """Return a batch of a task's data, with the dimensions in which its batches differ."""
    parts = np.array_split(np.arange(len(data), dtype=np.int64), min(_LOOKED_AT, len(data)))
    batches = [_inputs(data, part[:_EXAMPLE]) for part in parts]
    free = tuple(
        frozenset({0, *(d for d in range(first.ndim) if len({batch[i].shape[d] for batch in batches}) > 1)})
        for i, first in enumerate(batches[0])
    )
    # A size of 1 would be traced as fixed.
    inputs = tuple(torch.cat([tensor] * 2)[: max(2, len(tensor))] for tensor in batches[0])
    names = task.form.names[: len(inputs)] if isinstance(task, OwnTask) else ()
    return Example(inputs, names, free)


def trace(model: torch.nn.Module, example: Example, name: str) -> torch.export.ExportedProgram:
    """Return the program that a model in evaluation mode computes. Raises DataError where it cannot be traced."""
    shapes = example.dynamic_shapes
    # What `quick_imports` has postponed cannot be loaded from within an export.
    load_postponed()
    with _refusal(name, "torch.export"):
        program = torch.export.export(model, example.arguments, example.keywords, dynamic_shapes=shapes)
    # It would name folders of this machine, and quote the task's code.
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program for `torch.export.load`."""
    # PyTorch warns of a path that does not end in .pt2.
    with replacing(path) as beside, beside.open("wb") as file:
        torch.export.save(program, file)


def save_onnx(program: torch.export.ExportedProgram, path: Path, name: str) -> None:
    """Write a program as ONNX. Raises ConfigError where the packages are missing, DataError where ONNX lacks an
    operator."""
    require_onnx()
    with _refusal(name, "ONNX"), replacing(path) as beside:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None
        for node in converted.model.graph:
            # The record of each node's origin is as large as small models, and of no use elsewhere.
            node.metadata_props.clear()
        converted.save(str(beside), external_data=False)


def save_onnx_int8(full: Path, path: Path, data: Data, *, seed: int) -> None:
    """Write the ONNX model in the file `full` with int8 weights and activations, whose ranges are those of training
    samples drawn as for the statistics of norms.

    Weights have the codes of `peer.train.int8_file`. Raises ConfigError where the packages are missing.
    """
    require_onnx()
    from onnxruntime import quantization

    order = stream(seed, SHARED, Purpose.STATISTICS).permutation(len(data))[:SAMPLES]
    names = [each.name for each in _session(full).get_inputs()]
    batches = (_inputs(data, order[start : start + BATCH]) for start in range(0, len(order), BATCH))
    with _quiet(), replacing(path) as beside:
        quantization.quantize_static(
            str(full),
            str(beside),
            _Calibration(names, batches),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=_QUANTIZED,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )


class OnnxModel(torch.nn.Module):
    """An ONNX file as a module, to be judged like any other model."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        require_onnx()
        self._session = _session(path)
        self.names = [each.name for each in self._session.get_inputs()]

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        given = named or dict(zip(self.names, inputs, strict=True))
        outputs = self._session.run(None, {name: tensor.cpu().numpy() for name, tensor in given.items()})
        return torch.from_numpy(outputs[0])


def check_onnx(model: torch.nn.Module, path: Path, example: Example, name: str) -> list[str]:
    """Return the names of the inputs of an ONNX file. Raises DataError unless it computes the same as the model."""
    with torch.no_grad():
        expected = model(*example.arguments, **example.keywords)
    onnx_model = OnnxModel(path)
    found = onnx_model(*example.arguments, **example.keywords)
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        raise DataError(f"the model of task {name} returns more than one tensor; only one can be exported to ONNX")
    distance, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not distance <= _TOLERANCE * max(1.0, largest):
        raise DataError(f"{path}: ONNX Runtime computes other values than PyTorch: they differ by {distance:.2g}")
    return onnx_model.names


def require_onnx() -> None:
    """Raise ConfigError unless the packages are there."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"needs the package {error.name}: pip install 'sottovoce[onnx]'", key="--onnx") from None


class _Calibration:
    """Hands samples to the quantizer, as its `CalibrationDataReader` does."""

    def __init__(self, names: Sequence[str], batches: Iterator[tuple[torch.Tensor, ...]]) -> None:
        self._names, self._batches = names, batches

    def get_next(self) -> dict[str, npt.NDArray[np.generic]] | None:
        """Return the next batch; None after the last."""
        batch = next(self._batches, None)
        return None if batch is None else {name: part.numpy() for name, part in zip(self._names, batch, strict=True)}


def _inputs(data: Data, indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of some samples: all tensors but the last, unless it is the only one."""
    batch = data.batch(torch.from_numpy(np.ascontiguousarray(indices)))
    return batch[:-1] or batch


def _session(path: Path) -> InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _refusal(name: str, form: str) -> Iterator[None]:
    """Turn any error of the exporter into a DataError: the model is its cause."""
    try:
        with _quiet():
            yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
        raise DataError(f"the model of task {name} cannot be exported by {form}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings: their own deprecations, and advice on speed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
