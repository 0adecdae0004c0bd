"""Commands that train: one peer, a cluster on this machine, a simulation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import INTERRUPTED, SottoCommand, StopOnSignal, is_interactive, print_json, raise_log_level
from peer.cli.options import (
    config_option,
    count_peers,
    job_options,
    json_option,
    load_config,
    load_peer,
    peers_option,
    set_option,
)
from peer.errors import ConfigError, DivergenceError

if TYPE_CHECKING:
    from peer.config import Config
    from peer.metrics import Summary

name_option = click.option(
    "--name", metavar="NAME", help="Name of the run folder; by default that of the run, numbered."
)
runs_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="Where run folders lie.",
)
live_option = click.option("--no-live", is_flag=True, help="Print a line now and then instead of the live view.")


@click.command(cls=SottoCommand)
@peers_option
@job_options
@name_option
@runs_option
@live_option
@json_option
def up(
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    name: str | None,
    runs_dir: Path,
    no_live: bool,
    as_json: bool,
) -> int:
    """Train with N real peers on this machine.

    Each peer is a process with its own port, key, data and state folder; they talk over mutual TLS on loopback. The run
    folder then holds the resolved configuration, metrics, the model (safetensors) and report.html. Ctrl-C finishes the
    round and saves; once more stops at once.

    \b
    Examples:
      sotto up
      sotto up --peers 4 --skew 0 --rounds 500
      sotto up --config job.toml --set training.learning_rate=0.05 --name slower
      sotto up --no-live --json > summary.json
    """
    from peer import cluster

    config, base = load_config(config_file, settings)
    count = count_peers(config, num_peers)
    _warn(config, base, count)
    directory = choose_directory(runs_dir, name, config.run.name)
    with StopOnSignal() as stop, _view(no_live) as view:
        summary = cluster.up(
            config, base=base, num_peers=count, directory=directory, on_progress=view.update, stop=stop.event
        )
    return _finish(summary, directory, as_json, interrupted=stop.event.is_set())


@click.command(cls=SottoCommand)
@peers_option
@job_options
@click.option(
    "--rate-kbit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="KBIT/S",
    help="Rate of each link; by default unlimited.",
)
@click.option(
    "--latency-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="MS",
    help="Latency of each link, one way.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="MS",
    help="How long a local step takes on the virtual clock.",
)
@name_option
@runs_option
@click.option("--no-save", is_flag=True, help="Write no run folder; only print the figures.")
@live_option
@json_option
def simulate(
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    rate_kbit: float | None,
    latency_ms: float,
    step_ms: float,
    name: str | None,
    runs_dir: Path,
    no_save: bool,
    no_live: bool,
    as_json: bool,
) -> int:
    """Train with N peers inside this process, on a virtual clock.

    Algorithm, compressor and encoded bytes are those of real peers, and so are the models, bit for bit; only processes,
    sockets and time are simulated. Links have a rate and a latency.

    \b
    Examples:
      sotto simulate --peers 16 --graph exponential
      sotto simulate --rate-kbit 1000 --latency-ms 20
      sotto simulate --peers 100 --rounds 200 --no-save --json
    """
    from peer import simulate as simulator

    config, base = load_config(config_file, settings)
    count = count_peers(config, num_peers)
    _warn(config, base, count)
    directory = None if no_save else choose_directory(runs_dir, name, f"{config.run.name}-simulated")
    with StopOnSignal() as stop, _view(no_live) as view:
        summary = simulator.run(
            config,
            base=base,
            num_peers=count,
            directory=directory,
            on_progress=view.update,
            stop=stop.event,
            rate_kbit=rate_kbit,
            latency_s=latency_ms / 1000,
            step_s=step_ms / 1000,
        )
    return _finish(summary, directory, as_json, interrupted=stop.event.is_set())


@click.command(cls=SottoCommand)
@config_option
@set_option
def run(config_file: Path | None, settings: tuple[str, ...]) -> int:
    """Run one peer in the foreground: the daemon.

    Without --config it reads ./peer.toml. SIGTERM or Ctrl-C finishes the round, saves and says goodbye; a second one
    stops at once. Started again, it goes on where it saved. Under systemd it reports readiness (Type=notify).

    \b
    Examples:
      sotto run
      sotto run --config kits/peer-0/peer.toml
      SOTTO_PEER__LISTEN=0.0.0.0:7800 sotto run -v
    """
    from peer import daemon

    config, base = load_peer(config_file, settings)
    raise_log_level()
    return daemon.run(config, base)


def choose_directory(runs_dir: Path, name: str | None, default: str) -> Path:
    """Return a folder for a new run. Without a name the default is numbered until it is free.

    Raises ConfigError if the named folder already holds something.
    """
    if name is None:
        directory, number = runs_dir / default, 1
        while directory.exists():
            number += 1
            directory = runs_dir / f"{default}-{number}"
        return directory
    if Path(name).name != name or name in {".", ".."}:
        raise ConfigError("is not a plain folder name", key="--name", value=name)
    directory = runs_dir / name
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("holds a run already; choose another --name, or remove it", file=str(directory))
    return directory


def _warn(config: Config, base: Path, num_peers: int) -> None:
    from peer import job

    for finding in job.refuse_errors(job.validate_config(config, base, num_peers)):
        click.secho("sotto: warning: ", fg="yellow", nl=False, err=True)
        click.echo(f"{finding.key}: {finding.sentence}" if finding.key else finding.sentence, err=True)


def _view(no_live: bool) -> Any:
    from peer.report import live

    return live.open_view(live=is_interactive() and not no_live)


def _finish(summary: Summary, directory: Path | None, as_json: bool, *, interrupted: bool) -> int:
    """Write the report, print the figures and return the exit code."""
    report = None
    if directory is not None:
        from peer.report.html import write_report

        report = write_report(directory)
    if as_json:
        places = {"directory": str(directory) if directory else None, "report": str(report) if report else None}
        print_json(asdict(summary) | {"worst_accuracy": summary.worst_accuracy} | places)
    else:
        from rich.console import Console

        from peer.report.summary_table import summary_table

        Console().print(summary_table(summary))
        if report is not None:
            click.echo(f"report: {report}")
    if interrupted:
        return INTERRUPTED
    return DivergenceError.exit_code if summary.ended.startswith("diverged") else 0
