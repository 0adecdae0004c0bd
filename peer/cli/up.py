"""`sotto up`: real peers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from peer.cli import training_run
from peer.cli.app import SottoCommand, StopOnSignal, debug_wanted
from peer.cli.options import count_peers, job_options, json_option, load_config, peers_option, script_options
from peer.errors import INTERRUPTED, ConfigError
from peer.files import write_whole
from peer.library.script import Script, named_script
from peer.train.startup import quick_imports

_SCRIPT = "script.json"
"""File of a run's folder that says which script it runs."""


@dataclass(frozen=True)
class _Call:
    """Content of that file."""

    script: Script
    folder: str
    """In which it was started."""


@click.command(cls=SottoCommand)
@script_options
@peers_option
@job_options
@training_run.baseline_option
@training_run.name_option
@click.option(
    "--resume",
    metavar="NAME",
    help="Resume a run that was stopped or interrupted, from its folder and with its configuration. With --peers N, "
    "peers join or the newest ones leave until there are N.",
)
@training_run.runs_option
@training_run.track_option
@training_run.view_options
@json_option
def up(
    words: tuple[str, ...],
    module: str | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    no_baseline: bool,
    name: str | None,
    resume: str | None,
    runs_dir: Path,
    trackers: tuple[str, ...],
    view: str | None,
    as_json: bool,
) -> int:
    """Train with N real peers on this machine.

    Each peer is a process with its own port, key, data and state folder; peers communicate over mutual TLS on loopback.
    The run folder then holds the resolved configuration, the metrics, the model (safetensors) and report.html. Ctrl-C
    finishes the round and saves; a second Ctrl-C stops at once. --resume continues the run.

    With a SCRIPT that calls `sottovoce.join`, each peer runs that; what it prints is in runs/NAME/peers/PEER/log.txt.
    {peer} in its arguments becomes the name of the peer.

    \b
    Examples:
      sotto up
      sotto up train.py --peers 3
      sotto up train.py --peers 3 -- --lr 0.1 --out {peer}.safetensors
      sotto up --peers 4 --skew 0 --rounds 500
      sotto up --config run.toml --set training.learning_rate=0.05 --name slower
      sotto up --resume slower
      sotto up --resume slower --peers 10
      sotto up --no-live --json > summary.json
    """
    script = named_script(words, module)
    if resume is not None:
        directory = find_run_to_resume(runs_dir, resume)
        if config_file is not None or settings or name is not None or script is not None:
            raise ConfigError(
                "keeps the configuration of the run; omit --config, --set, --name and the script",
                key="--resume",
                valid="alone, or with --peers",
            )
        script, folder = recorded_script(directory)
        if folder != Path.cwd():
            directory, runs_dir = directory.absolute(), runs_dir.absolute()
            os.chdir(folder)
        wait_for_peers_that_stop(directory)
        config, base = load_config(directory / "peers" / "peer-0" / "peer.toml", ())
        count = config.num_listed
    else:
        config, base = load_config(config_file, settings, script, num_peers)
        count = count_peers(config, num_peers)
        directory = training_run.choose_directory(runs_dir, name, config.run.name)
    from peer.ops.peer_processes import ForkServer

    with (
        resume_command_at_interrupt(directory),
        training_run.report_in_any_case(directory) if resume is None else contextlib.nullcontext(),
        # It imports the libraries of the peers while this process imports those that it needs itself.
        contextlib.closing(ForkServer()) as fork_server,
        training_run.open_view(view, config) as show,
    ):
        training_run.warn(config, base, count)
        with quick_imports():
            from peer.ops import local_cluster
        from peer.ops.resize import line_up

        lineup = None if resume is None else line_up(directory / "peers", config, num_peers)
        if resume is None:
            directory = training_run.make_directory(runs_dir, name, config.run.name)
            training_run.draw_graph(config, base, count, directory)
            if script is not None:
                record_script(script, directory)
        with StopOnSignal() as stop, training_run.trackers_beside(trackers, directory):
            cluster = local_cluster.Cluster(
                config,
                base,
                num_peers=count,
                directory=directory,
                lineup=lineup,
                fork_server=fork_server,
                debug=debug_wanted(),
                script=() if script is None else script.words,
            )
            summary = local_cluster.up(
                cluster,
                on_progress=training_run.with_live_page(show, directory),
                stop=stop.event,
                baseline=not no_baseline,
                command=training_run.command_line(),
            )
    code = training_run.finish(summary, directory, as_json, interrupted=stop.event.is_set())
    if code == INTERRUPTED:
        say_how_to_resume(directory)
    return code


@contextlib.contextmanager
def resume_command_at_interrupt(directory: Path) -> Iterator[None]:
    """Print the command that resumes a run when Ctrl-C ends this context."""
    try:
        yield
    except KeyboardInterrupt:
        say_how_to_resume(directory)
        raise


def say_how_to_resume(directory: Path) -> None:
    """Print the command that resumes a run, unless it never began or is complete."""
    if (resumes := training_run.resuming(directory)) is not None:
        click.echo(f"resume with: {resumes}", err=True)


def record_script(script: Script, directory: Path) -> None:
    """Write into the folder of a run which script it runs, and from where."""
    call = _Call(script, os.getcwd())
    write_whole(directory / _SCRIPT, json.dumps(asdict(call), indent=2) + "\n")


def recorded_script(directory: Path) -> tuple[Script | None, Path]:
    """Return the script of a run, if it has one, and the folder that it was started from. Raises StateError for a file
    that `record_script` did not write, and ConfigError where that folder is gone."""
    from peer.state.foreign_files import read_as

    file = directory / _SCRIPT
    if not file.exists():
        return None, Path.cwd()
    call = read_as(_Call, file)
    if not Path(call.folder).is_dir():
        raise ConfigError("the folder that this run was started from is gone", key="--resume", value=call.folder)
    return call.script, Path(call.folder)


def wait_for_peers_that_stop(directory: Path, timeout_s: float = 15.0) -> None:
    """Wait while peers of the run are at work: those of a killed `sotto up` finish their round first, and have their
    folders until then. Peers that stay refuse the new ones."""
    from peer.state.checkpoints import is_in_use

    deadline = time.monotonic() + timeout_s
    while any(map(is_in_use, directory.glob("peers/peer-*/state"))) and time.monotonic() < deadline:
        time.sleep(0.05)


def find_run_to_resume(runs_dir: Path, name: str) -> Path:
    """Return the folder of a run of `sotto up` that has not come to its end. Raises ConfigError if it is none."""
    directory = runs_dir / name
    if not (directory / "peers" / "peer-0" / "peer.toml").is_file():
        raise ConfigError("is not the folder of a run of `sotto up`", key="--resume", file=str(directory))
    if training_run.is_complete(directory):
        raise ConfigError("the run in this folder is already complete", key="--resume", file=str(directory))
    return directory
