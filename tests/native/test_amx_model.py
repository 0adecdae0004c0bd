"""The kernels for AMX return what the others do, with software in the place of the tile registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.native import available
from tests.native import amx_model

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = [
    f"tests/train/eight_bit/test_{name}.py"
    for name in ("linear_kernels", "attention_kernels", "conv_kernels", "conv_batch_norm", "network", "image_networks")
]
OF_AMX = "AMX or 8192 or test_network or vgg"
"""Of tests that run on several tiers, those on the best; of the networks that learn, the fastest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("amx_model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return amx_model.modelled_kernels(folder)


@pytest.fixture(scope="module")
def program(folder: Path, model: Path) -> Path:
    return amx_model.compiled(folder / "amx_use", amx_model.HERE / "amx_use.c", model)


def python(model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the modelled kernels in front of those that were built."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SOTTOVOCE_"))}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**ours, "LD_PRELOAD": str(model)}, capture_output=True, text=True
    )


def test_the_model_rounds_as_the_instruction_does(program: Path) -> None:
    done = subprocess.run([program, "right"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("not-granted", "tiles are configured before the kernel granted them"),
        ("early", "a tile is used before the configuration"),
        ("late", "a tile is used before the configuration"),
        ("palette", "the palette is not 1"),
        ("rows", "a tile has more than 16 rows"),
        ("row-bytes", "a row has more than 64 bytes"),
        ("half", "a tile has rows or bytes, but not both"),
        ("ninth", "there is no such tile"),
        ("unconfigured", "a tile is used that was not configured"),
        ("twice", "two operands of a product are the same tile"),
        ("fewer-rows", "the left tile of a product has not as many rows as the sums"),
        ("fewer-columns", "the right tile of a product has not as many columns as the sums"),
        ("fewer-terms", "the left tile of a product has not as many columns as the right one rows"),
    ],
)
def test_what_a_processor_refuses_ends_the_program(program: Path, way: str, said: str) -> None:
    done = subprocess.run([program, way], capture_output=True, text=True)
    assert done.returncode < 0
    assert done.stderr == f"AMX: {said}\n"


@pytest.mark.skipif(not available(), reason="the native kernels were not built")
def test_8_bit_kernels_and_networks_in_tiles(model: Path) -> None:
    if python(model, "-c", "from peer import native; print(native.tier())").stdout.strip() != "AMX":
        pytest.skip("the kernels were built without AMX, or linked so that none of their functions can be replaced")
    done = python(model, "-m", "pytest", "-p", "no:cacheprovider", "-k", OF_AMX, *KERNEL_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
