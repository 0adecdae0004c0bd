"""What the tests of kernels share: the versions of them that run here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from peer.errors import ConfigError
from peer.native import lib, use_tier


@pytest.fixture(params=[8192, 512, 256, 0])
def registers(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels of every width; those of torch where no native ones were built."""
    if lib is None:
        if request.param:
            pytest.skip("no native kernels here")
        yield 0
        return
    widest = lib.widest_registers
    lib.widest_registers = request.param
    yield request.param
    lib.widest_registers = widest


def tiers_here() -> list[str]:
    """Return the tiers that multiply bytes natively and that this processor has."""
    if lib is None:
        return []
    limits, found = (lib.widest_registers, lib.byte_instructions), []
    for name in ("AMX", "AVX-512 with VNNI", "AVX-512", "AVX-VNNI", "AVX2", "NEON with i8mm", "NEON with dot product"):
        with contextlib.suppress(ConfigError):
            use_tier(name)
            found.append(name)
    lib.widest_registers, lib.byte_instructions = limits
    return found


@pytest.fixture(params=tiers_here())
def fast_tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every tier that multiplies bytes natively, where the processor has it."""
    assert lib is not None
    limits = lib.widest_registers, lib.byte_instructions
    use_tier(request.param)
    yield
    lib.widest_registers, lib.byte_instructions = limits
