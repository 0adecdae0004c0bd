"""The report of `sotto lab profile` as a table: float32 beside the lower precisions, each with its ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peer.config.precision_choice import PRECISIONS
from peer.ops.profile import EIGHT_BITS, WHOLE, Profile
from peer.report.numbers import MISSING, count, significant, size, times


def profile_table(report: Profile) -> RenderableType:
    """Return the table of one model."""
    work = report.workload
    title = Text.assemble((work.model, "bold"), f"  {count(report.parameters)} parameters, batch {work.batch}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("each iteration of one peer")
    for heading in ("float32", "bfloat16", "saved", "int8", "saved"):
        table.add_column(heading, justify="right")
    costs = [report.costs[precision] for precision in PRECISIONS]
    sizes: dict[str, Sequence[float | None]] = {
        "kept for the backward pass": [cost.saved_bytes for cost in costs],
        "peak of a step": [cost.peak_bytes for cost in costs],
        "weights, with their codes": [report.weight_bytes(precision) for precision in PRECISIONS],
        "weights at inference": [4 * report.parameters, 4 * report.parameters, report.parameters],
    }
    for words, numbers in sizes.items():
        table.add_row(words, *_beside(numbers, size))
    table.add_section()
    table.add_row("CPU time of a step", *_beside([cost.step_s for cost in costs], _ms))
    operations = [report.operations(precision) for precision in PRECISIONS]
    for kind in operations[0]:
        full, half, eight = (_millions(of_precision[kind]) for of_precision in operations)
        table.add_row(f"multiplications in {kind}", full, half, MISSING, eight, MISSING)
    table.add_section()
    whole, eighth = (report.messages[words] for words in (WHOLE, EIGHT_BITS))
    table.add_row(
        "message, 32 and 8 bits a number", size(whole), size(whole), MISSING, size(eighth), _ratio(whole, eighth)
    )
    for words, number in report.messages.items():
        if words.startswith("top"):
            table.add_row(f"message, {words}", size(number), size(number), MISSING, size(number), MISSING)
    return Group(title, table)


def _beside(numbers: Sequence[float | None], show: Callable[[float | None], str]) -> list[str]:
    """Return the figures of the three precisions, with ratios after the lower two."""
    full, half, eight = numbers
    return [show(full), show(half), _ratio(full, half), show(eight), _ratio(full, eight)]


def _ratio(one: float | None, other: float | None) -> str:
    return times(one / other) if one and other else MISSING


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{significant(1000 * seconds)} ms"


def _millions(number: int) -> str:
    return f"{significant(number / 1e6)} M" if number else "0"
