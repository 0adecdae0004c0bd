"""The build of the kernels, with a project of two small sources in their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"
BUILD = """
from cffi import FFI

ffibuilder = FFI()
ffibuilder.cdef("int one(void); int two(void);")
ffibuilder.set_source(
    "peer.native._kernels", "int one(void); int two(void);", optional=True,
    sources=["peer/native/one.c", "peer/native/two.c"],
)
"""

pytest.importorskip("setuptools")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """The folder of two sources, which are older than whatever is built of them."""
    shutil.copy(SETUP, tmp_path)
    native = tmp_path / "peer" / "native"
    native.mkdir(parents=True)
    (native.parent / "__init__.py").touch()
    (native / "__init__.py").touch()
    (native / "build.py").write_text(BUILD)
    for name, value in (("one", 1), ("two", 2)):
        (native / f"{name}.c").write_text(f"int {name}(void) {{ return {value}; }}\n")
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    return native


@pytest.fixture
def install(tmp_path: Path, native: Path) -> Callable[[], Path | None]:
    """Build what an editable installation needs; return the kernels, if there are any."""

    def install() -> Path | None:
        order = [sys.executable, "setup.py", "-q", "editable_wheel", "-d", "dist"]
        done = subprocess.run(order, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return next(native.glob("_kernels*.so"), None)

    return install


def _call(kernels: Path, name: str) -> int:
    script = f"from peer.native._kernels import lib; print(lib.{name}())"
    return int(subprocess.check_output([sys.executable, "-c", script], cwd=kernels.parents[2]))


def test_an_editable_installation_compiles_again_only_where_a_source_changed(
    native: Path, install: Callable[[], Path | None]
) -> None:
    kernels = install()
    assert kernels is not None
    built = kernels.stat().st_mtime_ns
    assert (_call(kernels, "one"), _call(kernels, "two")) == (1, 2)
    install()
    assert kernels.stat().st_mtime_ns == built
    (native / "two.c").write_text("int two(void) { return 3; }\n")
    install()
    assert _call(kernels, "two") == 3


def test_kernels_of_another_machine_are_compiled_again(native: Path, install: Callable[[], Path | None]) -> None:
    kernels = install()
    assert kernels is not None
    kernels.write_bytes(b"\x7fELF of another machine")
    install()
    assert _call(kernels, "one") == 1


def test_a_source_that_does_not_compile_leaves_the_rest_installed(
    native: Path, install: Callable[[], Path | None]
) -> None:
    (native / "two.c").write_text("int two(void) { return }\n")
    assert install() is None
