"""The results of a race as text and as sections of the report's page."""

from __future__ import annotations

from collections.abc import Sequence

from peer.lab.grid import aligned
from peer.lab.study.race import Curve
from peer.lab.study.race_folder import Finish
from peer.lab.study.study import Race
from peer.report.blocks import Block, Charts, Remark, Section, Table
from peer.report.comparison import style
from peer.report.line_chart import Axis, Line, Unit, line_chart
from peer.report.numbers import MISSING, percent, significant, size

NOTE = (
    "Steps are gradient steps of each peer, to the first time that the worst peer is that accurate, linear between "
    "evaluations. Seconds are those steps times the seconds of a step in the cell of the link. Bytes are those of one "
    "peer's interface. All contenders have the same model, arithmetic, data, batches and learning-rate schedule."
)


def as_text(race: Race, finishes: Sequence[Finish], curves: Sequence[Curve]) -> str:
    """Return the table of all curves, and one for each skew and profile, fastest first."""
    tables = [("training", *_curve_table(race, curves))] if curves else []
    tables += [(f"race at skew {skew:g}, {name}", *_table(race, here)) for skew, name, here in _groups(race, finishes)]
    lines: list[str] = []
    for title, heads, table in tables:
        lines += ["", title, *aligned([heads, *table])]
    return "\n".join(lines)


def sections(race: Race, finishes: Sequence[Finish], curves: Sequence[Curve]) -> list[Section]:
    """Return the sections: tables, and curves by seconds and by bytes."""
    found = [Section("training", "Training", [Remark(NOTE), Table(*_curve_table(race, curves), "Training")])]
    for skew, profile, here in _groups(race, finishes):
        title = f"Race at skew {skew:g}, {profile}"
        blocks = [Table(*_table(race, here), title), _charts(here, curves)]
        found.append(Section(f"race-{len(found)}", title, blocks))
    return found


def _groups(race: Race, finishes: Sequence[Finish]) -> list[tuple[float, str, list[Finish]]]:
    profiles = list(dict.fromkeys(each.profile for each in finishes))
    groups = [
        (skew, profile, [each for each in finishes if (each.skew, each.profile) == (skew, profile)])
        for skew in race.skews
        for profile in profiles
    ]
    return [group for group in groups if group[2]]


def _curve_table(race: Race, curves: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """Return the accuracies after each quarter of the run, and the steps to the targets."""
    quarters = [race.steps * quarter // 4 for quarter in (1, 2, 3, 4)]
    heads = ["contender", "skew", "seed", *(f"worst @{steps}" for steps in quarters), f"averaged @{race.steps}"]
    heads += [f"steps to {percent(target, 0)}" for target in race.targets]
    table = []
    for curve in curves:
        worst = {point.steps: point.worst for point in curve.points}
        line = [curve.contender, f"{curve.skew:g}", str(curve.seed), *(percent(worst.get(each)) for each in quarters)]
        line.append(percent(curve.points[-1].averaged))
        table.append([*line, *(_steps(curve.steps_to(target)) for target in race.targets)])
    return heads, table


def _steps(steps: float | None) -> str:
    return MISSING if steps is None else f"{steps:.0f}"


def _table(race: Race, finishes: Sequence[Finish]) -> tuple[list[str], list[list[str]]]:
    heads = ["contender", "worst", "averaged", "seeds", "s a step", "payload a step", "bytes a step"]
    for target in race.targets:
        goal = percent(target, 0)
        heads += [f"steps to {goal}", f"s to {goal}", f"bytes to {goal}"]
    return heads, [_line(each) for each in finishes]


def _line(finish: Finish) -> list[str]:
    line = [
        finish.contender,
        percent(finish.worst),
        percent(finish.averaged),
        str(finish.seeds),
        significant(finish.step_s),
        size(finish.payload_bytes),
        size(finish.interface_bytes),
    ]
    for steps, seconds, sent in zip(finish.steps_to, finish.seconds_to, finish.bytes_to, strict=True):
        line += [_steps(steps), significant(seconds), size(sent)]
    return line


def _charts(finishes: Sequence[Finish], curves: Sequence[Curve]) -> Block:
    """Return the accuracy of the worst peer, first seed, by seconds and by bytes on one link."""
    measures: tuple[tuple[str, Unit], ...] = (("seconds", "seconds"), ("bytes sent by one peer", "bytes"))
    charts = []
    for label, unit in measures:
        lines = []
        for number, finish in enumerate(finishes):
            curve = next(each for each in curves if (each.contender, each.skew) == (finish.contender, finish.skew))
            per_step = finish.step_s if unit == "seconds" else finish.interface_bytes
            points = [(point.steps * per_step, point.worst) for point in curve.points]
            lines.append(Line(label=finish.contender, points=points, style=style(number)))
        x, y = Axis(label=label, unit=unit, log=True), Axis(label="accuracy of the worst peer", unit="percent", low=0)
        charts.append(line_chart(f"Worst peer by {label}", lines, x, y))
    return Charts([chart for chart in charts if chart.plot is not None])
