"""Which kernels run can be chosen for tests, and is said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from peer.native import available, tier

CODE = "from peer import native; print(native.tier())"

pytestmark = pytest.mark.skipif(not available(), reason="the native kernels were not built")


def with_kernels_for(name: str) -> subprocess.CompletedProcess[str]:
    environment = {"SOTTOVOCE_NATIVE": name, "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


def test_a_tier_is_chosen_by_its_name() -> None:
    assert with_kernels_for(tier()).stdout.strip() == tier()


def test_the_portable_kernels_run_everywhere() -> None:
    assert with_kernels_for("portable").stdout.strip() == "portable"


def test_a_tier_of_another_processor_is_refused() -> None:
    missing = "AVX2" if tier().startswith("NEON") else "NEON with i8mm"
    done, best = with_kernels_for(missing), with_kernels_for("1").stdout.strip()
    assert done.returncode != 0
    assert f"SOTTOVOCE_NATIVE: this processor cannot run these kernels; its best are those for {best}" in done.stderr


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    done = with_kernels_for("avx9")
    assert done.returncode != 0
    assert (
        "there are no such kernels (got 'avx9'); valid: 0 (without the kernels), 1 (the best), portable" in done.stderr
    )
