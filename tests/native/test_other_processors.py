"""The kernels compile for processors that are not at hand, without a warning."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from peer.native import build

ARM64 = "aarch64-linux-gnu-gcc"


@pytest.mark.skipif(shutil.which(ARM64) is None, reason=f"{ARM64} is not installed (gcc-aarch64-linux-gnu)")
@pytest.mark.parametrize("source", build.SOURCES + build.INTERNAL)
def test_kernels_compile_for_arm64(source: str) -> None:
    command = [ARM64, "-fsyntax-only", "-Werror", *build.OPTIONS, str(build.HERE / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
