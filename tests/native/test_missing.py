"""What an installation without the compiled kernels says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = "import sys; sys.modules['peer.native._kernels'] = None; from peer import native; print(native.missing())"


@pytest.mark.parametrize(("wanted", "said"), [("1", "True"), ("0", "False")])
def test_kernels_are_missing_only_where_they_are_wanted(wanted: str, said: str) -> None:
    environment = {"SOTTOVOCE_NATIVE": wanted, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
