"""Measures a training step in 8 bits beside float32 and bfloat16: time, memory kept for the backward pass, peak memory.

    python tools/bench_eight_bit.py [NETWORK ...] [--runs 9] [--seconds 25] [--quick] [--without WAY] [--json FILE]
    python tools/bench_eight_bit.py --device cuda

On one core, or on a GPU. Four ways to compute the same step (forward pass, loss, backward pass) of the same network:

    float32     stock PyTorch
    fast        the fastest float32 that PyTorch can be made to do: channels-last images, oneDNN for linear layers
    bfloat16    autocast, channels-last
    int8        `training.precision = "int8"`

They take turns, `--runs` times, or until a network has taken `--seconds` (three times at least), so that a busy machine
disturbs all alike; a time is the median CPU time of the thread, and by how much int8 is faster is the median of the
turns' ratios. On a GPU a time is that of the clock until the step is done, "fast" is channels-last TF32, and the peak
is what PyTorch allocates there.

The papers' published code, whose 8 bits are simulated, is no dependency: of ResNet-20 with BatchNorm at batch 32 one of
its steps was measured to take 1 / 0.16 of one in channels-last float32 on the same processor, and the table multiplies
by that.

A second table has one of the products alone that the network takes its time for, in 10⁹ multiplications and additions
per second: forwards with all that the kernels do in the same pass, and the gradient of its weights.

Kept for the backward pass is what autograd saves beside parameters (float), or what lies on the tape (int8). Peak
memory is that of a process of its own beyond what it held before its first step. That process gives freed memory back
at once: what others keep depends on where their memory happens to lie. `--quick` takes a quarter of the batch, three
runs, and leaves the peak out. `--without bfloat16` saves time where a processor has no instructions for it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.grad import conv2d_weight

from peer.native import available, tier
from peer.ops.profile import FRUGAL, kept_bytes
from peer.train.eight_bit import conv_kernels, linear_kernels
from peer.train.eight_bit.conv_kernels import Window
from peer.train.layers import EIGHT_BIT, FULL_PRECISION, Layers
from peer.train.memory import open_device
from peer.train.models.mlp import mlp
from peer.train.models.mobilenet import mobilenetv2
from peer.train.models.resnet import resnet18, resnet20
from peer.train.models.vgg import vgg11
from peer.train.threads import use_one_thread

WAYS = ("float32", "fast", "bfloat16", "int8")
PUBLISHED_CODE = 0.16
"""Speed of the published code's 8-bit step of ResNet-20, relative to channels-last float32: 65 ms against 403 ms."""
FEWEST_RUNS = 3
_CPU = torch.device("cpu")
_conv2d_weight: Callable[..., torch.Tensor] = conv2d_weight
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Product:
    """The product of a linear layer, or with `side` of a convolution of 3 × 3 on images of this side."""

    inputs: int
    outputs: int
    rows: int = 1
    """Rows of a sample, in a linear layer."""
    side: int = 0

    def count(self, batch: int) -> int:
        """Return its number of multiplications."""
        results = 9 * self.side**2 if self.side else self.rows
        return batch * results * self.inputs * self.outputs

    def __str__(self) -> str:
        channels = f"{self.inputs} → {self.outputs}"
        return f"3×3, {channels}, {self.side}×{self.side}" if self.side else channels

    def ways(self, batch: int) -> dict[str, Callable[[], object]]:
        """Return the calls that compute it, and the gradient of its weights, in float32 and in 8 bits."""
        return self._convolution(batch) if self.side else self._linear(batch * self.rows)

    def _linear(self, rows: int) -> dict[str, Callable[[], object]]:
        x, weight = torch.randn(rows, self.inputs), torch.randn(self.outputs, self.inputs)
        gradient, codes = torch.randn(rows, self.outputs), torch.randint(-128, 128, x.shape, dtype=torch.int8)
        narrow, operands = gradient.to(torch.bfloat16), linear_kernels.Operands(codes, 0, 0.1, weight, 5.0)
        return {
            "float32": lambda: nn.functional.linear(x, weight),
            "int8": lambda: linear_kernels.forward_floats(operands),
            "float32, weights": lambda: gradient.t() @ x,
            "int8, weights": lambda: linear_kernels.weight_gradient(narrow, codes, 0, 0.1),
        }

    def _convolution(self, batch: int) -> dict[str, Callable[[], object]]:
        window, image = Window(3, 1), (batch, self.inputs, self.side, self.side)
        x = torch.randn(image).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(self.outputs, self.inputs, 3, 3).contiguous(memory_format=torch.channels_last)
        gradient = torch.randn(batch, self.outputs, self.side, self.side).contiguous(memory_format=torch.channels_last)
        codes = torch.randint(0, 256, (batch, self.side, self.side, self.inputs), dtype=torch.uint8)
        narrow, plain = gradient.permute(0, 2, 3, 1).to(torch.bfloat16).contiguous(), weight.contiguous()
        scale, shift = torch.rand(self.outputs) * 1e-4, torch.full((self.outputs,), 128.0)

        def forward() -> object:
            weights = conv_kernels.quantize_weights(plain)
            return conv_kernels.forward(codes, 128, weights, window, (scale, shift, (1.0, 255.0)))

        return {
            "float32": lambda: nn.functional.conv2d(x, weight, padding=1),
            "int8": forward,
            "float32, weights": lambda: _conv2d_weight(x, list(weight.shape), gradient, padding=1),
            "int8, weights": lambda: conv_kernels.weight_gradient(codes, 128, narrow, self.inputs, window, 0.1),
        }


@dataclass(frozen=True)
class NetworkCase:
    """A network, its input and the loss of its output."""

    make: Callable[[Layers], nn.Module]
    shape: tuple[int, ...]
    """Shape of one sample."""
    batch: int = 32
    classes: int = 10
    """0: the loss is a random linear function of the output, and the input wants a gradient as well, as that of a layer
    in the middle of a network does."""
    note: str = ""
    product: Product | None = None
    published: bool = False
    """Whether the published code was measured on this network."""


def _block(layers: Layers) -> nn.Module:
    block = layers.transformer_block(768, 12, 3072)
    return layers.network({"block": block}) if layers is EIGHT_BIT else _WithoutPadding(block)


class _WithoutPadding(nn.Module):
    """A float block as a function of activations alone."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block((x, torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)))[0]
        return result


NETWORKS: dict[str, NetworkCase] = {
    "mlp-512": NetworkCase(
        lambda layers: mlp((784, 512, 512, 10), layers), (784,), 256, note="784-512-512-10", product=Product(784, 512)
    ),
    "linear-1024": NetworkCase(
        lambda layers: layers.network({"linear": layers.linear(1024, 1024)}),
        (1024,),
        1024,
        0,
        note="one layer",
        product=Product(1024, 1024),
    ),
    "transformer": NetworkCase(
        _block, (128, 768), 32, 0, note="a block of DistilBERT, 128 positions", product=Product(768, 3072, rows=128)
    ),
    "vgg-11": NetworkCase(lambda layers: vgg11(layers=layers), (3, 32, 32), product=Product(256, 256, side=8)),
    "resnet-18": NetworkCase(
        lambda layers: resnet18(layers=layers), (3, 64, 64), note="64×64 images", product=Product(64, 64, side=64)
    ),
    "mobilenet-v2": NetworkCase(lambda layers: mobilenetv2(norm="batch", layers=layers), (3, 32, 32), note="BatchNorm"),
    "resnet-20": NetworkCase(
        lambda layers: resnet20(norm="range-evonorm", layers=layers),
        (3, 32, 32),
        note="Range EvoNorm",
        product=Product(16, 16, side=32),
    ),
    "resnet-20-batchnorm": NetworkCase(
        lambda layers: resnet20(norm="batch", layers=layers), (3, 32, 32), note="BatchNorm", published=True
    ),
}


class Step:
    """One training step of a network, computed in one way."""

    def __init__(self, case: NetworkCase, way: str, batch: int, device: torch.device = _CPU) -> None:
        torch.manual_seed(0)
        self.model = case.make(EIGHT_BIT if way == "int8" else FULL_PRECISION).to(device)
        self.way, self.case, self.device = way, case, device
        self.inputs = torch.randn(batch, *case.shape).to(device)
        if way in ("fast", "bfloat16") and len(case.shape) == 3:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        if way == "fast" and device.type == "cpu":
            _use_onednn_(self.model)
        self.wanted: list[torch.Tensor] = list(self.model.parameters())
        if case.classes:
            self.labels = torch.arange(batch, device=device) % case.classes
        else:
            self.inputs.requires_grad_()
            self.wanted.append(self.inputs)
            self.direction = torch.randn(batch, *case.shape).to(device) / self.inputs.numel()

    def loss(self) -> torch.Tensor:
        """The forward pass."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.way == "bfloat16"):
            output = self.model(self.inputs).float()
        if self.case.classes:
            return nn.functional.cross_entropy(output, self.labels)
        return torch.dot(output.reshape(-1), self.direction.view(-1))

    def __call__(self) -> None:
        torch.autograd.grad(self.loss(), self.wanted)

    def seconds(self) -> float:
        """CPU time of this thread for one step; on a GPU, time until it is done."""
        if self.device.type == "cpu":
            start = time.thread_time()
            self()
            return time.thread_time() - start
        _allow_tf32(self.way == "fast")
        torch.cuda.synchronize()
        start = time.perf_counter()
        self()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def kept_bytes(self) -> int:
        """Bytes that one forward pass keeps for its backward pass."""
        # The direction is a part of the measurement, not of the network.
        return kept_bytes(self.model, self.loss, *(() if self.case.classes else (self.direction,)))


class _OneDnnLinear(torch.autograd.Function):
    """The products of a linear layer through oneDNN in place of MKL."""

    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        back = _onednn(gradient, weight.t().contiguous(), None) if ctx.needs_input_grad[0] else None
        return back, _onednn(rows.t().contiguous(), inputs.t().contiguous(), None), rows.sum(dim=0)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _use_onednn_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # nn.Module looks up `forward` on itself first; mypy allows no assignment to a method.
            module.__dict__["forward"] = partial(_through_onednn, module)


def _through_onednn(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return _OneDnnLinear.apply(x, linear.weight, linear.bias)


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def measure(
    name: str, ways: Sequence[str], *, runs: int, seconds: float, quick: bool, device: torch.device
) -> dict[str, Any]:
    """Return the figures of one network, without the ways in which it cannot be computed."""
    case = NETWORKS[name]
    print(f"  {name} …", file=sys.stderr, flush=True)
    batch = max(1, case.batch // 4) if quick else case.batch
    steps: dict[str, Step] = {}
    for way in ways:
        try:
            steps[way] = Step(case, way, batch, device)
        except (AttributeError, TypeError, NotImplementedError) as error:
            print(f"  {name}: no {way}: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for step in steps.values():
        step()
        step()
    end = time.monotonic() + seconds
    for run in range(runs):
        if run >= FEWEST_RUNS and time.monotonic() > end:
            break
        for way, step in steps.items():
            times[way].append(step.seconds())
    figures: dict[str, Any] = {"network": name, "batch": batch, "shape": case.shape, "note": case.note}
    for way, step in steps.items():
        figures[way] = {
            "milliseconds": 1e3 * statistics.median(times[way]),
            "runs": len(times[way]),
            "int8_is_faster_by": _median_ratio(times[way], times.get("int8")),
            "kept_bytes": step.kept_bytes(),
            "peak_bytes": None if quick else _peak_of_own_process(name, way, device),
        }
    if case.product is not None and device.type == "cpu":
        figures["product"] = str(case.product)
        figures["thousand_millions_a_second"] = _speeds(case.product, batch, runs)
    if case.published and {"int8", "fast"} <= steps.keys():
        figures["int8_is_faster_than_published_code_by"] = figures["fast"]["int8_is_faster_by"] / PUBLISHED_CODE
    return figures


def _speeds(product: Product, batch: int, runs: int) -> dict[str, float]:
    """Return the medians of turns of at least 20 ms each."""
    ways = product.ways(batch)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for compute in ways.values():
        compute()
    for _ in range(runs):
        for way, compute in ways.items():
            start, calls, taken = time.thread_time(), 0, 0.0
            while taken < 0.02:
                compute()
                calls, taken = calls + 1, time.thread_time() - start
            found[way].append(1e-9 * calls * product.count(batch) / taken)
    return {way: statistics.median(values) for way, values in found.items()}


def _median_ratio(times: list[float], of_int8: list[float] | None) -> float | None:
    if of_int8 is None:
        return None
    return statistics.median(one / other for one, other in zip(times, of_int8, strict=True))


def _peak_of_own_process(name: str, way: str, device: torch.device) -> int:
    """Return the memory of three steps in a process of their own, beyond what it held before."""
    command = [sys.executable, __file__, "--device", str(device), "--peak", name, way]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT, **FRUGAL}
    )
    return int(done.stdout)


def _measure_peak(name: str, way: str, device: torch.device) -> int:
    use_one_thread()
    step = Step(NETWORKS[name], way, NETWORKS[name].batch, device)
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        for _ in range(3):
            step()
        return torch.cuda.max_memory_allocated(device) - before
    # The largest size by getrusage may be that of the process which started this one.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes()
    for _ in range(3):
        step()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        "| network | batch | way | ms a step | int8 is faster by | kept for backward | int8 keeps less by | peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        eight = row.get("int8")
        for way in WAYS:
            if way not in row:
                continue
            own = row[way]
            faster = f"{own['int8_is_faster_by']:.2f}×" if eight and way != "int8" else ""
            less = f"{own['kept_bytes'] / eight['kept_bytes']:.2f}×" if eight and way != "int8" else ""
            peak = "–" if own["peak_bytes"] is None else f"{own['peak_bytes'] / 1e6:.1f} MB"
            lines.append(
                f"| {row['network']} | {row['batch']} | {way} | {own['milliseconds']:.2f} | {faster} | "
                f"{own['kept_bytes'] / 1e6:.2f} MB | {less} | {peak} |"
            )
        if "int8_is_faster_than_published_code_by" in row:
            faster = f"{row['int8_is_faster_than_published_code_by']:.1f}×"
            lines.append(f"| {row['network']} | {row['batch']} | published code | – | {faster} | – | | – |")
    if not any("product" in row for row in rows):
        return "\n".join(lines)
    lines += [
        "",
        "| product of | batch | float32, 10⁹/s | int8 | | gradient of weights, float32 | int8 | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if "product" not in row:
            continue
        speed = row["thousand_millions_a_second"]
        cells = [f"{row['network']}, {row['product']}", str(row["batch"])]
        for part in ("", ", weights"):
            floats, eight = speed[f"float32{part}"], speed[f"int8{part}"]
            cells += [f"{floats:.1f}", f"{eight:.1f}", f"{eight / floats:.2f}×"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=25.0, help="for each network (default: 25)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--without", choices=WAYS[:-1], action="append", default=[], help="a way to be left out")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--device", type=open_device, default=_CPU, help="cpu or cuda (default: cpu)")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak:
        name, way = chosen.peak
        print(_measure_peak(name, way, chosen.device))
        return 0
    unknown = [name for name in chosen.networks if name not in NETWORKS]
    if unknown:
        parser.error(f"there is no network {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    use_one_thread()
    kernels = f"native kernels {f'for {tier()}' if available() else 'missing'}"
    where = kernels if chosen.device.type == "cpu" else torch.cuda.get_device_name(chosen.device)
    print(f"torch {torch.__version__}, {where}", file=sys.stderr)
    runs = min(FEWEST_RUNS, chosen.runs) if chosen.quick else chosen.runs
    rows = [
        measure(
            name,
            [way for way in WAYS if way not in chosen.without],
            runs=runs,
            seconds=chosen.seconds,
            quick=chosen.quick,
            device=chosen.device,
        )
        for name in chosen.networks or NETWORKS
    ]
    print(report(rows))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(rows, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
