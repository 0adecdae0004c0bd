"""What the tests of convolutions and norms share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peer.native import lib


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
