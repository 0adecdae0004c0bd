"""The table at the end of a run, from its `Summary`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peer.config.precision_choice import readable_choices
from peer.records import ACCURACY, Criterion
from peer.report.numbers import MISSING, count, difference, duration, figure, percent, significant, size, times
from peer.report.whole_models import WHOLE_MODELS, reduction
from peer.state.metrics import Summary

MAX_PEERS = 16
"""Most peers that get a row of their own; more are summed up."""
_FULL_PRECISION = "full precision (float32)"
_PRECISIONS = {
    "auto": "the precision that suits each device",
    "fastest": "the precision that is fastest on each device",
    "bfloat16": "bfloat16 (parameters and sums float32)",
    "int8": "8 bits (int8 products)",
}


def summary_table(summary: Summary) -> RenderableType:
    """Return accuracy and traffic of a run side by side."""
    title = Text.assemble((summary.name, "bold"), f"  {summary.num_peers} peers, {count(summary.rounds)} rounds")
    title.append(f", seed {summary.seed}\n{summary.algorithm}, {summary.compressor}, {summary.graph}")
    title.append(f"\ntrained in {precision_name(summary)}")
    if 0 < len(chosen := chosen_precisions(summary)) <= MAX_PEERS:
        title.append("".join(f"\n  {sentence}" for sentence in chosen), style="dim")
    parts: list[RenderableType] = [Text(), title]
    if summary.ended not in ("", "completed"):
        early = "" if summary.collected_at else "ended early: "
        parts.append(Text(f"{early}{summary.ended}", style="bold red"))
    parts.extend(Text(sentence, style="yellow") for sentence in summary.missing)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Group(*(_figures(summary, criterion) for criterion in summary.all_criteria)), _traffic(summary))
    parts.extend([Text(), grid, Text()])
    if summary.full_precision_payload_bytes:
        parts.extend([Text(f"saved: against {WHOLE_MODELS}", style="dim"), Text()])
    return Group(*parts)


def precision_name(summary: Summary) -> str:
    """Return the arithmetic in which the peers trained, in words."""
    name = _PRECISIONS.get(summary.precision, _FULL_PRECISION)
    counts = Counter(choice.precision for choice in readable_choices(summary.chosen_precisions).values())
    if len(counts) < 2:
        return f"{name}, the fastest here" if counts else name
    each = [f"{_PRECISIONS.get(precision, _FULL_PRECISION)} on {number}" for precision, number in counts.most_common()]
    return f"{name}: {', '.join(each)}"


def chosen_precisions(summary: Summary) -> list[str]:
    """Return a sentence for each peer, or one for all of them, where precisions were chosen by measurement."""
    return [f"{name} in {choice.sentence}" for name, choice in readable_choices(summary.chosen_precisions).items()]


def _figures(summary: Summary, criterion: Criterion) -> Table:
    """Return one figure of all models. Only the one that compares them has a row for each peer."""
    table = _table("test accuracy" if criterion == ACCURACY else criterion.name, "")
    figures, worst, single = summary.of_peers(criterion), summary.worst(criterion), summary.single_process(criterion)
    averaged, ordered = summary.averaged(criterion), sorted(figures, key=criterion.rank)
    if not figures and averaged is None and single is None:
        table.add_row("not measured", "")
        return table
    if criterion == summary.criterion and len(figures) <= MAX_PEERS:
        for name, value in zip(_names(summary), figures, strict=False):
            table.add_row(Text(name), figure(criterion, value))
        table.add_section()
    elif figures:
        margin = summary.margin(criterion)
        if margin is not None:
            # In the unit of the figure before it: percentage points of an accuracy.
            within = f"{100 * margin:.1f}" if criterion == ACCURACY else significant(margin)
            mean = f"{figure(criterion, statistics.mean(figures))} ± {within}"
            table.add_row(f"mean, from {len(figures)} of {summary.num_peers:,}", mean)
        table.add_row("median peer", figure(criterion, ordered[len(ordered) // 2]))
        table.add_row("best peer", figure(criterion, ordered[-1]))
        table.add_section()
    label = f"worst of {len(figures)} peers" if summary.is_sample else "worst peer"
    table.add_row(label, figure(criterion, worst), style="bold")
    tested = [(share, number) for number, share in enumerate(summary.class_accuracy) if share is not None]
    if criterion == ACCURACY and len(tested) > 1:
        share, lowest = min(tested)
        table.add_row(f"its class {lowest}, its lowest", percent(share))
    if holdouts := summary.of_holdouts(criterion):
        table.add_row("worst on its own hold-out", figure(criterion, criterion.worst(holdouts)))
    if summary.epsilon is not None:
        table.add_row("ε spent by each peer, at most", significant(summary.epsilon))
    if averaged is None and len(figures) > 1:
        table.add_row("mean of devices", figure(criterion, summary.mean(criterion)))
    _add_comparison(table, criterion, averaged, single, worst)
    return table


def _add_comparison(
    table: Table, criterion: Criterion, averaged: float | None, single: float | None, worst: float | None
) -> None:
    for label, value, style in (("averaged model", averaged, "bold"), ("one process, float32", single, "")):
        if value is not None:
            table.add_row(label, figure(criterion, value), style=style)
    if worst is not None and single is not None:
        table.add_row("worst − one process", difference(criterion, worst - single).replace("points", "pts"))


def _traffic(summary: Summary) -> Table:
    table = _table("sent by all", "bytes", "saved")
    rows: Sequence[tuple[str, int | None]] = (
        ("whole models", summary.full_precision_payload_bytes or None),
        ("model updates", summary.payload_bytes),
        ("with headers", summary.frame_bytes),
        ("on the network", summary.socket_bytes or summary.packet_bytes),
    )
    for name, num_bytes in rows:
        if num_bytes is not None:
            style = "bold" if name == "model updates" else ""
            table.add_row(name, size(num_bytes), times(reduction(summary, num_bytes)), style=style)
    table.add_section()
    table.add_row("bits a parameter", significant(summary.bits_per_parameter), "")
    table.add_row("parameters", count(summary.parameters or None), "")
    if summary.exchanges:
        table.add_row("exchanges of pairs", count(summary.exchanges), "")
    if summary.staleness is not None:
        most = MISSING if summary.most_staleness is None else count(int(summary.most_staleness))
        table.add_row("staleness, mean", significant(summary.staleness), f"most {most}")
    if summary.repairs:
        table.add_row("repairs", count(summary.repairs), "")
    if summary.reconnects:
        table.add_row("reconnects", count(summary.reconnects), "")
    table.add_section()
    for name, took in _times(summary):
        table.add_row(name, took, "")
    return table


def _times(summary: Summary) -> list[tuple[str, str]]:
    """Return the durations: on the clock of the curves, and on that of this machine."""
    clock = "virtual time" if summary.simulated else "training"
    rows = [("real time" if summary.simulated else "start to end", duration(summary.seconds))]
    if summary.training_seconds:
        rows.insert(0, (clock, duration(summary.training_seconds)))
        rows.append(
            ("a virtual round" if summary.simulated else "a round", f"{1000 * summary.seconds_per_round:.1f} ms")
        )
    return rows


def _names(summary: Summary) -> list[str]:
    names = summary.peer_names or [f"peer {index}" for index in range(len(summary.peer_accuracy))]
    return [names[number] for number in summary.members] or names


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
