"""The kernels for AMX return what the others do, with software in the place of the tile registers."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


Load = Callable[..., None]
"""A load of a tile from an offset of aligned memory, with a stride; its kind is that of amx_model.h."""
KIB = 1024


def touched(model: Path, rows: int, pattern: Callable[[Load], None]) -> tuple[int, int]:
    """Return how many lines the loads of a pattern touch, of tiles with so many rows of 64 bytes, and how many of them
    are not in the cache."""
    tiles = ctypes.CDLL(str(model))
    tiles.amx_model_counts.restype = amx_model.AmxCounts
    configuration = bytes([1, *[0] * 15, 64, *[0] * 31, rows, *[0] * 15])
    memory = ctypes.create_string_buffer(256 * KIB)
    aligned = -(-ctypes.addressof(memory) // 4096) * 4096

    def load(offset: int, stride: int, kind: str = "load") -> None:
        tiles[f"amx_model_{kind}"](0, ctypes.c_void_p(aligned + offset), ctypes.c_size_t(stride))

    def run() -> tuple[int, int]:
        tiles.processor_tiles()
        tiles.amx_model_configure(configuration)
        pattern(load)
        counts = tiles.amx_model_counts()
        return counts.lines, counts.missed_lines

    # A thread begins with an empty cache.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def sweep(load: Load, size: int) -> None:
    for offset in range(0, size, 16 * 64):
        load(offset, 64)


def test_a_panel_that_fits_into_the_cache_is_missed_once(model: Path) -> None:
    def thrice(load: Load) -> None:
        for _ in range(3):
            sweep(load, 48 * KIB)

    assert touched(model, 16, thrice) == (3 * 768, 768)


def test_a_panel_that_is_larger_than_the_cache_is_missed_in_each_sweep(model: Path) -> None:
    def thrice(load: Load) -> None:
        for _ in range(3):
            sweep(load, 64 * KIB)

    assert touched(model, 16, thrice) == (3 * 1024, 3 * 1024)


def test_the_line_that_was_not_used_for_longest_makes_way(model: Path) -> None:
    def with_one_kept(load: Load) -> None:
        sweep(load, 48 * KIB)
        load(0, 64)
        load(48 * KIB, 64)
        load(0, 64)
        load(4 * KIB, 64)

    assert touched(model, 16, with_one_kept) == (768 + 4 * 16, 768 + 2 * 16)


@pytest.mark.parametrize(("rows", "missed"), [(12, 12), (13, 26), (16, 32)])
def test_twelve_lines_a_page_apart_have_a_place(model: Path, rows: int, missed: int) -> None:
    def twice(load: Load) -> None:
        load(0, 4096)
        load(0, 4096)

    assert touched(model, rows, twice) == (2 * rows, missed)


def test_what_is_streamed_takes_no_place(model: Path) -> None:
    def beside(load: Load) -> None:
        sweep(load, 40 * KIB)
        for offset in range(64 * KIB, 128 * KIB, KIB):
            load(offset, 64, "stream_load")
        sweep(load, 40 * KIB)

    assert touched(model, 16, beside) == (2 * 640 + 1024, 640 + 1024)


def test_rows_across_lines_touch_two(model: Path) -> None:
    assert touched(model, 16, lambda load: load(32, 64)) == (32, 17)


@pytest.mark.skipif(not available(), reason="the native kernels were not built")
def test_8_bit_kernels_and_networks_in_tiles(model: Path) -> None:
    if python(model, "-c", "from peer import native; print(native.tier())").stdout.strip() != "AMX":
        pytest.skip("the kernels were built without AMX, or linked so that none of their functions can be replaced")
    done = python(model, "-m", "pytest", "-p", "no:cacheprovider", "-k", OF_AMX, *KERNEL_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.skipif(not available(), reason="the native kernels were not built")
def test_steps_run_with_tile_instructions_left_out_and_paced(folder: Path) -> None:
    library, rows = amx_model.kernels_without_tiles(folder), folder / "rows.json"
    if python(library, "-c", "from peer import native; print(native.tier())").stdout.strip() != "AMX":
        pytest.skip("the kernels were built without AMX, or linked so that none of their functions can be replaced")
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.time_for_amx", "mlp-512", "--seconds", "0", "--json", str(rows)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("| mlp-512 | ")
    (row,) = json.loads(rows.read_text())
    for way in ("around", "paced"):
        assert row[way]["steps"] == 5
        assert 0 < row[way]["least_ms"] <= row[way]["median_ms"]
    assert 0 < row["missed_lines"] < row["lines"]
    # Sixteen tiles of rows: 784-512-512-10 forwards, where 64 terms are a tile, and back through the last two layers.
    forward, back = 13 * 32 + 8 * 32 + 8 * 1, 1 * 32 + 8 * 32
    assert row["byte_products"] == 16 * (forward + back)
