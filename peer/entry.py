"""Where the command `sotto` begins: before anything that takes time to import."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line and exit."""
    # Ctrl-C in the moment before the command line can deal with it just ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from peer.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
