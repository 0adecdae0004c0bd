"""The command that says which algorithm, graph and compressor suit some links, and when another system is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peer.cli.app import SottoCommand, print_json
from peer.cli.options import config_option, count_peers, json_option, load_config, peers_option, set_option
from peer.errors import ConfigError
from peer.terminal import telling

if TYPE_CHECKING:
    from rich.table import Table

    from peer.config.options import Config
    from peer.links.profiles import Profile
    from peer.planning.plan import Estimate, Plan

DEFAULT_LATENCY_MS = 20.0


@click.command(cls=SottoCommand)
@peers_option
@click.option("--parameters", type=click.IntRange(min=1), metavar="N", help="Number of parameters of the model.")
@click.option("--model", metavar="NAME", help="A model of `sotto lab list models`, for the sizes of its layers.")
@click.option("--task", metavar="NAME", help="A task, for the sizes of its layers. [training.task]")
@config_option
@set_option
@click.option(
    "--link",
    metavar="RATE",
    help='Of each device: a rate ("1mbit", "768kbit/2mbit" up/down), or a profile of `sotto lab shape list`, '
    'which has a latency, too ("10mbit": 1 ms).',
)
@click.option(
    "--latency-ms",
    type=click.FloatRange(min=0),
    metavar="MS",
    help=f"One-way delay between two devices; by default that of the profile, or {DEFAULT_LATENCY_MS:g}.",
)
@click.option(
    "--step-seconds",
    metavar="S",
    default="measure",
    help='Duration of a local step on the slowest device, or "measure": on this machine, with the data of the task.',
)
@click.option(
    "--processor",
    type=click.FloatRange(min=0.01),
    default=1.0,
    metavar="FACTOR",
    help="How many times slower the slowest device computes messages than this machine.",
)
@click.option("--skew", type=click.FloatRange(0, 1), metavar="FRACTION", help="Fraction of the data sorted by label.")
@click.option("--classes", type=click.IntRange(min=0), metavar="N", help="Number of classes; 0 if there are none.")
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Rounds that all-reduce would train, for totals."
)
@click.option(
    "--within",
    "within_points",
    type=click.FloatRange(min=0, max=100),
    metavar="POINTS",
    help="How far below all-reduce the worst peer's accuracy may be; by default 6 points.",
)
@click.option("--evidence", metavar="NAME", help="Measurements to judge by; by default those of the task, or images.")
@click.option("--write", "output", type=click.Path(path_type=Path), metavar="FILE", help="Write the configuration.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
def plan(
    num_peers: int | None,
    parameters: int | None,
    model: str | None,
    task: str | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    link: str | None,
    latency_ms: float | None,
    step_seconds: str,
    processor: float,
    skew: float | None,
    classes: int | None,
    steps: int | None,
    within_points: float | None,
    evidence: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Say which algorithm, graph and compressor to take on given links.

    Predicts for each option the seconds of a round, the bytes that a peer sends and receives per day, and its memory
    beside the model, and compares the time until the worst peer is about as good as with all-reduce. Other systems
    (DDP, PowerSGD, local SGD) are among the options. Sizes of messages are those of this program's own frames for these
    layers; how many rounds an option needs is taken from measurements. docs/planning.md says how well predictions agree
    with measured rounds, and what they leave out.

    \b
    Examples:
      sotto lab plan --model resnet20 --link 1mbit --step-seconds 0.1
      sotto lab plan --config run.toml --link lte --write planned.toml
      sotto lab plan --parameters 11000000 --link dsl --step-seconds 0.5 --json
    """
    from peer.config.options import OWN_LOOP, choices
    from peer.train.startup import quick_imports

    named = [parameters is not None, model is not None, task is not None or config_file is not None]
    if problem := _what_is_missing(link, named, step_seconds):
        raise click.UsageError(problem)
    assert link is not None
    profile = parse_link(link, latency_ms)
    with quick_imports():
        from peer.planning import layers as known_layers
        from peer.planning import plan as planner
        from peer.planning.evidence import read

    if task is not None:
        settings = (f"training.task={task}", *settings)
    config, base = load_config(config_file, settings, num_peers=num_peers)
    count = count_peers(config, num_peers)
    if parameters is not None:
        layers = known_layers.of_number(parameters)
    elif model is not None:
        layers = known_layers.of_model(model)
    else:
        layers = known_layers.of_task(config, base)
    has_task = named[2]
    step_s = _step_s(step_seconds, config, base, count)
    if classes is None:
        classes = layers.num_classes
    notes: list[str] = []
    if skew is None:
        skew, *notes = _skew(config, classes, has_task=has_task)
    all_evidence = read()
    setting = (
        all_evidence.setting(evidence)
        if evidence is not None
        else all_evidence.for_task(config.training.task if has_task else None)
    )
    situation = planner.Situation(
        layers=layers,
        num_peers=count,
        link=profile,
        step_s=step_s,
        skew=0.0 if classes == 0 else skew,
        steps=steps,
        within_points=planner.WITHIN_POINTS if within_points is None else within_points,
        processor=processor,
    )

    def configured(extra: Sequence[str]) -> Config:
        balanced = () if classes != 0 and situation.skew > 0 else ("training.class_balance=0.0",)
        return load_config(config_file, (*settings, *extra, *balanced), num_peers=num_peers)[0]

    # Nothing says that so many parameters are those of an image model: a script trains any.
    guess = setting.tasks[0] if setting.tasks and parameters is None else OWN_LOOP
    job = config.training.task if has_task else guess
    # What `sotto init` and the first `sotto up` choose for such a job, and what was measured of it.
    row = choices(job, count, config.training.local_steps)[0]
    new_job = {
        "settings": [f"{section}.{key}={value}" for section, key, value, _ in row["settings"]],
        "measured": row["measured"],
    }
    with telling(lambda: "measures messages of that size", partial(click.echo, err=True)):
        found = planner.make_plan(situation, all_evidence, setting, configured, base)
    written = None
    own = found.best_own
    if output is not None:
        if own is None:
            raise ConfigError("no configuration can be recommended, so none is written", key="--write")
        from peer.config.writer import write_peer_file

        write_peer_file(output, configured(own.option.settings), force=force)
        written = str(output)
    if job not in setting.tasks:
        notes.append(f"not known: how many rounds such a job needs; they are those of {setting.title}")
    notes += [
        *(f"not known: {limit}" for limit in setting.limits),
        f"a job without a file ({job}) begins with {', '.join(new_job['settings'])} ({new_job['measured']})",
    ]
    if as_json:
        print_json(_document(found, notes) | {"new_job": new_job, "written": written})
        return
    _print(found, notes)
    if written is not None and own is not None:
        of = "" if has_task else f', with the task {config.training.task}: set training.task, for a script "loop"'
        click.echo(f"wrote {written}: {own.option.title}{of}")


def _what_is_missing(link: str | None, named: list[bool], step_seconds: str) -> str | None:
    """Return a sentence that names all options that are missing at once; None if none is."""
    if sum(named) > 1:
        return "--parameters, --model and --task or --config each say how large the model is; give one of them"
    lacks = []
    if link is None:
        lacks.append("what does a device send and receive? (--link 1mbit)")
    if not any(named):
        lacks.append("how large is the model? (--model resnet20, --parameters 3000000, --task digits or --config FILE)")
    if step_seconds == "measure" and not named[2]:
        lacks.append("how long is a local step? (--step-seconds 0.1; with --task or --config it is measured here)")
    return f"options are missing: {' '.join(lacks)}" if lacks else None


def parse_link(text: str, latency_ms: float | None) -> Profile:
    """Return the link that --link names. Raises ConfigError."""
    from peer.links.profiles import PROFILES, Profile

    if text in PROFILES:
        known = PROFILES[text]
        latency = known.latency_ms if latency_ms is None else latency_ms
        return Profile(up_kbit=known.up_kbit, down_kbit=known.down_kbit, latency_ms=latency)
    rates = [_rate_kbit(part) for part in re.sub(r"bit/s", "bit", text.lower()).split("/")]
    if not 1 <= len(rates) <= 2 or None in rates:
        valid = f'a rate such as "1mbit", "768kbit/2mbit" or "1gbit", or one of {", ".join(PROFILES)}'
        raise ConfigError("is no link", key="--link", value=text, valid=valid)
    up, down = rates[0] or 0.0, rates[-1] or 0.0
    return Profile(up_kbit=up, down_kbit=down, latency_ms=DEFAULT_LATENCY_MS if latency_ms is None else latency_ms)


def _rate_kbit(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg])bit(?:/?s)?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        return None
    return float(match[1]) * {"k": 1.0, "m": 1e3, "g": 1e6}[match[2]]


def _step_s(text: str, config: Config, base: Path, num_peers: int) -> float:
    """Return the seconds of a local step, measured if that is asked for."""
    from peer.planning.layers import measured_step_s

    if text == "measure":
        return measured_step_s(config, base, num_peers)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigError("is not valid", key="--step-seconds", value=text, valid='seconds, or "measure"')
    return seconds


def _skew(config: Config, classes: int | None, *, has_task: bool) -> tuple[float, str]:
    """Return the skew to plan for where none is given, and a sentence that says so."""
    from peer.planning.plan import UNKNOWN_SKEW

    if classes == 0:
        return 0.0, "no classes: measured without skew of labels; what other kinds of skew cost is not known"
    if has_task and config.data.partition in ("skew", "iid"):
        skew = config.data.skew if config.data.partition == "skew" else 0.0
        return skew, f"skew {skew:g}, from the configuration"
    return UNKNOWN_SKEW, f"no --skew: planned for {UNKNOWN_SKEW:g}, as data on devices is rarely dealt at random"


def _document(found: Plan, notes: list[str]) -> dict[str, Any]:
    situation = found.situation
    return {
        "parameters": situation.layers.parameters,
        "layers": situation.layers.source,
        "num_peers": situation.num_peers,
        "up_kbit": situation.link.up_kbit,
        "down_kbit": situation.link.down_kbit,
        "latency_ms": situation.link.latency_ms,
        "step_s": situation.step_s,
        "processor": situation.processor,
        "skew": situation.skew,
        "within_points": situation.within_points,
        "evidence": {"name": found.evidence.name, "title": found.evidence.title, "source": found.evidence.source},
        "recommended": found.best.option.name if found.best else None,
        "recommended_own": found.best_own.option.name if found.best_own else None,
        "sentence": _recommendation(found),
        "options": [_option(each, situation.steps) for each in found.estimates],
        "average_bytes": found.average_bytes,
        "average_s": found.average_s,
        "by_rate": [{"rate_kbit": rate, "recommended": name} for rate, name in found.by_rate],
        "notes": notes,
    }


def _option(estimate: Estimate, steps: int | None) -> dict[str, Any]:
    total = estimate.total(steps)
    return {
        "name": estimate.option.name,
        "title": estimate.option.title,
        "settings": list(estimate.option.settings),
        "rival": estimate.option.rival,
        **{key: value for key, value in asdict(estimate).items() if key not in ("option",)},
        "down_bytes": estimate.up_bytes,
        "up_bytes_per_day": estimate.up_bytes_per_day,
        "down_bytes_per_day": estimate.up_bytes_per_day,
        "progress_s": estimate.progress_s,
        "total_s": None if total is None else total[0],
        "total_up_bytes": None if total is None else total[1],
    }


def _recommendation(found: Plan) -> str:
    best, own = found.best, found.best_own
    points = f"{found.situation.within_points:g} points"
    if best is None:
        text = f"no option is known to bring the worst peer within {points} of all-reduce at this skew"
        if own is not None and own.gap_points is not None:
            text += f"; of ours, {own.option.title} came closest ({own.gap_points:.1f} points below)"
        return text
    text = (
        f"take {best.option.title}: {best.round_s:.3g} s a round, and {best.rounds_factor:.2g} times the rounds of"
        f" all-reduce until the worst peer is within {points} of it"
    )
    if best.option.rival is None or own is None:
        return text
    if own.progress_s is None or best.progress_s is None:
        return f"{text}; none of our algorithms is known to get there"
    return f"{text}; of ours, {own.option.title} takes {own.progress_s / best.progress_s:.1f} times as long"


def _print(found: Plan, notes: list[str]) -> None:
    from rich.console import Console

    from peer.report.numbers import MISSING, duration, size

    situation = found.situation
    link = situation.link
    click.echo(
        f"{situation.layers.source}; {situation.num_peers} peers, {link.up_kbit:g}/{link.down_kbit:g} kbit/s up/down,"
        f" {link.latency_ms:g} ms, a step of {situation.step_s:.3g} s, skew {situation.skew:g}"
    )
    console = Console()
    figures = _table("s/step", "CPU ms", "a day", "memory", "rounds", "s×rounds")
    for each in found.estimates:
        figures.add_row(
            each.option.name,
            MISSING if each.round_s is None else f"{each.round_s:.3g}",
            MISSING if each.work_s is None else f"{1000 * each.work_s:.3g}",
            MISSING if each.up_bytes_per_day is None else size(each.up_bytes_per_day),
            MISSING if each.memory_bytes is None else size(each.memory_bytes),
            MISSING if each.rounds_factor is None else f"{each.rounds_factor:.2f}",
            MISSING if each.progress_s is None else f"{each.progress_s:.3g}",
        )
    console.print(figures)
    totals = _table("total", "total up")
    for each in found.estimates:
        if (total := each.total(situation.steps)) is not None:
            totals.add_row(each.option.name, duration(total[0]), size(total[1]))
    if totals.row_count:
        console.print(totals)
    click.echo(
        "rounds: for each round of all-reduce, until the worst peer is close enough to what all-reduce ends with;"
    )
    click.echo("a day: sent, and as much received; memory: beside the model")
    click.echo(
        "after the last round, the average of all models (run.average), unless they are equal:"
        f" {size(found.average_bytes)} to each device, at least {duration(found.average_s)}\n"
    )
    click.secho(_recommendation(found), bold=True)
    titles = {each.option.name: each.option.title for each in found.estimates}
    click.echo(f"\nthe choice at other rates, with the same latency ({link.latency_ms:g} ms) and step:")
    for rate, name in found.by_rate:
        click.echo(f"  {rate / 1000:>8g} Mbit/s  {titles[name] if name else 'none is known to get there'}")
    left_out = [each for each in found.estimates if each.reason is not None]
    if left_out:
        click.echo("\nnot rated:")
        for each in left_out:
            click.echo(f"  {each.option.title}: {each.reason}")
    click.echo(f"\nmeasured on: {found.evidence.title}")
    for note in notes:
        click.echo(f"- {note}")


def _table(*heads: str) -> Table:
    """Return an empty table of options that fits into 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("option", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table
