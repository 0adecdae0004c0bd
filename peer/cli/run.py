"""`sotto run`: the daemon of one peer."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from peer.cli.app import SottoCommand, raise_log_level
from peer.cli.options import DEFAULT_FILE, config_option, load_peer, set_option
from peer.train.startup import quick_imports


@click.command(cls=SottoCommand)
@config_option
@set_option
def run(config_file: Path | None, settings: tuple[str, ...]) -> int:
    """Run the daemon of one peer in the foreground.

    Without --config it reads ./peer.toml. SIGTERM or Ctrl-C finishes the round, saves the state and closes the
    connections; a second signal stops at once. The exit code is then 130; after the last round and
    after `sotto stop` it is 0. When started again, the peer resumes exactly where it stopped. SIGHUP or
    `sotto reload` makes it read its list of peers again. Under systemd it reports readiness (Type=notify).

    \b
    Examples:
      sotto run
      sotto run --config kits/peer-0/peer.toml
      SOTTO_PEER__LISTEN=0.0.0.0:7800 sotto run -v
    """
    raise_log_level()
    config, base = load_peer(config_file, settings)
    # The code of a task may change the working directory.
    file, base = (config_file or DEFAULT_FILE).absolute(), base.absolute()
    # Also the import below takes long enough for a signal to come.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Imported once the configuration is known to be sound: torch takes most of the time of a start.
    with quick_imports():
        from peer.daemon import process

    return process.run(config, base, lambda: load_peer(file, settings)[0])
