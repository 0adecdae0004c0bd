"""Programs of others that need packages of their own."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools import rivals
from tools.rivals.decentralizepy_choco import decode_places, encode_places


@pytest.mark.parametrize("places", [[0, 1], [5, 6, 7, 300, 100_000], list(range(3, 5000, 7))])
def test_places_come_back_from_gamma_codes(places: list[int]) -> None:
    codes = encode_places(np.array(places))
    assert decode_places(codes).tolist() == places
    # A gap of b bits takes 2 b − 1; the first place and the number of bits take 16 bytes.
    bits = sum(2 * (after - before).bit_length() - 1 for before, after in itertools.pairwise(places))
    assert codes.size == (bits + 7) // 8 + 16


@pytest.mark.parametrize(
    ("program", "package"), [("hivemind_averaging", "hivemind"), ("decentralizepy_choco", "fpzip")]
)
@pytest.mark.usefixtures("warm_python")
def test_a_rival_whose_package_is_missing_says_what_to_install(program: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    file = Path(rivals.__file__).with_name(f"{program}.py")
    done = subprocess.run([sys.executable, str(file), "{}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install --target" in done.stderr.splitlines()[-1]
