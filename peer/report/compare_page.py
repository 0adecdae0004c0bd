"""Several runs on one page: results, curves over each other, and what differs in their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from peer.report.compare_table import result_tables, sentence_about, target_rows
from peer.report.comparison import Contender, comparison_lines, curves, differences, target
from peer.report.line_chart import line_chart
from peer.report.numbers import figure, when
from peer.report.page import document, missing, remark, table


def compare_page(found: Sequence[Contender]) -> str:
    """Return the page."""
    header = f"<p class='kicker'>Comparison</p><h1>{escape(' · '.join(each.name for each in found))}</h1>"
    sections = [("results", "Results", _results(found))]
    for number, (name, curve, y) in enumerate(curves(found)):
        charts = []
        for measure in ("round", "bytes", "time"):
            axis, lines = comparison_lines(found, curve, measure)
            if axis is not None:
                charts.append(line_chart(f"{name} by {measure}", lines, axis, y).drawing)
        content = f'<div class="charts">{"".join(charts)}</div>' if any(charts) else missing("Not recorded.")
        sections.append((f"curves-{number}", name, content))
    sections.append(("differences", "Differences of configuration", _differences(found)))
    sections.append(("runs", "Runs", _runs(found)))
    return document("Comparison", header, sections)


def _results(found: Sequence[Contender]) -> str:
    parts = [remark(sentence_about(found))]
    parts += [table(*rows, label=f"Results: {name}") for name, rows in result_tables(found)]
    reached = target(found)
    if reached is not None:
        title = f"Until the worst peer has {figure(reached.criterion, reached.value)}, which all reach"
        parts += [f"<h3>{escape(title)}</h3>", table(*target_rows(reached), label=title)]
    return "".join(parts)


def _differences(found: Sequence[Contender]) -> str:
    if not all(each.settings for each in found):
        return missing("A run has no readable config.toml.")
    rows = [[key, *values] for key, values in differences(found)]
    if not rows:
        return missing("None: the configurations differ in name and seed at most.")
    heads = ["key", *(each.name for each in found)]
    return table(heads, rows, label="Differences of configuration", text_columns=len(heads))


def _runs(found: Sequence[Contender]) -> str:
    rows = []
    for each in found:
        for run in each.runs:
            summary = run.summary
            started = when(summary.started_at) if summary is not None and summary.started_at else ""
            commands = "; ".join(summary.commands) if summary is not None else ""
            seed = "" if summary is None else str(summary.seed)
            rows.append([each.name, str(run.directory), seed, started, commands, " ".join(run.notes)])
    heads = ["contender", "folder", "seed", "started", "command", "notes"]
    return table(heads, rows, label="Runs", text_columns=len(heads))
