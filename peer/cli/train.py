"""Commands that train: one peer, a cluster on this machine, a simulation."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
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
from peer.errors import ConfigError, DivergenceError, SottoError

if TYPE_CHECKING:
    from peer.config import Config
    from peer.state.metrics import Summary

name_option = click.option(
    "--name",
    metavar="NAME",
    help="Name of the run folder; by default the name of the run, with a number if it is taken.",
)
runs_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="Folder that contains the run folders.",
)
baseline_option = click.option(
    "--no-baseline", is_flag=True, help="Skip the comparison with one process that trains on all data."
)
live_option = click.option("--no-live", is_flag=True, help="Print progress lines instead of the live view.")


@click.command(cls=SottoCommand)
@peers_option
@job_options
@baseline_option
@name_option
@click.option(
    "--resume",
    metavar="NAME",
    help="Resume a run that was stopped or interrupted, from its folder and with its configuration. With --peers N, "
    "peers join or the newest ones leave until there are N.",
)
@runs_option
@live_option
@json_option
def up(
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    no_baseline: bool,
    name: str | None,
    resume: str | None,
    runs_dir: Path,
    no_live: bool,
    as_json: bool,
) -> int:
    """Train with N real peers on this machine.

    Each peer is a process with its own port, key, data and state folder; peers communicate over mutual TLS on loopback.
    The run folder then holds the resolved configuration, the metrics, the model (safetensors) and report.html. Ctrl-C
    finishes the round and saves; a second Ctrl-C stops at once. --resume continues the run.

    \b
    Examples:
      sotto up
      sotto up --peers 4 --skew 0 --rounds 500
      sotto up --config run.toml --set training.learning_rate=0.05 --name slower
      sotto up --resume slower
      sotto up --resume slower --peers 10
      sotto up --no-live --json > summary.json
    """
    if resume is not None:
        directory = find_run_to_resume(runs_dir, resume)
        if config_file is not None or settings or name is not None:
            raise ConfigError(
                "keeps the configuration of the run; omit --config, --set and --name",
                key="--resume",
                valid="alone, or with --peers",
            )
        config, base = load_config(directory / "peers" / "peer-0" / "peer.toml", ())
        count = config.num_listed
    else:
        config, base = load_config(config_file, settings)
        count = count_peers(config, num_peers)
    _warn(config, base, count)
    # Before the folder is made: it takes a while, and Ctrl-C in it should leave nothing behind.
    from peer.ops import local_cluster
    from peer.ops.resize import line_up

    lineup = None if resume is None else line_up(directory / "peers", config, num_peers)
    if resume is None:
        directory = make_directory(runs_dir, name, config.run.name)
    with _report_in_any_case(directory) if resume is None else contextlib.nullcontext():
        if resume is None:
            _draw_graph(config, base, count, directory)
        with StopOnSignal() as stop, _view(no_live) as view:
            summary = local_cluster.up(
                config,
                base,
                num_peers=count,
                directory=directory,
                on_progress=view.update,
                stop=stop.event,
                baseline=not no_baseline,
                lineup=lineup,
            )
    return _finish(summary, directory, as_json, interrupted=stop.event.is_set())


@click.command(cls=SottoCommand)
@peers_option
@job_options
@click.option(
    "--rate-kbit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="KBIT/S",
    help="Rate of each link; unlimited by default.",
)
@click.option(
    "--latency-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="MS",
    help="One-way latency of each link.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="MS",
    help="Duration of a local step on the virtual clock.",
)
@click.option(
    "--slow",
    multiple=True,
    metavar="PEER=FACTOR",
    help="Make the local steps of one peer FACTOR times as long; may be repeated.",
)
@click.option(
    "--stacked", is_flag=True, help="Train all peers as one batch: much faster, with results equal within rounding."
)
@baseline_option
@name_option
@runs_option
@click.option("--no-save", is_flag=True, help="Write no run folder; only print the results.")
@live_option
@json_option
def simulate(
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    rate_kbit: float | None,
    latency_ms: float,
    step_ms: float,
    slow: tuple[str, ...],
    stacked: bool,
    no_baseline: bool,
    name: str | None,
    runs_dir: Path,
    no_save: bool,
    no_live: bool,
    as_json: bool,
) -> int:
    """Simulate training with N peers in one process, on a virtual clock.

    Algorithm, compressor and encoded bytes are those of real peers, and the models are identical to the last bit. Only
    processes, sockets and time are simulated. Links have a rate and a latency.

    \b
    Examples:
      sotto simulate --peers 16 --graph exponential
      sotto simulate --rate-kbit 1000 --latency-ms 20
      sotto simulate --peers 100 --rounds 200 --no-save --json
    """
    config, base = load_config(config_file, settings)
    count = count_peers(config, num_peers)
    slower = dict(_parse_slow(text, count) for text in slow)
    _warn(config, base, count)
    from peer.config_writer import write_resolved
    from peer.simulate import run as simulator
    from peer.simulate.network import LinkModel

    with contextlib.ExitStack() as stack:
        if no_save:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = make_directory(runs_dir, name, f"{config.run.name}-simulated")
            stack.enter_context(_report_in_any_case(directory))
            write_resolved(config, directory / "config.toml")
            _draw_graph(config, base, count, directory)
        stop = stack.enter_context(StopOnSignal())
        view = stack.enter_context(_view(no_live))
        simulation = simulator.run(
            config,
            base,
            num_peers=count,
            directory=directory,
            links=LinkModel(rate_kbit_s=rate_kbit, latency_s=latency_ms / 1000),
            step_s=step_ms / 1000,
            slow=slower,
            stacked=stacked,
            baseline=not no_baseline,
            on_progress=view.update,
            stop=stop.event,
        )
    return _finish(simulation.summary, None if no_save else directory, as_json, interrupted=stop.event.is_set())


@click.command(cls=SottoCommand)
@config_option
@set_option
def run(config_file: Path | None, settings: tuple[str, ...]) -> int:
    """Run the daemon of one peer in the foreground.

    Without --config it reads ./peer.toml. SIGTERM or Ctrl-C finishes the round, saves the state and closes the
    connections; a second signal stops at once. When started again, the peer resumes exactly where it stopped. SIGHUP or
    `sotto reload` makes it read its list of peers again. Under systemd it reports readiness (Type=notify).

    \b
    Examples:
      sotto run
      sotto run --config kits/peer-0/peer.toml
      SOTTO_PEER__LISTEN=0.0.0.0:7800 sotto run -v
    """
    config, base = load_peer(config_file, settings)
    # Imported once the configuration is known to be sound: torch takes most of the time of a start.
    from peer.daemon import process

    raise_log_level()
    return process.run(config, base, lambda: load_peer(config_file, settings)[0])


def make_directory(runs_dir: Path, name: str | None, default: str) -> Path:
    """Create and return an empty folder for a new run. Raises ConfigError if that cannot be done."""
    directory = choose_directory(runs_dir, name, default)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be created: {error.strerror}", file=str(directory)) from None
    return directory


def find_run_to_resume(runs_dir: Path, name: str) -> Path:
    """Return the folder of a run of `sotto up` that has not come to its end. Raises ConfigError if it is none."""
    directory = runs_dir / name
    if not (directory / "peers" / "peer-0" / "peer.toml").is_file():
        raise ConfigError("is not the folder of a run of `sotto up`", key="--resume", file=str(directory))
    if (directory / "model.safetensors").exists():
        raise ConfigError("the run in this folder is already complete", key="--resume", file=str(directory))
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
        raise ConfigError("already contains a run; choose another --name, or delete the folder", file=str(directory))
    return directory


def _warn(config: Config, base: Path, num_peers: int) -> None:
    from peer import run_plan

    for finding in run_plan.refuse_errors(run_plan.validate_config(config, base, num_peers)):
        click.secho("sotto: warning: ", fg="yellow", nl=False, err=True)
        click.echo(f"{finding.key}: {finding.sentence}" if finding.key else finding.sentence, err=True)


def _view(no_live: bool) -> Any:
    from peer.report import live

    return live.open_view(live=is_interactive() and not no_live)


def _draw_graph(config: Config, base: Path, num_peers: int, directory: Path) -> None:
    """Write graph.svg, which the report shows."""
    from peer import run_plan
    from peer.report import graph_view

    drawing = graph_view.svg(run_plan.build_schedule(config, base, num_peers))
    (directory / "graph.svg").write_text(drawing, encoding="utf-8")


@contextlib.contextmanager
def _report_in_any_case(directory: Path) -> Iterator[None]:
    """Write the report of a run that ends with an error too, since it shows what led there; remove the folder of one
    that never began. Where peers were started, their states stay, whatever is missing beside them."""
    from peer.report.html import write_report

    try:
        yield
    except (SottoError, KeyboardInterrupt):
        if (directory / "summary.json").exists():
            with contextlib.suppress(SottoError):  # The run's own error is the one to tell.
                click.echo(f"report: {write_report(directory)}", err=True)
        elif not any(directory.glob("peers/*/log.txt")):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _parse_slow(text: str, num_peers: int) -> tuple[int, float]:
    """Return the peer and its factor of PEER=FACTOR. Raises ConfigError."""
    peer, _, factor = text.partition("=")
    try:
        slow = int(peer), float(factor)
    except ValueError:
        slow = -1, 0.0
    if not (0 <= slow[0] < num_peers and 0 < slow[1] < 1e6):
        valid = f"PEER=FACTOR with a peer from 0 to {num_peers - 1} and a factor above 0"
        raise ConfigError("is not valid", key="--slow", value=text, valid=valid)
    return slow


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
