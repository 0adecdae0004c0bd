"""Fixtures of the wire tests: both implementations of the kernels."""

from __future__ import annotations

import pytest

from peer import native


@pytest.fixture(params=["native", "pure"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with the native kernels and once with numpy alone."""
    if request.param == "pure":
        monkeypatch.setattr(native, "lib", None)
    elif native.lib is None:
        pytest.skip("the native kernels were not built")
    return str(request.param)
