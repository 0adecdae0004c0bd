"""Products of bytes are exact in every version of the kernels, and layers return the same bits on every processor."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

from peer.native import build
from tests.native.amx_model import modelled_kernels

PROGRAM = Path(__file__).parent / "byte_products.c"
SOURCES = (
    "compress.c",
    "eight_bit.c",
    "eight_bit_amx.c",
    "eight_bit_attention.c",
    "eight_bit_linear.c",
    "eight_bit_tiles.c",
    "processor.c",
)
SEEN = "817360d7aeea016d"
"""The checksum of what linear layers and attention of the program return, as plain C for x86-64 printed it."""

OPTIONS = (*build.OPTIONS, "-Werror", f"-I{build.HERE}")
X86, ARM64 = "x86_64-linux-gnu-gcc", "aarch64-linux-gnu-gcc"
AVX2, AMX, NEON_DOT, NEON_I8MM = 1, 4, 6, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the folder of what is compiled, which takes half a minute: all workers of the suite use one."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "byte_products"
    folder.mkdir(exist_ok=True)
    return folder


def program(compiler: str, folder: Path) -> Path:
    """Return the compiled program; skips where there is no such compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    target = folder / compiler
    with (folder / f"{compiler}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            sources = [PROGRAM, *(build.HERE / source for source in SOURCES)]
            outputs = [f"{target}.o", *objects(compiler, folder)]
            commands = ([compiler, *OPTIONS, "-fPIC", "-c", *pair] for pair in zip(sources, outputs, strict=True))
            for compiling in [subprocess.Popen([*map(str, words[:-1]), "-o", words[-1]]) for words in commands]:
                assert compiling.wait() == 0, compiling.args
            link(compiler, target, *outputs, "-static")
    return target


def objects(compiler: str, folder: Path) -> list[str]:
    """Return where the compiled kernels lie: fit for programs and for libraries."""
    return [str(folder / f"{compiler}-{source}.o") for source in SOURCES]


def link(compiler: str, target: Path, *words: str | Path) -> None:
    subprocess.run([compiler, *map(str, words), "-lm", "-o", str(target)], check=True)


def outcome(*command: str | Path) -> tuple[int, str]:
    """Return the tier that ran, and the checksum."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tier, checksum = done.stdout.split()
    return int(tier), checksum


@pytest.mark.parametrize(("widest", "byte_instructions"), [(8192, 2), (512, 2), (512, 0), (256, 2), (256, 0), (0, 0)])
def test_of_this_processor(folder: Path, widest: int, byte_instructions: int) -> None:
    _, checksum = outcome(program(X86, folder), str(widest), str(byte_instructions))
    assert checksum == SEEN


def test_of_amx_in_software(folder: Path) -> None:
    model, kernels, with_model = modelled_kernels(folder), folder / "libkernels.so", folder / "with_model"
    program(X86, folder)
    link(X86, kernels, *objects(X86, folder), "-shared")
    # What is named first is found first, by the kernels too.
    link(X86, with_model, f"{folder / X86}.o", "-Wl,--no-as-needed", model, kernels)
    assert outcome(with_model) == (AMX, SEEN)


@pytest.mark.parametrize(
    ("emulator", "processor", "compiler", "tier"),
    [
        ("qemu-x86_64", "max", X86, AVX2),
        ("qemu-x86_64", "Nehalem", X86, 0),
        ("qemu-aarch64", "cortex-a57", ARM64, 0),
        ("qemu-aarch64", "neoverse-n1", ARM64, NEON_DOT),
        ("qemu-aarch64", "max", ARM64, NEON_I8MM),
    ],
)
def test_of_other_processors(folder: Path, emulator: str, processor: str, compiler: str, tier: int) -> None:
    if shutil.which(emulator) is None:
        pytest.skip(f"{emulator} is not installed (qemu-user)")
    assert outcome(emulator, "-cpu", processor, program(compiler, folder)) == (tier, SEEN)
