"""Computes with the native kernels of 8-bit training and with their torch twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peer.native import available, lib
from peer.train.eight_bit import kernels, linear_kernels

ON_EACH_FAST_TIER = [
    pytest.mark.skipif(
        not available() or not lib.eb_linear_speed() & 1,
        reason="needs the native kernels, and a processor for which they multiply bytes",
    ),
    pytest.mark.usefixtures("fast_tier"),
]
"""Marks of a file whose tests compare native products with those of torch."""


def by_both(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what `compute` returns with the native kernels and without them."""
    native = _copied(compute())
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernels, linear_kernels):
            patch.setattr(module, "lib", None)
        return native, compute()


def assert_twins_agree(compute: Callable[[], Any]) -> None:
    """Compare the bits of what `compute` returns with and without the native kernels."""
    assert_equal(*by_both(compute))


def assert_equal(left: Any, right: Any) -> None:
    """Compare numbers, tensors by their bits, and tuples of these; NaN equals NaN."""
    if isinstance(left, tuple):
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    else:
        assert left == right or (math.isnan(left) and math.isnan(right))


def _copied(result: Any) -> Any:
    # What lies in scratch memory is overwritten by the next call.
    if isinstance(result, torch.Tensor):
        return result.clone()
    return tuple(map(_copied, result)) if isinstance(result, tuple) else result
