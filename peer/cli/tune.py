"""The command that finds η and γ for a configuration, and shows where training collapses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, StopOnSignal, print_json
from peer.cli.options import computing_options, job_options, json_option, load_job, peers_option
from peer.errors import INTERRUPTED, ConfigError
from peer.records import ACCURACY, Criterion

if TYPE_CHECKING:
    from rich.table import Table

    from peer.ops.executors import Kind
    from peer.ops.tune import Trial, Tuning


@click.command(cls=SottoCommand)
@peers_option
@job_options
@click.option(
    "--trials",
    type=click.IntRange(min=3),
    default=40,
    metavar="N",
    help="Simulate at most this many runs; those of the first search are much shorter than the configured one.",
)
@click.option(
    "--budget-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    metavar="S",
    help="Time to use: runs are shortened where it is short, and repeated with other seeds where some is left.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Write both rates into the --config file, unless they are of no use; its comments are kept.",
)
@computing_options
@json_option
def tune(
    config_file: Path | None,
    settings: tuple[str, ...],
    num_peers: int | None,
    trials: int,
    budget_seconds: float,
    write: bool,
    workers: int,
    executor: Kind,
    address: str | None,
    as_json: bool,
) -> int:
    """Find a good averaging rate η and learning rate γ for a configuration.

    Simulates the run with rates around the configured ones: many short runs, then fewer and longer ones, the last of
    them in full length. Results are ranked by the accuracy of the worst peer, or by the first metric of your own task,
    then by consensus distance. With strong compression, accuracy rises with both rates up to a cliff, beyond which
    models collapse or diverge. The table shows the cliff, and the chosen rates stay one step away from it. What is left
    of trials and time goes into longer runs of the best points and into repetitions with other seeds. The last lines
    say how far the result can be trusted, and whether the worst peer learned enough to be of use: at least 80 % of what
    one process with all data gains over guessing. Runs are repeatable; how many there are depends on --trials and on
    the time that they take. With several --workers, runs that do not depend on each other go side by side.

    \b
    Examples:
      sotto lab tune --config run.toml --write
      sotto lab tune --algorithm choco-sgd --graph ring --skew 0.8
      sotto lab tune --rounds 300 --trials 20 --budget-seconds 60 --json
      sotto lab tune --config run.toml --workers 4
    """
    config, base, count = load_job(config_file, settings, num_peers)
    if write and config_file is None:
        raise ConfigError("needs a file to write to; add --config FILE", key="--write")
    from peer.ops import tune as tuner
    from peer.ops.executors import open_executor

    def report(trial: Trial, number: int) -> None:
        click.echo(f"trial {number:>3}  {_sentence(trial)}", err=True)

    is_alone = executor == "local" and workers == 1
    with StopOnSignal() as stop, open_executor(executor, workers=workers, address=address) as computing:
        found = tuner.tune(
            config,
            base,
            num_peers=count,
            trials=trials,
            budget_s=budget_seconds,
            on_trial=report,
            stop=stop.event,
            computing=None if is_alone else computing,
        )
    written = None
    if write and config_file is not None and found.ended != "stopped" and found.is_useful is not False:
        tuner.write(config_file, found)
        written = str(config_file)
    if as_json:
        print_json(_document(found) | {"written": written})
    else:
        _print(found, written, asked_to_write=write)
    return INTERRUPTED if found.ended == "stopped" else 0


def _document(found: Tuning) -> dict[str, Any]:
    best = found.best
    return {
        **_rates(found, best),
        "safe": found.safe,
        "worst_accuracy": best.worst_accuracy,
        "averaged_accuracy": best.averaged_accuracy,
        "criterion": found.criterion.name,
        "worst_figure": best.worst_figure,
        "averaged_figure": best.averaged_figure,
        "consensus_distance": best.consensus_distance,
        "seeds": list(found.repeats),
        "confidence": _confidence(found),
        "useful": found.is_useful,
        "guessing": found.guessing,
        "single_process_accuracy": found.single_process_accuracy,
        "single_process_figure": found.single_process_figure,
        "next_best": found.next_best and {**_rates(found, found.next_best), "seeds": list(found.next_best_repeats)},
        "rounds": best.rounds,
        "shortened": found.shortened,
        "ended": found.ended,
        "seconds": found.seconds,
        "trials": [asdict(trial) | {"over_the_cliff": found.over_the_cliff(trial)} for trial in found.trials],
    }


def _rates(found: Tuning, trial: Trial) -> dict[str, Any]:
    eta = trial.averaging_rate if found.averages else None
    return {"averaging_rate": eta, "learning_rate": trial.learning_rate}


def _confidence(found: Tuning) -> str:
    """Return how far the chosen point can be trusted, in a sentence."""
    from peer.report.numbers import figure

    seeds, criterion = found.repeats, found.criterion
    if len(seeds) < 2:
        return "low confidence: one seed only, so a small difference may be chance; raise --trials or --budget-seconds"
    text = f"{len(seeds)} seeds: worst peer {figure(criterion, min(seeds))} to {figure(criterion, max(seeds))}"
    others = found.next_best_repeats
    if not others or found.next_best is None:
        return f"{text}; no other safe point came close"
    common = min(len(seeds), len(others))
    gap = (sum(seeds[:common]) - sum(others[:common])) / common
    spread = max(max(seeds) - min(seeds), max(others) - min(others))
    rates = f"η {found.next_best.averaging_rate:g}, " if found.averages else ""
    if criterion.better == "lower":
        gap = -gap
    lower = "lower" if criterion.better == "higher" else "higher"
    second = (
        f"the next best ({rates}γ {found.next_best.learning_rate:g}) is {_amount(criterion, gap)} {lower} on average"
    )
    within = f"within the {_amount(criterion, spread)} that seeds differ by"
    verdict = "more than seeds differ by" if gap > spread else within
    return f"{text}; {second}, {verdict}"


def _amount(criterion: Criterion, difference: float) -> str:
    from peer.report.numbers import significant

    return f"{100 * difference:.1f} points" if criterion == ACCURACY else significant(difference)


def _print(found: Tuning, written: str | None, *, asked_to_write: bool) -> None:
    from rich.console import Console

    best = found.best
    console = Console()
    console.print()
    console.print(_table(found))
    click.echo()
    if found.is_useful is False:
        click.secho(_of_no_use(found), bold=True)
        click.echo("the best of them:")
    if found.averages:
        click.echo(f"algorithm.averaging_rate = {best.averaging_rate:g}")
    click.echo(f"training.learning_rate = {best.learning_rate:g}")
    click.echo()
    click.echo(f"{_sentence(best)}; {len(found.trials)} trials in {found.seconds:.0f} s")
    click.echo(_confidence(found))
    if found.is_useful:
        click.echo(f"one process with all data: {_alone(found)}")
    if not found.safe:
        click.echo(
            f"not confirmed: {_REASONS[found.ended]}, so not all rates next to the chosen ones were run in full length"
        )
    if found.shortened:
        click.echo(f"the longest runs had {found.rounds} rounds; raise --budget-seconds to run the full length")
    if written is not None:
        click.echo(f"wrote {written}; both keys must be the same on every peer of the run")
    elif asked_to_write and found.is_useful is False:
        click.echo("nothing was written")


def _alone(found: Tuning) -> str:
    from peer.report.numbers import figure

    own = found.criterion != ACCURACY
    return figure(found.criterion, found.single_process_figure if own else found.single_process_accuracy)


def _of_no_use(found: Tuning) -> str:
    from peer.report.numbers import figure

    untrained = "guessing" if found.criterion == ACCURACY else "the untrained model"
    guessing = "" if found.guessing is None else f" and {untrained} {figure(found.criterion, found.guessing)}"
    name = "" if found.criterion == ACCURACY else f"{found.criterion.name} "
    return (
        f"no recommendation: in {found.best.rounds} rounds, no point brought the worst peer to a useful model. It"
        f" reached {name}{figure(found.criterion, found.best.worst)}, one process with all data"
        f" {_alone(found)}{guessing}. Train longer (run.rounds), send more"
        " (compressor.fraction), or compare algorithms and graphs with `sotto lab plan`"
    )


_REASONS = {
    "done": "every point is next to the cliff",
    "trials used up": "the number of trials was reached",
    "time used up": "the time limit was reached",
    "stopped": "the search was stopped",
}


def _table(found: Tuning) -> Table:
    """Return the worst peer's figure at each point, from its longest run: γ to the right, η upward."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    unit = "%" if found.criterion == ACCURACY else found.criterion.name
    newest = found.newest()
    etas, gammas = sorted({eta for eta, _ in newest}, reverse=True), sorted({gamma for _, gamma in newest})
    table = Table(box=box.SIMPLE_HEAD, title=f"worst peer, {unit} (chosen: ◆, over the cliff: ✗)", title_style="bold")
    table.add_column("η \\ γ" if found.averages else "γ", justify="right", style="bold")
    for gamma in gammas:
        table.add_column(f"{gamma:g}", justify="right")
    for eta in etas:
        cells: list[Text] = []
        for gamma in gammas:
            trial = newest.get((eta, gamma))
            cells.append(Text("") if trial is None else _cell(found, trial))
        table.add_row(f"{eta:g}" if found.averages else "", *cells)
    shorter = sorted({trial.rounds for trial in newest.values()})
    if len(shorter) > 1:
        table.caption = "dim: shorter runs of " + " or ".join(f"{rounds}" for rounds in shorter[:-1]) + " rounds"
    return table


def _cell(found: Tuning, trial: Trial) -> Any:
    from rich.text import Text

    from peer.report.numbers import significant

    if trial.verdict != "held" or trial.worst is None:
        return Text("✗ " + trial.verdict, style="red")
    text = f"{100 * trial.worst:.1f}" if found.criterion == ACCURACY else significant(trial.worst)
    if trial is found.best:
        return Text(f"◆ {text}", style="bold green")
    if found.over_the_cliff(trial):
        return Text(f"✗ {text}", style="red")
    return Text(text, style="" if trial.rounds == found.rounds else "dim")


def _sentence(trial: Trial) -> str:
    from peer.report.numbers import percent, significant

    rates = f"η {trial.averaging_rate:<6g} γ {trial.learning_rate:<6g} {trial.rounds} rounds"
    if trial.verdict != "held":
        return f"{rates}  {trial.verdict}: {trial.reason}"
    distance = significant(trial.consensus_distance)
    worst = percent(trial.worst_accuracy) if trial.worst_figure is None else significant(trial.worst_figure)
    return f"{rates}  worst peer {worst}, consensus distance {distance}"
