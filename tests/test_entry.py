"""The first moments of `sotto`."""

from __future__ import annotations

import signal
import subprocess
import sys

INTERRUPT_AT_IMPORT = """
import os, signal, sys

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == "peer.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Impatient())
from peer.entry import main
main()
"""


def test_ctrl_c_while_modules_are_imported_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPT_AT_IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


def test_after_that_it_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "peer", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sotto ")
