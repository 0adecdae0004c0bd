"""Where the process of a peer begins: it chooses the loop that the algorithm needs, and runs it to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from peer.config import Config
from peer.daemon.base import Daemon
from peer.daemon.frozen_roster import settle
from peer.daemon.pairs import AsynchronousDaemon
from peer.daemon.rounds import SynchronousDaemon
from peer.run_plan import algorithm_spec, refuse_errors, validate_config
from peer.train.threads import use_one_thread

log = logging.getLogger("sotto")


def run(config: Config, base: Path, reread: Callable[[], Config] | None = None) -> int:
    """Run one peer in the foreground until its last round or a signal; return the exit code.

    `base` is the folder that relative paths of the configuration start from; `reread` reads it again, for a peer that
    is told that its file has changed. Raises SottoError.
    """
    for finding in refuse_errors(validate_config(settle(config, base).config, base)):
        log.warning("%s: %s", finding.key, finding.sentence)
    daemon = open_peer(config, base, reread)
    try:
        return asyncio.run(daemon.main())
    finally:
        daemon.close()


def open_peer(config: Config, base: Path, reread: Callable[[], Config] | None = None) -> Daemon:
    """Return the peer of a configuration, with data and checkpoint read. Raises SottoError."""
    # Whoever opens it: a journal is replayed to the same bits only with as many threads.
    use_one_thread()
    return (AsynchronousDaemon if algorithm_spec(config).asynchronous else SynchronousDaemon)(config, base, reread)
