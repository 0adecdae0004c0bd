"""The report of `sotto profile` as a table: full beside low precision, and the ratio of the two."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peer.ops.profile import EIGHT_BITS, WHOLE, Profile
from peer.report.numbers import MISSING, count, significant, size, times


def profile_table(report: Profile) -> RenderableType:
    """Return the table of one model."""
    work, full, eight = report.workload, report.costs["float32"], report.costs["int8"]
    title = Text.assemble((work.model, "bold"), f"  {count(report.parameters)} parameters, batch {work.batch}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("each iteration of one peer")
    for heading in ("float32", "int8", "less"):
        table.add_column(heading, justify="right")
    rows: list[tuple[str, float | None, float | None]] = [
        ("kept for the backward pass", full.saved_bytes, eight.saved_bytes),
        ("peak of a step", full.peak_bytes, eight.peak_bytes),
        ("weights, with their codes", report.weight_bytes("float32"), report.weight_bytes("int8")),
        ("weights at inference", 4 * report.parameters, report.parameters),
    ]
    for words, one, other in rows:
        table.add_row(words, size(one), size(other), _ratio(one, other))
    table.add_section()
    table.add_row("CPU time of a step", _ms(full.step_s), _ms(eight.step_s), _ratio(full.step_s, eight.step_s))
    for kind, number in report.operations("float32").items():
        other = report.operations("int8")[kind]
        table.add_row(f"multiplications in {kind}", _millions(number), _millions(other), MISSING)
    table.add_section()
    whole, eighth = (report.messages[words] for words in (WHOLE, EIGHT_BITS))
    table.add_row("message, 32 and 8 bits a number", size(whole), size(eighth), _ratio(whole, eighth))
    for words, number in report.messages.items():
        if words.startswith("top"):
            table.add_row(f"message, {words}", size(number), size(number), MISSING)
    return Group(title, table)


def _ratio(one: float | None, other: float | None) -> str:
    return times(one / other) if one and other else MISSING


def _ms(seconds: float) -> str:
    return f"{significant(1000 * seconds)} ms"


def _millions(number: int) -> str:
    return f"{significant(number / 1e6)} M" if number else "0"
