"""Several runs on one page: results, curves over each other, and differences of their configurations."""

from __future__ import annotations

from collections.abc import Sequence

from peer.report.blocks import Block, Charts, Heading, Missing, Remark, Section, Table
from peer.report.compare_table import result_tables, sentence_about, target_rows
from peer.report.comparison import MEASURES, Contender, comparison_lines, curves, differences, target
from peer.report.line_chart import line_chart
from peer.report.numbers import figure, when
from peer.report.page import document


def compare_page(found: Sequence[Contender]) -> str:
    """Return the page."""
    sections = [Section("results", "Results", _results(found))]
    for number, (name, curve, y) in enumerate(curves(found)):
        charts = []
        for measure in MEASURES:
            axis, lines = comparison_lines(found, curve, measure)
            if axis is not None and (chart := line_chart(f"{name} by {measure}", lines, axis, y)).plot is not None:
                charts.append(chart)
        sections.append(Section(f"curves-{number}", name, [Charts(charts) if charts else Missing("Not recorded.")]))
    sections.append(Section("differences", "Differences of configuration", [_differences(found)]))
    sections.append(Section("runs", "Runs", [_runs(found)]))
    names = " · ".join(each.name for each in found)
    return document("Comparison", kicker="Comparison", heading=names, sections=sections)


def _results(found: Sequence[Contender]) -> list[Block]:
    blocks: list[Block] = [Remark(sentence_about(found))]
    blocks += [Table(*rows, f"Results: {name}") for name, rows in result_tables(found)]
    reached = target(found)
    if reached is not None:
        title = f"Until the worst peer has {figure(reached.criterion, reached.value)}, which all reach"
        blocks += [Heading(title), Table(*target_rows(reached), title)]
    return blocks


def _differences(found: Sequence[Contender]) -> Block:
    if not all(each.settings for each in found):
        return Missing("A run has no readable config.toml.")
    rows = [[key, *values] for key, values in differences(found)]
    if not rows:
        return Missing("None: the configurations differ in name and seed at most.")
    heads = ["key", *(each.name for each in found)]
    return Table(heads, rows, "Differences of configuration", text_columns=len(heads))


def _runs(found: Sequence[Contender]) -> Block:
    rows = []
    for each in found:
        for run in each.runs:
            summary = run.summary
            started = when(summary.started_at) if summary is not None and summary.started_at else ""
            commands = "; ".join(summary.commands) if summary is not None else ""
            seed = "" if summary is None else str(summary.seed)
            rows.append([each.name, str(run.directory), seed, started, commands, " ".join(run.notes)])
    heads = ["contender", "folder", "seed", "started", "command", "notes"]
    return Table(heads, rows, "Runs", text_columns=len(heads))
