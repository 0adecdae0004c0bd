"""The first moments of `sotto`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPT_AT_IMPORT = """
import os, signal, sys

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == %r:
            os.kill(os.getpid(), %d)

sys.meta_path.insert(0, Impatient())
sys.argv[1:] = ["up", "--no-live"]
from peer.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("number", "module", "ends"),
    [
        (signal.SIGINT, "peer.cli", (-signal.SIGINT, "")),
        (signal.SIGINT, "peer.ops.local_cluster", (130, "sotto: interrupted\n")),
        (signal.SIGTERM, "peer.ops.local_cluster", (130, "sotto: interrupted\n")),
    ],
)
def test_a_signal_while_modules_are_imported_prints_no_traceback(
    number: signal.Signals, module: str, ends: tuple[int, str], tmp_path: Path
) -> None:
    script = INTERRUPT_AT_IMPORT % (module, number)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr[-len(ends[1]) :] if ends[1] else done.stderr) == ends
    assert "Traceback" not in done.stderr


def test_a_terminal_without_our_characters_shows_others() -> None:
    """As with LANG=de_DE, whose encoding has no arrow and no dash."""
    command = [sys.executable, "-m", "peer", "lab", "list", "graphs"]
    plain, whole = (
        subprocess.run(command, capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": encoding})
        for encoding in ("latin-1", "utf-8")
    )
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert any(ord(each) > 255 for each in whole.stdout.decode()), "this output would not show the fault"
    assert len(plain.stdout.decode("latin-1").splitlines()) == len(whole.stdout.decode().splitlines())


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_no_file_gets_the_number_of_a_closed_stream(closed: int) -> None:
    """The number is free until something is opened, and what is printed then goes there."""
    script = (
        "import os, sys; from peer.__main__ import _open_streams; _open_streams();"
        " sys.stdout.write('x'); sys.stderr.write('y'); sys.stdout.flush();"
        " sys.exit(os.open('/dev/null', os.O_RDONLY) <= 2 or None in (sys.stdin, sys.stdout, sys.stderr))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        preexec_fn=lambda: os.close(closed),
    )
    assert done.returncode == 0
    assert (done.stdout, done.stderr) == (b"" if closed == 1 else b"x", b"" if closed == 2 else b"y")


def test_after_that_it_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "peer", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sotto ")


NUMBER_OF_THREADS = """
import hashlib, sys
import peer.cli

def run():
    import numpy as np
    vector = np.random.default_rng(0).normal(size=1_000_000)
    print(np.dot(vector, vector).hex())

peer.cli.main = run
from peer.__main__ import main
main()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core computes in one thread anyway")
def test_numpy_computes_in_one_thread() -> None:
    """A sum that several threads share has other bits, and a journal is repeated to the bit."""
    without = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    one, two, unset = (
        subprocess.run([sys.executable, "-c", NUMBER_OF_THREADS], capture_output=True, text=True, check=True, env=env)
        for env in ({**without, "OPENBLAS_NUM_THREADS": "1"}, {**without, "OPENBLAS_NUM_THREADS": "2"}, without)
    )
    if one.stdout == two.stdout:
        pytest.skip("this NumPy sums alike in one thread and in two")
    assert unset.stdout == one.stdout
