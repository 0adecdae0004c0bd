"""The products of 8-bit operands: int8 × int8 → int32, exact."""

from __future__ import annotations

import torch

_EXACT_TERMS = 1024
"""Products of two int8 are at most 2¹⁴, and float32 holds every integer up to 2²⁴."""
MAX_TERMS = 2**31 // 2**14 - 1
"""Most terms of a sum: more might overflow int32."""


def int8_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out: int32[m, n]` with a · b, `a: int8[m, k]` and `b: int8[k, n]` (a transposed view does as well), and
    return it.

    On a CPU with VNNI these are its 8-bit instructions (oneDNN through `torch._int_mm`); on CUDA the tensor cores;
    elsewhere float32 products short enough to be exact, hence the same integers everywhere.
    """
    assert a.dtype == b.dtype == torch.int8
    assert out.dtype == torch.int32
    check_terms(a.shape[1])
    if a.device.type == "cpu" and _multiplies_exactly():
        return torch._int_mm(a, b, out=out)
    if a.device.type == "cuda" and a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0:
        return torch._int_mm(a, b, out=out)
    return product_by_floats(a, b, out)


def batched_int8_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out: int32[..., m, n]` with the products of the last two dimensions of `a: int8[..., m, k]` and
    `b: int8[..., k, n]`, and return it."""
    m, n = out.shape[-2:]
    matrices = zip(a.reshape(-1, m, a.shape[-1]), b.reshape(-1, b.shape[-2], n), out.view(-1, m, n), strict=True)
    for left, right, result in matrices:
        int8_product(left, right, result)
    return out


def check_terms(count: int) -> None:
    """Raise ValueError if the sum of so many products might overflow."""
    if count > MAX_TERMS:
        raise ValueError(f"a product of {count} terms may overflow 32 bits; {MAX_TERMS} are the most")


def product_by_floats(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same by float32 products of at most 1024 terms, which are exact."""
    if a.shape[1] <= _EXACT_TERMS:
        return out.copy_(a.to(torch.float32) @ b.to(torch.float32))
    out.zero_()
    for start in range(0, a.shape[1], _EXACT_TERMS):
        part = slice(start, start + _EXACT_TERMS)
        out += (a[:, part].to(torch.float32) @ b[part].to(torch.float32)).to(torch.int32)
    return out


def _multiplies_exactly() -> bool:
    """Whether PyTorch multiplies bytes exactly here. Without VNNI, which `ONEDNN_MAX_CPU_ISA` can keep it from using,
    sums of x86 saturate at 16 bits on the way."""
    global _exact
    if _exact is None:
        largest = torch.full((32, 32), 127, dtype=torch.int8)
        _exact = bool(torch.cpu._is_vnni_supported()) and int(torch._int_mm(largest, largest).min()) == 32 * 127**2
    return _exact


_exact: bool | None = None
