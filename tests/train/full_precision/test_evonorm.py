"""EvoNorm-S0's native kernels: rounding and nothing else parts them from the formula, and nothing from themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from peer.native import ffi, lib
from peer.train.full_precision.evonorm import composed, evonorm_s0
from peer.train.full_precision.norms import EvoNormS0
from peer.train.models.resnet import resnet20

needs_kernels = pytest.mark.skipif(lib is None, reason="the native kernels were not built")
UNIT = 2.0**-24
"""Of float32: the relative error of one operation."""
EPSILON = 1e-5
SHAPES = [(3, 16, 8, 8, 16), (2, 64, 5, 5, 32), (3, 24, 7, 3, 8), (2, 5, 1, 1, 1), (1, 18, 40, 33, 18)]
"""b, c, h, w and groups: full and broken vectors of pixels and of channels, groups of one and of several channels, and
planes of more than one block of sums."""


@pytest.fixture(params=[512, 256, 0])
def registers(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels of every width."""
    assert lib is not None
    widest = lib.widest_registers
    lib.widest_registers = request.param
    yield request.param
    lib.widest_registers = widest


@dataclass
class Case:
    """A norm's input, its parameters, and the gradient of its output."""

    tensors: list[torch.Tensor]
    """x, v, weight and bias."""
    gradient: torch.Tensor
    groups: int

    def run(self, function=evonorm_s0) -> list[torch.Tensor]:
        """Return y and the gradients of x, v, weight and bias."""
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors]
        y = function(*leaves, self.groups, EPSILON)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.gradient)]

    def to(self, dtype: torch.dtype) -> Case:
        return Case([tensor.to(dtype) for tensor in self.tensors], self.gradient.to(dtype), self.groups)

    def images(self, change) -> Case:
        """Return the case with `change` applied to x and the gradient."""
        return Case([change(self.tensors[0]), *self.tensors[1:]], change(self.gradient), self.groups)


def drawn(b: int, c: int, h: int, w: int, groups: int, *, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    x = 0.5 + 2 * torch.randn(b, c, h, w)
    return Case([x, *(torch.randn(c) for _ in range(3))], torch.randn(b, c, h, w), groups)


def channels_last(images: torch.Tensor) -> torch.Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def rounding_bounds(case: Case) -> list[torch.Tensor]:
    """Return by how much the kernels may miss y and each gradient, float64.

    A sum of terms tᵢ whose longest chain has L additions misses by at most about L u Σ|tᵢ|. A chain is at most 64
    vectors, the blocks of such, 4 halvings of a vector, the channels of a group, and the samples. A factor adds the u
    of its operations: those of σ 5 (3e-7), and u |v x| for its argument; r has half the relative error of the variance.
    """
    x, v, weight, bias = (tensor.double() for tensor in case.tensors)
    g = case.gradient.double()
    b, c, h, w = x.shape
    column = (1, c, 1, 1)
    per = c // case.groups
    grouped = x.view(b, case.groups, -1)
    mean = grouped.mean(2).repeat_interleave(per, 1).view(b, c, 1, 1)
    r = torch.rsqrt(grouped.var(2, correction=0) + EPSILON).repeat_interleave(per, 1).view(b, c, 1, 1)
    chain = 64 + -(-h * w // 64) + 4 + per + b
    s = torch.sigmoid(v.view(column) * x)
    factor = UNIT * (20 + chain + (v.view(column) * x).abs())
    slope = x.abs() * s * (1 - s)
    plain, scaled = g.abs() * x.abs() * s * r, (r * weight.view(column)).abs()
    y = factor * x.abs() * s * scaled + UNIT * (x * s * r * weight.view(column) + bias.view(column)).abs()
    through_variance = (factor * plain * weight.view(column).abs()).view(b, case.groups, -1).mean(2)
    through_variance = through_variance.repeat_interleave(per, 1).view(b, c, 1, 1)
    # The mean's own error moves x − m, and cancellation leaves it whole.
    centred = (x - mean).abs() + x.abs().view(b, case.groups, -1).mean(2).repeat_interleave(per, 1).view(b, c, 1, 1)
    x_gradient = factor * g.abs() * scaled * (s + v.view(column).abs() * slope) + through_variance * r**2 * centred
    over = (0, 2, 3)
    return [
        y,
        x_gradient,
        (factor * g.abs() * x.abs() * slope * scaled).sum(over),
        (factor * plain).sum(over),
        (UNIT * chain * g.abs()).sum(over),
    ]


@needs_kernels
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_alone_parts_the_kernels_from_float64(shape, layout, registers: int) -> None:
    case = drawn(*shape)
    expected = case.to(torch.float64).run(composed)
    for found, wanted, bound in zip(case.images(layout).run(), expected, rounding_bounds(case), strict=True):
        assert found.dtype == torch.float32
        assert ((found - wanted).abs() <= bound).all()


@needs_kernels
def test_the_bounds_would_notice_another_slope() -> None:
    """Leaving out what x does by the variance is no rounding."""
    case = drawn(*SHAPES[0])
    wrong = case.to(torch.float64).run(lambda x, *rest: composed(x, *rest) + 1e-3 * x * x)
    bounds = rounding_bounds(case)
    assert all(((case.run()[i] - wrong[i]).abs() > bounds[i]).any() for i in (0, 1))


@needs_kernels
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_neither_on_the_width_of_registers_nor_on_where_tensors_lie(shape, layout, registers: int) -> None:
    case = drawn(*shape).images(layout)
    expected = case.run()

    def moved(images: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(images.numel() + 1)[1:]
        return torch.as_strided(memory, images.shape, images.stride()).copy_(images)

    elsewhere = case.images(moved)
    assert elsewhere.tensors[0].data_ptr() % 8 == 4
    assert lib is not None
    lib.widest_registers = 512
    for found in (case.run(), elsewhere.run()):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@needs_kernels
def test_a_sample_gets_the_same_bits_in_any_batch() -> None:
    case = drawn(4, 16, 6, 6, 16)
    whole = case.run()
    alone = Case([case.tensors[0][2:3], *case.tensors[1:]], case.gradient[2:3], 16).run()
    assert torch.equal(whole[0][2:3], alone[0])
    assert torch.equal(whole[1][2:3], alone[1])


@needs_kernels
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_float32_rounded_at_the_end(shape, layout, registers: int) -> None:
    short = drawn(*shape).images(lambda images: layout(images.bfloat16()))
    wide = short.images(torch.Tensor.float)
    y, x_gradient, *slopes = short.run()
    wide_y, wide_x_gradient, *wide_slopes = wide.run()
    assert y.stride() == short.tensors[0].stride()
    assert torch.equal(y, wide_y.bfloat16())
    assert torch.equal(x_gradient, wide_x_gradient.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(slopes, wide_slopes, strict=True))


@needs_kernels
def test_sigmoid_is_within_three_ten_millionths(registers: int) -> None:
    assert lib is not None
    u = torch.cat([torch.linspace(-87, 87, 2_000_001), torch.randn(100_000)])
    found = torch.empty_like(u)
    lib.en_sigmoid(ffi.cast("float *", u.data_ptr()), u.numel(), ffi.cast("float *", found.data_ptr()))
    assert ((found / torch.sigmoid(u.double()) - 1).abs() < 3e-7).all()


@needs_kernels
def test_sigmoid_at_the_ends(registers: int) -> None:
    assert lib is not None
    u = torch.tensor([float("-inf"), -1e30, -88.0, 88.0, 1e30, float("inf"), float("nan")])
    found = torch.empty_like(u)
    lib.en_sigmoid(ffi.cast("float *", u.data_ptr()), u.numel(), ffi.cast("float *", found.data_ptr()))
    assert (found[:3] < 2e-38).all()
    assert (found[3:6] == 1).all()
    assert found[6].isnan()


@needs_kernels
@pytest.mark.parametrize("place", range(4))
def test_what_is_not_a_number_stays_visible(place: int, registers: int) -> None:
    case = drawn(2, 16, 4, 4, 16)
    case.tensors[place].view(-1)[0] = float("nan")
    y = case.run()[0]
    assert y[0, 0].isnan().all()
    assert y[:, 1:].isfinite().all()


@needs_kernels
def test_images_with_gaps_are_closed() -> None:
    case = drawn(2, 16, 6, 6, 16)
    gaps = case.images(lambda images: images.repeat_interleave(2, dim=3)[..., ::2])
    assert not gaps.tensors[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(case.run(), gaps.run(), strict=True))


def test_without_kernels_bfloat16_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(2, 16, 4, 4, 16).images(torch.Tensor.bfloat16)
    found = case.run(composed)
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    assert all(slope.dtype == torch.float32 for slope in found[2:])
    assert torch.equal(found[0], case.images(torch.Tensor.float).run(composed)[0].bfloat16())


def test_a_stack_of_peers_gets_values_and_gradients_of_each() -> None:
    cases = [drawn(2, 16, 4, 4, 16, seed=seed) for seed in range(3)]
    leaves = [torch.stack(parts).requires_grad_() for parts in zip(*(case.tensors for case in cases), strict=True)]
    y = torch.vmap(lambda *tensors: evonorm_s0(*tensors, 16, EPSILON))(*leaves)
    found = torch.autograd.grad(y, leaves, torch.stack([case.gradient for case in cases]))
    for row, case in enumerate(cases):
        for stacked, single in zip((y, *found), case.run(), strict=True):
            assert torch.allclose(stacked[row], single, rtol=1e-4, atol=1e-5)


def test_samples_shared_by_a_stack_are_not_repeated_by_hand() -> None:
    case, v = drawn(2, 16, 4, 4, 16), torch.randn(3, 16)
    x, _, weight, bias = case.tensors
    y = torch.vmap(lambda each: evonorm_s0(x, each, weight, bias, 16, EPSILON))(v)
    assert torch.allclose(y[1], evonorm_s0(x, v[1], weight, bias, 16, EPSILON), atol=1e-5)


def test_an_exported_model_consists_of_torch_operators() -> None:
    model = resnet20().eval()
    x = torch.randn(2, 3, 32, 32)
    program = torch.export.export(model, (x,))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("sigmoid" in target for target in targets)
    assert all(target.startswith("aten.") for target in targets)
    assert torch.allclose(program.module()(x), model(x), atol=1e-4)


def test_a_compiled_norm_traces_through_torch_operators() -> None:
    norm, x = EvoNormS0(8), torch.randn(2, 8, 4, 4)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), norm(x), atol=1e-5)


def test_a_traced_norm_follows_new_inputs() -> None:
    norm = EvoNormS0(8)
    traced = torch.jit.trace(norm, torch.randn(2, 8, 4, 4))
    x = torch.randn(2, 8, 4, 4)
    assert torch.allclose(traced(x), norm(x), atol=1e-5)
