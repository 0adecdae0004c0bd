"""`sotto run`: the peer of one device, which trains a task or runs a training script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.cli.app import SottoCommand, raise_log_level
from peer.cli.options import config_option, load_peer, own_file, script_options, set_option
from peer.library.script import Script, log_failure, named_script
from peer.terminal import STARTING_S, telling
from peer.train.startup import load_postponed, quick_imports

if TYPE_CHECKING:
    from peer.config.options import Config


@click.command(cls=SottoCommand)
@script_options
@config_option
@set_option
@click.option("--deal", is_flag=True, hidden=True, help="Let sottovoce.local deal the data set of the script out.")
def run(
    words: tuple[str, ...], module: str | None, config_file: Path | None, settings: tuple[str, ...], deal: bool
) -> int:
    """Run one peer in the foreground: its daemon, or a training script that joins the run.

    Without --config it reads ./peer.toml, or that of the only device in the folders here. SIGTERM or Ctrl-C finishes
    the round, saves the state and closes the connections; a second signal stops at once. The exit code is then 130;
    after the last round and after `sotto stop` it is 0. When started again, the peer resumes exactly where it stopped.
    SIGHUP or `sotto admin reload` makes it read its list of peers again. Under systemd it reports readiness
    (Type=notify).

    A SCRIPT calls `sottovoce.join`, which then needs no configuration. {peer} in its arguments becomes the name of this
    peer. A signal ends it as Ctrl-C does.

    \b
    Examples:
      sotto run
      sotto run --config kits/peer-0/peer.toml
      sotto run train.py
      sotto run train.py -- --lr 0.1 --out {peer}.safetensors
      SOTTO_PEER__LISTEN=0.0.0.0:7800 sotto run -v
    """
    raise_log_level()
    if (script := named_script(words, module)) is not None:
        script.refuse_missing()
    config_file = config_file or own_file()
    config, base = load_peer(config_file, settings, script)
    # The code of a task may change the working directory.
    file, base = config_file.absolute(), base.absolute()
    if script is not None:
        return _run_script(script, config, file, settings, base, deal=deal)
    # Imported once the configuration is known to be sound: torch takes most of the time of a start.
    with quick_imports(), telling(lambda: "loads its libraries", every_s=STARTING_S):
        from peer.daemon import process
        from peer.train.memory import keep_freed

    keep_freed()
    return process.run(config, base, lambda: load_peer(file, settings)[0])


def _run_script(
    script: Script, config: Config, file: Path, settings: tuple[str, ...], base: Path, *, deal: bool
) -> int:
    """Run a script that finds its place by itself; return the exit code. `base`: folder that relative paths start from.
    Raises TaskError for an error of the script, and UsageError for one that did not join."""
    from peer.config.options import ENVIRONMENT_PREFIX
    from peer.errors import TaskError, UsageError

    with telling(lambda: "loads its libraries", every_s=STARTING_S):
        import numpy as np

        from peer.library.here import DEALS, FILE
        from peer.library.random_state import draw_alike
        from peer.train.memory import keep_freed
        from peer.train.own_task import UserCode

        # The process that peers are forked from has left some of it out.
        load_postponed()

    os.environ[FILE] = str(file)
    if deal:
        os.environ[DEALS] = "1"
    for setting in settings:
        key, _, value = setting.partition("=")
        os.environ[ENVIRONMENT_PREFIX + key.strip().upper().replace(".", "__")] = value.strip()
    # Others than in processes that were forked from the same one.
    np.random.seed()
    keep_freed()
    sys.path.insert(0, str(script.folder))
    try:
        with UserCode("__main__", "script").runs():
            # First: a package of which the script is a part may set a seed when it is read.
            draw_alike(config.run.seed)
            program = script.program(config.own.name)
            with program.is_main():
                program.run()
    except TaskError as error:
        log_failure(error)
        raise
    if not (base / config.state.directory).exists():
        raise UsageError(f"{script.name} came to its end and has not called sottovoce.join, so no peer has trained")
    return 0
