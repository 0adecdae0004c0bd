"""Compiles the tile kernels with software in the place of AMX, for processors that do not have it.

The result is a library with the functions of `eight_bit_amx.c` and an answer of `processor_tiles`. Loaded before the
compiled kernels, with LD_PRELOAD or by the order of linking, its functions take the place of theirs: all else is what
was built.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peer.native import build

HERE = Path(__file__).parent
GCC = "gcc"
OPTIONS = (*build.OPTIONS, "-Werror", f"-I{build.HERE}", f"-I{HERE}")


def skip_without_amx_kernels() -> None:
    """Skip unless the tile kernels compile here, and the rest of what they do runs."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("kernels for AMX are compiled on Linux for x86-64 only")
    if shutil.which(GCC) is None:
        pytest.skip("gcc is not installed")
    if int(subprocess.check_output([GCC, "-dumpversion"], text=True).split(".")[0]) < 11:
        pytest.skip("kernels for AMX need gcc 11")
    if "avx512bw" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512, which the kernels for AMX use beside it")


def compiled(target: Path, *words: str | Path) -> Path:
    """Return `target`, compiled of sources with these options."""
    subprocess.run([GCC, *OPTIONS, *map(str, words), "-lm", "-o", str(target)], check=True)
    return target


def modelled_kernels(folder: Path) -> Path:
    """Return the library, compiled in `folder`; skips where it cannot run."""
    skip_without_amx_kernels()
    sources = HERE / "amx_model.c", build.HERE / "eight_bit_amx.c"
    return compiled(folder / "libamx_model.so", "-shared", "-fPIC", "-include", HERE / "amx_model.h", *sources)
