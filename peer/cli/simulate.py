"""`sotto simulate`: many peers in one process, on a virtual clock."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli import training_run
from peer.cli.app import SottoCommand, StopOnSignal
from peer.cli.options import count_peers, job_options, json_option, load_config, peers_option, script_options
from peer.errors import ConfigError
from peer.library.script import Script, log_failure, named_script

if TYPE_CHECKING:
    from peer.config.options import Config
    from peer.state.metrics import Summary


@click.command(cls=SottoCommand)
@script_options
@peers_option
@job_options
@click.option(
    "--rate-kbit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="KBIT/S",
    help="Rate of each link; unlimited by default.",
)
@click.option(
    "--latency-ms", type=click.FloatRange(min=0), default=0.0, metavar="MS", help="One-way latency of each link."
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=10.0,
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
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Let N processes compute; the results do not depend on N.",
)
@training_run.baseline_option
@training_run.name_option
@training_run.runs_option
@click.option("--no-save", is_flag=True, help="Write no run folder; only print the results.")
@training_run.track_option
@training_run.view_options
@json_option
def simulate(
    words: tuple[str, ...],
    module: str | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    rate_kbit: float | None,
    latency_ms: float,
    step_ms: float,
    slow: tuple[str, ...],
    stacked: bool,
    workers: int,
    no_baseline: bool,
    name: str | None,
    runs_dir: Path,
    no_save: bool,
    trackers: tuple[str, ...],
    view: str | None,
    as_json: bool,
) -> int:
    """Simulate training with N peers in one process, on a virtual clock.

    Algorithm, compressor and encoded bytes are those of real peers, and the models are identical to the last bit. Only
    processes, sockets and time are simulated. Links have a rate and a latency.

    A SCRIPT runs once for each peer, in threads that take turns; what it prints is in runs/NAME/logs. --step-ms is then
    the time of all its steps in a round.

    \b
    Examples:
      sotto simulate --peers 16 --graph exponential
      sotto simulate --rate-kbit 1000 --latency-ms 20
      sotto simulate --peers 100 --rounds 200 --no-save --json
      sotto simulate --peers 1000 --stacked --workers 4
      sotto simulate train.py --peers 3 -- --lr 0.1
    """
    script = named_script(words, module)
    if script is not None and (stacked or workers > 1):
        option = "--stacked" if stacked else "--workers"
        raise ConfigError("cannot be used with a script, whose peers take turns", key=option)
    config, base = load_config(config_file, settings, script, num_peers)
    count = count_peers(config, num_peers)
    slower = dict(_parse_slow(text, count) for text in slow)
    with contextlib.ExitStack() as stack:
        if no_save:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = training_run.make_directory(runs_dir, name, f"{config.run.name}-simulated")
            stack.enter_context(training_run.report_in_any_case(directory))
        show = stack.enter_context(training_run.open_view(view, config))
        training_run.warn(config, base, count)
        from peer.config.writer import write_resolved
        from peer.simulate import run as simulator
        from peer.simulate.network import LinkModel

        if not no_save:
            show = training_run.with_live_page(show, directory)
            write_resolved(config, directory / "config.toml", base)
            training_run.draw_graph(config, base, count, directory)
        stop = stack.enter_context(StopOnSignal())
        stack.enter_context(training_run.trackers_beside(trackers, directory))
        options: dict[str, Any] = {
            "num_peers": count,
            "directory": directory,
            "links": LinkModel(rate_kbit_s=rate_kbit, latency_s=latency_ms / 1000),
            "step_s": step_ms / 1000,
            "slow": slower,
            "on_progress": show,
            "stop": stop.event,
            "command": training_run.command_line(),
        }
        if script is not None:
            summary = _simulate_script(config, base, script, **options)
        else:
            summary = simulator.run(
                config, base, stacked=stacked, workers=workers, baseline=not no_baseline, **options
            ).summary
    return training_run.finish(summary, None if no_save else directory, as_json, interrupted=stop.event.is_set())


def _simulate_script(config: Config, base: Path, script: Script, **options: Any) -> Summary:
    """Simulate a script; return the summary of the run. Raises TaskError for an error of the script, whose traceback it
    has logged."""
    from peer.errors import TaskError
    from peer.library.simulation import simulate_programs

    try:
        return simulate_programs(config, base, script, **options)
    except TaskError as error:
        log_failure(error)
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
