"""The decoder under made-up bytes: the kept inputs, a short run of the fuzzer, and the kernels under sanitizers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peer import native
from peer.wire import Message
from tests.wire import fuzzing

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 12


def test_every_kept_input_keeps_every_promise() -> None:
    inputs = [path.read_bytes() for path in sorted(fuzzing.CORPUS.iterdir())]
    assert len(inputs) > 100
    for data in inputs:
        # Bits 4, 5 and 6: with both implementations, and with allocations counted.
        fuzzing.check(bytes((data[0] | 0x70,)) + data[1:])


def test_honest_inputs_decode() -> None:
    for data in fuzzing.seeds():
        assert isinstance(fuzzing.check(data), Message)


def test_the_kept_inputs_stay_small() -> None:
    assert sum(path.stat().st_size for path in fuzzing.CORPUS.iterdir()) < 200_000


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris, the fuzzer, is not installed")
def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.stress.fuzz", "--seconds", str(SECONDS), "--work", str(tmp_path)]
    # Another seed in every run of the tests would find more, and fail for changes that are not to blame.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20 * SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


SANITIZED = """
import random, sys
from pathlib import Path
from cffi import FFI
import peer.compress
from peer import native

ffi = FFI()
library, *headers = sys.argv[1:]
for header in headers:
    ffi.cdef("\\n".join(line for line in Path(header).read_text().splitlines() if not line.startswith("#")))
native.ffi, native.lib = ffi, ffi.dlopen(library)
from tests.wire import fuzzing

chance = random.Random(1)
inputs = [path.read_bytes() for path in sorted(fuzzing.CORPUS.iterdir())] + fuzzing.seeds()
for data in inputs:
    fuzzing.check(bytes((data[0] & 0x8F,)) + data[1:])
for _ in range(6000):
    data = bytearray(chance.choice(inputs))
    data[0] &= 0x8F
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(data))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
    fuzzing.check(bytes((data[0] & 0x8F,)) + bytes(data[1:]))
print("clean")
"""


@pytest.mark.skipif(native.lib is None or shutil.which("gcc") is None, reason="no gcc to build the kernels with")
def test_the_kernels_touch_no_memory_that_is_not_theirs(tmp_path: Path) -> None:
    library = tmp_path / "libwire.so"
    flags = ["-g", "-O1", "-std=gnu11", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = sorted((ROOT / "peer" / "native").glob("wire*.c"))
    built = subprocess.run(
        ["gcc", *flags, *map(str, sources), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if built.returncode:
        pytest.skip("this gcc has no sanitizers")
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        # Python keeps memory until it ends, which is no leak of the kernels.
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library), *(str(source.with_suffix(".h")) for source in sources)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("clean\n")
