"""Shared parts of `sotto up` and `sotto simulate`: the run folder, warnings before, progress during, the figures
after."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.cli.app import is_interactive, print_json
from peer.cli.options import RUNS
from peer.errors import INTERRUPTED, ConfigError, DivergenceError, SottoError, StateError
from peer.files import open_own, write_whole
from peer.terminal import command

if TYPE_CHECKING:
    from peer.config.options import Config
    from peer.records import Progress
    from peer.state.metrics import Summary

_TRACKERS_S = 60.0
"""Time that trackers may take after the run to write the rest."""

name_option = click.option(
    "--name",
    metavar="NAME",
    help="Name of the run folder; by default the name of the run, with a number if it is taken.",
)
runs_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=RUNS,
    metavar="DIR",
    help="Folder that contains the run folders.",
)
baseline_option = click.option(
    "--no-baseline", is_flag=True, help="Skip the comparison with one process that trains on all data."
)
track_option = click.option(
    "--track",
    "trackers",
    multiple=True,
    type=click.Choice(["tensorboard", "wandb", "mlflow", "trackio"]),
    help="Hand the figures to an experiment tracker while the run goes on, see `sotto lab track`; may be repeated.",
)


def view_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that choose how the progress of a run is shown, as an argument `view`."""
    for name, value, text in (
        ("--quiet", "none", "Print warnings and the figures at the end alone."),
        ("--no-live", "lines", "Print progress lines instead of the live view."),
    ):
        command = click.option(name, "view", flag_value=value, help=text)(command)
    return command


def make_directory(runs_dir: Path, name: str | None, default: str) -> Path:
    """Create and return an empty folder for a new run. Raises ConfigError if that cannot be done."""
    directory = choose_directory(runs_dir, name, default)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be created: {error.strerror}", file=str(directory)) from None
    return directory


def choose_directory(runs_dir: Path, name: str | None, default: str) -> Path:
    """Return where a new run goes. Without a name the default is numbered until it is free.

    Raises ConfigError if the named folder already holds something.
    """
    if name is None:
        directory, number = runs_dir / default, 1
        while directory.exists():
            number += 1
            directory = runs_dir / f"{default}-{number}"
        return directory
    if Path(name).name != name or name in {".", ".."}:
        raise ConfigError("must be a folder name without a path", key="--name", value=name)
    directory = runs_dir / name
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        goes_on = "" if (resumes := resuming(directory)) is None else f" go on with it by `{resumes}`,"
        problem = f"already contains a run;{goes_on} choose another --name, or delete the folder"
        raise ConfigError(problem, file=str(directory))
    return directory


def resuming(directory: Path) -> str | None:
    """Return the command that resumes a run of `sotto up`; None if it never began or is complete."""
    if not any(directory.glob("peers/*/log.txt")) or is_complete(directory):
        return None
    where = ["--runs-dir", directory.parent] if directory.parent != RUNS else []
    return command("up", "--resume", directory.name, *where)


def is_complete(directory: Path) -> bool:
    """Return whether a run of `sotto up` has come to its end."""
    from peer.state.metrics import Summary

    if (directory / "model.safetensors").exists():
        return True
    with contextlib.suppress(OSError, StateError):
        return Summary.load(directory / "summary.json").ended == "completed"
    return False


def command_line() -> str:
    """Return the command that runs now, as one would type it."""
    return shlex.join(["sotto", *click.get_current_context().find_root().meta["peer.arguments"]])


def warn(config: Config, base: Path, num_peers: int) -> None:
    """Print the warnings of a configuration for peers that all run here. Raises ConfigError if it has errors."""
    from peer.run import plan as run_plan

    run_plan.refuse_own_data(config)
    for finding in run_plan.refuse_errors(run_plan.validate_config(config, base, num_peers)):
        click.secho("sotto: warning: ", fg="yellow", nl=False, err=True)
        click.echo(f"{finding.key}: {finding.sentence}" if finding.key else finding.sentence, err=True)


def show_nothing(progress: Progress) -> None:
    """Keep quiet."""


@contextlib.contextmanager
def open_view(chosen: str | None, config: Config) -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a run, with the time since now: live where a person watches, otherwise in lines, or as
    `view_options` says. The context is the function that shows it."""
    from peer.records import Progress
    from peer.report import live

    if chosen == "none":
        yield show_nothing
        return
    began, first, counted = time.monotonic(), -1, (0, 0.0)

    def show(progress: Progress) -> None:
        nonlocal first, counted
        elapsed_s = time.monotonic() - began
        if progress.peers:
            first = progress.round if first < 0 else first
            if not counted[0] and progress.round > first:
                counted = progress.round, elapsed_s
        view(replace(progress, elapsed_s=elapsed_s, begun_at_round=counted[0], begun_at_s=counted[1]))

    with live.open_view(live=is_interactive() and chosen is None) as view:
        # The next step imports libraries and reads data, which takes seconds.
        show(Progress(phase="preparing", rounds=config.run.rounds, elapsed_s=0.0))
        yield show


@contextlib.contextmanager
def trackers_beside(kinds: Sequence[str], directory: Path) -> Iterator[None]:
    """Hand the figures of a run to trackers while this context lasts: in a process of its own, so that nothing that
    goes wrong there ends the run. Raises ConfigError if a package is missing."""
    from peer.trackers.kinds import require

    for kind in kinds:
        require(kind)
    if not kinds:
        yield
        return
    following = _track(kinds, directory, "--follow")
    try:
        yield
    finally:
        following.terminate()
        code = _end_of(following)
        if code in (-signal.SIGTERM, INTERRUPTED):
            # The run was over before it had begun to follow.
            code = _end_of(_track(kinds, directory))
        if code:
            click.secho("sotto: warning: ", fg="yellow", nl=False, err=True)
            click.echo(f"not everything was handed to {', '.join(kinds)}: see {directory / 'trackers.log'}", err=True)


def _track(kinds: Sequence[str], directory: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start to hand the figures of a run to trackers."""
    chosen = [word for kind in kinds for word in ("--to", kind)]
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with os.fdopen(open_own(directory / "trackers.log", flags), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "peer", "track", str(directory), *options, *chosen],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "SOTTO_PARENT": str(os.getpid())},
            # Ctrl-C comes here first, and what the last rounds leave is handed over too.
            start_new_session=True,
        )


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of trackers, which have only so long to write the rest."""
    try:
        return process.wait(_TRACKERS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def with_live_page(show: Callable[[Progress], None], directory: Path) -> Callable[[Progress], None]:
    """Return `show`, which now also prints the command for the live page once the run is prepared, unless it keeps
    quiet."""
    said = show is show_nothing

    def show_and_say(progress: Progress) -> None:
        nonlocal said
        if not said and progress.phase != "preparing":
            said = True
            # Not click, which finds the stream below the live view and writes into its lines.
            print(f"live page: {command('watch', directory)}", file=sys.stderr)
        show(progress)

    return show_and_say


def draw_graph(config: Config, base: Path, num_peers: int, directory: Path) -> None:
    """Write graph.svg, which the report shows."""
    from peer.report import graph_view
    from peer.run import plan as run_plan

    drawing = graph_view.svg(run_plan.build_schedule(config, base, num_peers))
    write_whole(directory / "graph.svg", drawing)


@contextlib.contextmanager
def report_in_any_case(directory: Path) -> Iterator[None]:
    """Write the report of a run that ends with an error too, since it shows what led there; remove the folder of one
    that never began. If peers were started, their states stay, even if files beside them are missing."""
    try:
        yield
    except (SottoError, KeyboardInterrupt):
        if (directory / "summary.json").exists():
            from peer.report.run_page import write_report

            with contextlib.suppress(SottoError):  # The run's own error is the one to tell.
                click.echo(f"report: {write_report(directory)}", err=True)
        elif not any(directory.glob("peers/*/log.txt")):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def finish(summary: Summary, directory: Path | None, as_json: bool, *, interrupted: bool) -> int:
    """Write the report, print the figures and return the exit code."""
    report = None
    if directory is not None:
        from peer.report.run_page import write_report

        report = write_report(directory)
    if as_json:
        places = {"directory": str(directory) if directory else None, "report": str(report) if report else None}
        print_json(summary.document() | places)
    else:
        from rich.console import Console

        from peer.report.summary_table import summary_table

        Console().print(summary_table(summary))
        if report is not None and directory is not None:
            click.echo(f"report: {report}")
            if (model := directory / "model.safetensors").exists():
                click.echo(f"model:  {model}\nnext:   {command('export', directory)}")
    if interrupted:
        return INTERRUPTED
    return DivergenceError.exit_code if summary.ended.startswith("diverged") else 0
