"""Every native kernel of 8-bit training returns the bits of its torch twin, for numbers that are hard to round too."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from peer.native import available
from peer.train.eight_bit import kernels
from peer.train.eight_bit.products import int8_product, product_by_floats
from peer.train.eight_bit.ranges import Grid, grid_over
from peer.train.eight_bit.tensors import Tape
from tests.train.eight_bit.twins import assert_twins_agree

needs_native = pytest.mark.skipif(not available(), reason="the native kernels were not built")

SHAPES = [(1, 1), (3, 5), (7, 64), (5, 1027), (33, 130)]
GRIDS = [grid_over(-1.0, 3.0), grid_over(0.0, 0.7), grid_over(-2.5, 0.0), Grid(0.5, 0), grid_over(-1e-3, 40.0)]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def values(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return normal numbers with ties, zeros of both signs, tiny, huge and unordered ones among them."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.randn(shape, generator=generator)
    flat = result.view(-1)
    awkward = torch.tensor([0.25, -0.25, 0.75, 0.0, -0.0, 1e-42, -1e-38, 300.0, -70000.0])
    count = min(len(awkward), len(flat) // 2)
    flat[:count] = awkward[:count]
    return result


def accumulators(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**24), 2**24, shape, dtype=torch.int32, generator=generator)


def codes(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


@needs_native
@EACH_SHAPE
@pytest.mark.parametrize("grid", GRIDS)
def test_quantizing(shape: tuple[int, int], grid: Grid) -> None:
    assert_twins_agree(lambda: kernels.quantize(values(shape), grid))


@needs_native
@EACH_SHAPE
def test_root_mean_square(shape: tuple[int, int]) -> None:
    assert_twins_agree(lambda: kernels.root_mean_square(values(shape)))
    sparse = torch.zeros(shape)
    assert_twins_agree(lambda: kernels.root_mean_square(sparse))
    sparse[-1, -1] = -3.0
    assert kernels.root_mean_square(sparse) == 3.0


@needs_native
@EACH_SHAPE
def test_quantizing_weights(shape: tuple[int, int]) -> None:
    assert_twins_agree(lambda: kernels.quantize_weights(values(shape), values(shape).abs().max().item()))


@needs_native
@EACH_SHAPE
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_finishing_a_forward_product(shape: tuple[int, int], grid: Grid, relu: bool, whole: bool) -> None:
    offset = accumulators(shape[1:], 3) if whole else None
    bias = values(shape[1:], 4) if whole else None
    acc = accumulators(shape)
    assert_twins_agree(lambda: kernels.finish_forward(acc, offset, 1e-7, bias, grid, relu=relu))
    assert_twins_agree(lambda: kernels.finish_forward_floats(acc, offset, 1e-7, bias))


@needs_native
@EACH_SHAPE
def test_finishing_a_backward_product(shape: tuple[int, int]) -> None:
    for mask in (None, codes(shape)):
        assert_twins_agree(partial(kernels.finish_backward, accumulators(shape), 3e-6, mask, -128))


@needs_native
@EACH_SHAPE
def test_masking_a_gradient(shape: tuple[int, int]) -> None:
    def masked(mask: torch.Tensor | None) -> tuple[torch.Tensor, float]:
        gradient = values(shape).to(torch.bfloat16)
        largest = kernels.mask_gradient_(gradient, mask, 3)
        return gradient, largest

    for mask in (None, codes(shape)):
        assert_twins_agree(partial(masked, mask))


@needs_native
@EACH_SHAPE
def test_rounding_to_bfloat16(shape: tuple[int, int]) -> None:
    assert_twins_agree(lambda: kernels.to_bfloat16(values(shape)))


@needs_native
@EACH_SHAPE
def test_quantizing_a_gradient(shape: tuple[int, int]) -> None:
    gradient, largest = kernels.to_bfloat16(torch.randn(shape))
    assert_twins_agree(lambda: kernels.quantize_gradient(gradient, largest, (0xDEADBEEF, 0x12345678)))
    assert_twins_agree(lambda: kernels.quantize_gradient(torch.zeros_like(gradient), 0.0, (1, 2)))


@needs_native
@EACH_SHAPE
def test_the_operands_of_weight_gradients(shape: tuple[int, int]) -> None:
    for zero_point in (-128, 0, 77, 127):
        assert_twins_agree(partial(kernels.codes_to_bfloat16, codes(shape), zero_point))
    assert_twins_agree(lambda: kernels.scale_bfloat16(values(shape).to(torch.bfloat16), 0.37))
    assert_twins_agree(lambda: kernels.column_sums(values(shape).to(torch.bfloat16)))


@needs_native
@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf])
def test_numbers_that_are_none_reach_the_extremes(wrong: float) -> None:
    broken = values((3, 50))
    broken[1, 7] = wrong
    assert_twins_agree(lambda: kernels.extremes(broken))
    low, high = kernels.extremes(broken)
    assert (math.isnan(low) and math.isnan(high)) or high == math.inf
    assert_twins_agree(lambda: kernels.to_bfloat16(broken)[1])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
def test_a_kernel_reads_no_numbers_of_another_type(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float"):
        kernels.extremes(torch.ones(4, dtype=dtype))


def test_gradients_are_rounded_without_bias() -> None:
    gradient = torch.full((200_000,), 0.3).to(torch.bfloat16)
    gradient[0] = 1.0
    quantized, scale = kernels.quantize_gradient(gradient, 1.0, (11, 12))
    exact = gradient[1].item() / scale
    share = exact - math.floor(exact)
    deviation = math.sqrt(share * (1 - share) / len(gradient))
    assert set(quantized[1:].tolist()) == {math.floor(exact), math.floor(exact) + 1}
    assert abs(quantized[1:].double().mean().item() - exact) < 5 * deviation


def test_draws_are_uniform_and_differ_between_streams() -> None:
    tape = Tape(recording=True, training=True, seed=0)
    first, second = (kernels.draws(65536, tape.draw_keys(), torch.device("cpu")) for _ in range(2))
    assert abs(first.mean().item() - 0.5) < 5 / math.sqrt(12 * 65536)
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1].item()) < 5 / math.sqrt(65536)
    assert abs(torch.corrcoef(torch.stack((first[:-1], first[1:])))[0, 1].item()) < 5 / math.sqrt(65536)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (17, 64, 10), (5, 1500, 33), (32, 2048, 16)])
def test_products_are_the_same_integers_with_and_without_vnni(m: int, k: int, n: int) -> None:
    a, b = codes((m, k)), codes((n, k), 2)
    a[0], b[0] = -128, -128
    exact = a.to(torch.int64) @ b.t().to(torch.int64)
    out = torch.empty(m, n, dtype=torch.int32)
    assert torch.equal(int8_product(a, b.t(), out).to(torch.int64), exact)
    assert torch.equal(product_by_floats(a, b.t(), out).to(torch.int64), exact)


def test_products_are_exact_where_pytorch_is_kept_from_vnni() -> None:
    """Without it, oneDNN's sums of two products saturate at 16 bits on x86."""
    code = """import torch; from peer.train.eight_bit.products import int8_product
a = torch.full((32, 64), 127, dtype=torch.int8)
print(int8_product(a, a.t(), torch.empty(32, 32, dtype=torch.int32)).unique().tolist())"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([64 * 127**2])


def test_products_that_might_overflow_are_refused() -> None:
    a = torch.zeros(1, 2**18, dtype=torch.int8)
    with pytest.raises(ValueError, match="overflow"):
        int8_product(a, a.t(), torch.empty(1, 1, dtype=torch.int32))
