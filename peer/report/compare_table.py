"""Several runs beside each other in a terminal, and the rows of the tables that the page shows too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from peer.report.comparison import (
    Contender,
    Spread,
    Target,
    comparison_lines,
    criterion_of,
    curves,
    differences,
    target,
)
from peer.report.numbers import MISSING, count, duration, figure, size, times
from peer.report.run_data import RunData
from peer.report.terminal_chart import COLOURS, MARKS, terminal_chart
from peer.report.whole_models import WHOLE_MODELS, reduction
from peer.state.metrics import Summary

Rows = tuple[list[str], list[list[str]]]
"""Heads, and the cells of each row."""

_MEASURES = {
    "round": ("rounds", lambda value: count(round(value))),
    "bytes": ("bytes of a peer", size),
    "time": ("time", duration),
}


def compare_table(found: Sequence[Contender]) -> RenderableType:
    """Return results, curves by round, second and byte, and differences of configuration."""
    parts: list[RenderableType] = [_table(rows, coloured=True) for _, rows in result_tables(found)]
    parts.append(Text(sentence_about(found), style="dim"))
    reached = target(found)
    if reached is not None:
        title = f"\nuntil the worst peer has {figure(reached.criterion, reached.value)}, which all reach"
        parts += [Text(title, style="bold"), _table(target_rows(reached), coloured=True)]
    parts.append(_Charts(found))
    differing = [[key, *values] for key, values in differences(found)]
    if differing:
        heads = ["key", *(each.name for each in found)]
        parts += [Text("differences of configuration", style="bold"), _table((heads, differing))]
    parts += [
        Text(f"{run.directory}: {note}", style="yellow") for each in found for run in each.runs for note in run.notes
    ]
    return Group(*parts)


def result_tables(found: Sequence[Contender]) -> list[tuple[str, Rows]]:
    """Return (name, rows) of the tables with the figures at the end, one row for each contender."""
    criterion = criterion_of(found)
    write = partial(figure, criterion)
    quality: list[_Column] = [
        ("seeds", lambda each: str(len(each.runs))),
        ("worst peer", lambda each: _written(each, lambda s: s.worst(criterion), write)),
        ("averaged", lambda each: _written(each, lambda s: s.averaged(criterion), write)),
        ("one process", lambda each: _written(each, lambda s: s.single_process(criterion), write)),
    ]
    cost: list[_Column] = [
        ("model updates", lambda each: _written(each, lambda s: s.payload_bytes, size)),
        ("saved", lambda each: _written(each, lambda s: reduction(s, s.payload_bytes), times)),
        ("network", lambda each: _written(each, lambda s: s.socket_bytes, size)),
        ("time", lambda each: _written(each, lambda s: s.training_seconds or None, duration) + _clock(each)),
        ("a round", lambda each: _written(each, lambda s: 1000 * s.seconds_per_round or None, "{:.1f} ms".format)),
    ]
    return [(criterion.name, _rows(found, quality)), ("cost", _rows(found, cost))]


_Column: TypeAlias = tuple[str, Callable[[Contender], str]]


def _rows(found: Sequence[Contender], columns: Sequence[_Column]) -> Rows:
    # A figure that no run has gets no column, nor does the number of seeds where it is always one.
    kept = [column for column in columns if any(column[1](each) not in (MISSING, "1") for each in found)]
    return ["run", *(head for head, _ in kept)], [[each.name, *(cell(each) for _, cell in kept)] for each in found]


def _clock(each: Contender) -> str:
    return " virtual" if any(run.summary is not None and run.summary.simulated for run in each.runs) else ""


def target_rows(reached: Target) -> Rows:
    """Return the cost to each contender by each measure until its worst peer has the figure that all reach."""
    rows = [
        [name, *(_spread(by_measure[measure], write) for measure, (_, write) in _MEASURES.items())]
        for name, by_measure in reached.reached.items()
    ]
    return ["run", *(head for head, _ in _MEASURES.values())], rows


def sentence_about(found: Sequence[Contender]) -> str:
    """Return an explanation of the tables."""
    seeds = " Of several seeds: the mean, and the lowest and highest." if any(len(e.runs) > 1 for e in found) else ""
    simulated = [run.summary is not None and run.summary.simulated for each in found for run in each.runs]
    clocks = " Times of simulations are virtual." if any(simulated) and not all(simulated) else ""
    return f"Bytes are those of all peers. saved: against {WHOLE_MODELS}.{clocks}{seeds}"


class _Charts:
    """Charts that learn the width of the terminal when they are drawn."""

    def __init__(self, found: Sequence[Contender]) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 100)
        for name, curve, y in curves(self._found)[:1]:
            for measure in _MEASURES:
                axis, lines = comparison_lines(self._found, curve, measure)
                if axis is None:
                    continue
                chart = terminal_chart(f"\n{name} by {measure}", lines, axis, y, width=width)
                if chart.plain:
                    yield chart
        yield Text()


def _written(each: Contender, reading: Callable[[Summary], float | None], write: Callable[[float], str]) -> str:
    def of_run(run: RunData) -> float | None:
        return None if run.summary is None else reading(run.summary)

    return _spread(each.figure(of_run), write)


def _spread(spread: Spread | None, write: Callable[[float], str]) -> str:
    if spread is None:
        return MISSING
    low, middle, high = (write(value) for value in (spread.low, spread.mean, spread.high))
    if low == high:
        return middle
    number, _, unit = low.rpartition(" ")
    # "90.6–92.8" where both have the unit of the mean, such as "91.7 %".
    same = number and all(text.endswith(f" {unit}") and text.count(" ") == 1 for text in (low, middle, high))
    return f"{middle} ({number}–{high.removesuffix(f' {unit}')})" if same else f"{middle} ({low}–{high})"


def _table(rows: Rows, *, coloured: bool = False) -> Table:
    heads, lines = rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if column == 0 or not coloured else "right", overflow="fold")
    for number, line in enumerate(lines):
        mark = f"{MARKS[number % len(MARKS)]} " if coloured else ""
        name = Text(mark + line[0], style=COLOURS[number % len(COLOURS)] if coloured else "")
        table.add_row(name, *map(Text, line[1:]))
    return table
