"""The results of a study as text, CSV and one page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from peer.lab.grid import aligned
from peer.lab.study.row import Row, Scaled
from peer.lab.study.study import Study
from peer.report.blocks import Block, Charts, Remark, Section, Table
from peer.report.line_chart import Axis, Line, Unit, line_chart
from peer.report.numbers import MISSING, significant, size
from peer.report.page import document

LINK_SHARE = 0.6
"""Least fraction of a round spent on links for which a prediction outside `TOLERANCE` is marked."""
TOLERANCE = 0.15

_COLUMNS = (
    "contender", "profile", "seed", "peers", "step_s", "rounds", "round_s", "seconds_for_100_rounds",
    "rounds_to_target", "seconds_to_target", "bytes_to_target", "simulated_round_s", "predicted_round_s",
    "predicted_link_share", "error", "mean_round_s", "train_s", "gossip_s", "wait_s", "cpu_s", "payload_bytes",
    "interface_bytes", "asked_kbit", "goodput_kbit", "asked_round_trip_ms", "round_trip_ms", "load", "others_cpus",
    "commit",
)  # fmt: skip


def as_csv(rows: Sequence[Row]) -> str:
    """Return one line for each cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(row.as_json() for row in rows)
    return text.getvalue()


def as_text(study: Study, rows: Sequence[Row]) -> str:
    """Return the table of every profile, fastest to the target first."""
    lines = [study.title, f"a local step lasts {study.step_s:g} s"]
    for profile in study.profiles:
        heads, table = _table(study, rows, profile)
        if not table:
            continue
        lines += ["", profile, *aligned([heads, *table])]
    return "\n".join(lines)


def as_html(study: Study, rows: Sequence[Row], scaled: Sequence[Scaled], race: Sequence[Section] = ()) -> str:
    """Return the report: the sections of the race, tables, figures of the links, curves, predictions for more
    peers."""
    note = (
        f"A local step lasts {study.step_s:g} s. Times are medians over rounds, bytes those of one peer's interface. "
        "A prediction is the measured round without limits, plus what the simulator adds for the links."
    )
    sections = list(race)
    for profile in study.profiles:
        heads, table = _table(study, rows, profile)
        if table:
            title = f"Cells, {profile}" if race else profile
            blocks = [Table(heads, table, profile), _curves(rows, profile)]
            sections.append(Section(f"profile-{len(sections)}", title, blocks))
    if scaled:
        heads = ["profile", "peers", "algorithm", "predicted s a round"]
        table = [[each.profile, str(each.peers), each.contender, f"{each.round_s:.3f}"] for each in scaled]
        title = "Predicted for more peers"
        sections.append(Section("predicted", title, [Table(heads, table, title, text_columns=3)]))
    return document(study.name, kicker="Bandwidth study", heading=study.title, header=[Remark(note)], sections=sections)


def _table(study: Study, rows: Sequence[Row], profile: str) -> tuple[list[str], list[list[str]]]:
    """Return heads and lines of one profile."""
    heads = ["algorithm", "s a round", "100 rounds", "kB a round", "rounds to target", "s to target", "bytes to target",
             "predicted", "error", "link share", "others", "goodput", "round trip", "the paper"]  # fmt: skip
    papers = {each.name: each.paper for each in study.contenders}
    found = [row for row in rows if row.cell.profile == profile]
    found.sort(key=lambda row: (row.seconds_to_target is None, row.seconds_to_target or row.cell.result.round_s))
    return heads, [_line(row, papers.get(row.cell.contender, "")) for row in found]


def _line(row: Row, paper: str) -> list[str]:
    """Return the cells of a line; a prediction outside its tolerance is marked."""
    result, share, error = row.cell.result, row.predicted_link_share, row.error
    mark = " !" if error is not None and (share or 0) >= LINK_SHARE and abs(error) > TOLERANCE else ""
    limit = significant(result.asked_kbit) if result.asked_kbit else MISSING
    return [
        row.cell.contender,
        f"{result.round_s:.3f}",
        f"{row.seconds_for_100_rounds:.1f}",
        f"{result.interface_bytes / 1000:.1f}",
        MISSING if row.rounds_to_target is None else str(row.rounds_to_target),
        MISSING if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}",
        size(row.bytes_to_target),
        MISSING if row.predicted_round_s is None else f"{row.predicted_round_s:.3f}",
        MISSING if error is None else f"{error:+.1%}{mark}",
        MISSING if share is None else f"{share:.0%}",
        f"{row.cell.others_cpus:.2f}",
        f"{significant(result.goodput_kbit)} of {limit} kbit/s",
        f"{result.round_trip_ms:.2f} of {result.asked_round_trip_ms:.2f} ms",
        paper,
    ]


def _curves(rows: Sequence[Row], profile: str) -> Block:
    """Return the training loss against seconds and against bytes."""
    here = [row.cell for row in rows if row.cell.profile == profile and row.cell.result.loss_curve]
    charts = []
    measures: tuple[tuple[str, int, Unit], ...] = (("seconds", 0, "seconds"), ("bytes sent by one peer", 1, "bytes"))
    for label, column, unit in measures:
        lines = [
            Line(label=each.contender, points=[(p[column], p[2]) for p in each.result.loss_curve], style="peer")
            for each in here
        ]
        x, y = Axis(label=label, unit=unit), Axis(label="training loss")
        charts.append(line_chart(f"Loss against {label}", lines, x, y))
    return Charts([chart for chart in charts if chart.plot is not None])
