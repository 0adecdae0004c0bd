"""The table at the end of a run, from its `Summary`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peer.report.numbers import MISSING, count, duration, percent, points, significant, size, times
from peer.state.metrics import Summary

MAX_PEERS = 16
"""Up to this many peers get a row of their own; more are summed up."""
_PRECISIONS = {"int8": "8 bits (int8 products)", "bfloat16": "bfloat16 (parameters and sums float32)"}


def summary_table(summary: Summary) -> RenderableType:
    """Return accuracy and traffic of a run side by side."""
    title = Text.assemble((summary.name, "bold"), f"  {summary.num_peers} peers, {count(summary.rounds)} rounds")
    title.append(f", seed {summary.seed}\n{summary.algorithm}, {summary.compressor}, {summary.graph}")
    title.append(f"\ntrained in {precision_name(summary)}")
    parts: list[RenderableType] = [Text(), title]
    if summary.ended != "completed":
        parts.append(Text(f"ended early: {summary.ended}", style="bold red"))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(_accuracy(summary), _traffic(summary))
    parts.extend([Text(), grid, Text()])
    return Group(*parts)


def precision_name(summary: Summary) -> str:
    """Return in which arithmetic the peers trained, as a reader says it."""
    return _PRECISIONS.get(summary.precision, "full precision (float32)")


def reduction(summary: Summary, num_bytes: int | None) -> float | None:
    """Return how many times fewer bytes than the same messages as float32 vectors."""
    if not num_bytes or not summary.full_precision_payload_bytes:
        return None
    return summary.full_precision_payload_bytes / num_bytes


def _accuracy(summary: Summary) -> Table:
    table = _table("test accuracy", "")
    named = list(zip(_names(summary), summary.peer_accuracy, strict=False))
    worst = summary.worst_accuracy
    if len(named) <= MAX_PEERS:
        for name, accuracy in named:
            table.add_row(Text(name), percent(accuracy))
    else:
        ordered = sorted(summary.peer_accuracy)
        table.add_row("median peer", percent(ordered[len(ordered) // 2]))
        table.add_row("best peer", percent(ordered[-1]))
    table.add_section()
    table.add_row("worst peer", percent(worst), style="bold")
    if len(summary.class_accuracy) > 1:
        lowest = min(range(len(summary.class_accuracy)), key=summary.class_accuracy.__getitem__)
        table.add_row(f"its class {lowest}, its lowest", percent(summary.class_accuracy[lowest]))
    if summary.holdout_accuracy:
        table.add_row("worst on its own hold-out", percent(min(summary.holdout_accuracy)))
    table.add_row("averaged model", percent(summary.averaged_accuracy), style="bold")
    table.add_row("one process, float32", percent(summary.single_process_accuracy))
    if worst is not None and summary.single_process_accuracy is not None:
        table.add_row("worst − one process", f"{points(worst - summary.single_process_accuracy)} pts")
    return table


def _traffic(summary: Summary) -> Table:
    table = _table("sent by all", "bytes", "less")
    rows: Sequence[tuple[str, int | None]] = (
        ("full precision", summary.full_precision_payload_bytes or None),
        ("payload", summary.payload_bytes),
        ("frames", summary.frame_bytes),
        ("protobuf", summary.protobuf_bytes or None),
        ("socket", summary.socket_bytes),
        ("packets", summary.packet_bytes),
    )
    for name, num_bytes in rows:
        if num_bytes is not None:
            style = "bold" if name in {"payload", "socket"} else ""
            table.add_row(name, size(num_bytes), times(reduction(summary, num_bytes)), style=style)
    table.add_section()
    table.add_row("bits a parameter", significant(summary.bits_per_parameter), "")
    bound = summary.entropy_bits_per_parameter
    # Of plain floats only the width of the type is known, which is no bound for the coder.
    if bound is not None and bound <= summary.bits_per_parameter:
        table.add_row("entropy bound", significant(bound), "")
    table.add_row("parameters", count(summary.parameters), "")
    if summary.consensus_distance is not None:
        table.add_row("consensus distance", significant(summary.consensus_distance), "")
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
    table.add_row("time", duration(summary.seconds), "")
    per_round = f"{1000 * summary.seconds_per_round:.1f} ms" if summary.seconds_per_round else MISSING
    table.add_row("time a round", per_round, "")
    return table


def _names(summary: Summary) -> list[str]:
    names = summary.peer_names or [f"peer {index}" for index in range(len(summary.peer_accuracy))]
    return [names[number] for number in summary.members] or names


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
