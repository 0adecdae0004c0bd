"""Compiles the tile kernels with something else in the place of AMX, for processors that do not have it: software that
computes the same, nothing, or what takes the same time.

The results are libraries with the functions of `eight_bit_amx.c` and an answer of `processor_tiles`. Loaded before the
compiled kernels, with LD_PRELOAD or by the order of linking, its functions take the place of theirs: all else is what
was built.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from peer.native import build
from tools.bench_eight_bit import ENVIRONMENT

HERE = Path(__file__).parent
GCC = "gcc"
OPTIONS = (*build.OPTIONS, "-Werror", f"-I{build.HERE}", f"-I{HERE}")


class AmxCounts(ctypes.Structure):
    """As `amx_model.h` has it."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "configurations", "loads", "stores", "byte_products", "pair_products", "lines", "missed_lines"
        )
    ]  # fmt: skip


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
    """Return the library with the model, compiled in `folder`; skips where it cannot run."""
    return _library(folder / "libamx_model.so", "amx_model.h", "amx_model.c")


def kernels_without_tiles(folder: Path) -> Path:
    """Return the library that leaves tile instructions out, compiled in `folder`; skips where it cannot run."""
    return _library(folder / "libamx_left_out.so", "amx_left_out.h", "amx_granted.c")


def paced_kernels(folder: Path) -> Path:
    """Return the library with instructions that take the time of tiles, compiled in `folder`; skips where it cannot
    run."""
    return _library(folder / "libamx_paced.so", "amx_paced.h", "amx_granted.c")


def _library(target: Path, header: str, source: str) -> Path:
    skip_without_amx_kernels()
    sources = HERE / source, build.HERE / "eight_bit_amx.c"
    return compiled(target, "-shared", "-fPIC", "-include", HERE / header, *sources)


def answer(module: str, kernels: Callable[[Path], Path], words: Sequence[str]) -> Any:
    """Return what a module of this folder writes as JSON to the file that its option --answer names, run with other
    kernels on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        library, file = kernels(Path(folder)), Path(folder) / "answer.json"
        order = [sys.executable, "-m", module, "--answer", str(file), *words]
        subprocess.run(order, env={**os.environ, **ENVIRONMENT, "LD_PRELOAD": str(library)}, check=True)
        return json.loads(file.read_text())
