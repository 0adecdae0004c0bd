"""The view of a run under way: a live table on a terminal, a line now and then elsewhere.

Both write to stderr, so that stdout stays free for results, and take `Progress` objects only.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peer.records import ACCURACY, Criterion, PeerProgress, Progress
from peer.report.numbers import MISSING, duration, figure, significant, size, times
from peer.terminal import TELL_EVERY_S, telling

_LOOK_EVERY_S = 1.0

LINE_EVERY_S = 5.0
"""Seconds between two lines without a terminal."""

_TELLING_S = 2.0
"""Time that rounds must have taken until it says how long those to come take."""

MAX_ROWS = 24
"""Most peers shown in full; of more, only the slowest, worst and best."""

_STATE_STYLES = {
    "starting": "dim",
    "connecting": "yellow",
    "training": "green",
    "waiting": "yellow",
    "finished": "bold green",
    "stopped": "bold",
    "diverged": "bold red",
    "lost": "bold red",
}


@contextmanager
def open_view(*, live: bool, console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """Within this context, show the run as it is whenever the function is called, from any thread: in a table that is
    drawn anew in place, or in lines where nobody watches a terminal."""
    # The stream of now: simulated scripts have others while it is their turn.
    console = console or Console(file=sys.stderr)
    if live:
        with Live(console=console, refresh_per_second=8, transient=False) as table:
            yield lambda progress: table.update(RunView(progress))
    else:
        with LineView(console) as lines:
            yield lines.update


class LineView:
    """One line at every change of phase, every `every_s` seconds, also where nothing new is known, and at the end."""

    def __init__(self, console: Console, every_s: float = LINE_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._updated_at, self._telling = 0.0, ExitStack()
        self._last: Progress | None = None
        self._shown: Progress | None = None

    def update(self, progress: Progress) -> None:
        """Print a line if it is time for one."""
        self._last, self._updated_at = progress, time.monotonic()
        shown = self._shown
        if shown is None or progress.phase != shown.phase or progress.elapsed_s - shown.elapsed_s >= self._every_s:
            self._print(progress)

    def __enter__(self) -> LineView:
        self._telling.enter_context(telling(self._repeat, every_s=_LOOK_EVERY_S))
        return self

    def __exit__(self, *error: object) -> None:
        self._telling.close()
        if self._last is not None and self._last is not self._shown:
            self._print(self._last)

    def _repeat(self) -> None:
        """Print the last known state, with the time of now, if nothing was printed for a while."""
        last, shown, silent_s = self._last, self._shown, time.monotonic() - self._updated_at
        if last is not None and shown is not None and last.elapsed_s + silent_s >= shown.elapsed_s + TELL_EVERY_S:
            self._print(replace(last, elapsed_s=last.elapsed_s + silent_s))

    def _print(self, progress: Progress) -> None:
        self._shown = progress
        self._console.print(line(progress), highlight=False, soft_wrap=True, markup=False)


def line(progress: Progress) -> str:
    """Return the run as one line."""
    parts = [f"{duration(progress.elapsed_s):>10}", progress.activity]
    if progress.peers:
        parts.append(f"round {progress.round}/{progress.rounds or '?'}")
        losses = [peer.loss for peer in progress.peers if peer.loss is not None]
        if losses:
            parts.append(f"loss {significant(sum(losses) / len(losses))}")
        if progress.worst_figure is not None:
            parts.append(f"worst peer {_compared(progress, progress.worst_figure)}")
        if progress.averaged_figure is not None:
            parts.append(f"averaged {_compared(progress, progress.averaged_figure)}")
        if (remaining := _remaining_s(progress)) is not None:
            parts.append(f"about {duration(remaining)} left")
        if progress.payload_bytes:
            parts.append(f"sent {size(progress.payload_bytes)} ({times(progress.reduction)} saved)")
        troubled = [f"{peer.name} {peer.state}" for peer in progress.peers if peer.state in {"diverged", "lost"}]
        parts.extend(troubled[:3])
    return "  ".join(parts)


@dataclass(frozen=True)
class RunView:
    """A header with the progress bar, and a row for each peer. Narrow terminals get fewer columns: the view learns its
    width when it is drawn."""

    progress: Progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the header and, once there are peers, the table."""
        yield _header(self.progress)
        if self.progress.peers:
            yield _peer_table(self.progress, options.max_width)


def _header(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [
        Text(progress.activity, style="bold"),
        ProgressBar(total=max(1, progress.rounds), completed=progress.round, width=24),
        Text(f"round {progress.round} of {progress.rounds or '?'}"),
        Text(duration(progress.elapsed_s), style="dim"),
    ]
    if progress.virtual_s is not None:
        cells.append(Text(f"virtual {duration(progress.virtual_s)}", style="dim"))
    if (remaining := _remaining_s(progress)) is not None:
        cells.append(Text(f"about {duration(remaining)} left", style="dim"))
    grid.add_row(*cells)
    saved = f"{size(progress.payload_bytes)}, {times(progress.reduction)} saved"
    figures = [
        ("worst peer", _compared(progress, progress.worst_figure)),
        ("averaged", _compared(progress, progress.averaged_figure)),
        ("sent", saved if progress.payload_bytes else MISSING),
    ]
    text = Text()
    for label, written in figures:
        if written != MISSING:
            text.append(f"{label} ", style="dim").append(written, style="bold").append("   ")
    return Group(grid, text) if text.plain else grid


def _compared(progress: Progress, value: float | None) -> str:
    """Return a figure by which models are compared; its unit or name tells which."""
    written = figure(progress.criterion, value)
    return written if progress.criterion == ACCURACY or value is None else f"{progress.criterion.name} {written}"


def _remaining_s(progress: Progress) -> float | None:
    done, took_s = progress.round - progress.begun_at_round, progress.elapsed_s - progress.begun_at_s
    if done < 2 or took_s < _TELLING_S or progress.round >= progress.rounds:
        return None
    return took_s / done * (progress.rounds - progress.round)


def _peer_table(progress: Progress, width: int) -> RenderableType:
    columns = [column for column in _columns(progress.criterion) if width >= column.min_width]
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    rows = select_rows(progress.peers, progress.criterion)
    for peer in rows:
        table.add_row(*(column.cell(peer) for column in columns))
    if len(rows) < len(progress.peers):
        table.add_row(Text(f"… {len(progress.peers) - len(rows)} more", style="dim"))
    return Padding(table, (1, 0, 0, 0))


@dataclass(frozen=True)
class _Column:
    heading: str
    cell: Callable[[PeerProgress], RenderableType]
    min_width: int = 0
    """Terminals narrower than this do without the column."""
    justify: Literal["left", "right"] = "right"


def _neighbors(peer: PeerProgress) -> Text:
    # A peer that has finished may hang up.
    missed = peer.neighbors_up < peer.neighbors and peer.state != "finished"
    return Text(f"{peer.neighbors_up}/{peer.neighbors}", style="yellow" if missed else "")


def _columns(criterion: Criterion) -> tuple[_Column, ...]:
    return (
        _Column("peer", lambda peer: Text(peer.name), justify="left"),
        _Column("round", lambda peer: str(peer.round)),
        _Column("loss", lambda peer: significant(peer.loss)),
        _Column(criterion.name, lambda peer: figure(criterion, peer.figure)),
        _Column("payload", lambda peer: size(peer.payload_bytes)),
        _Column("frames", lambda peer: size(peer.frame_bytes), min_width=90),
        _Column("socket", lambda peer: size(peer.socket_bytes), min_width=70),
        _Column("neighbours", _neighbors),
        _Column("state", lambda peer: Text(peer.state, style=_STATE_STYLES.get(peer.state, "")), justify="left"),
    )


def select_rows(peers: Sequence[PeerProgress], criterion: Criterion = ACCURACY) -> list[PeerProgress]:
    """Return all peers; of too many, those in trouble, the slowest and the worst."""
    if len(peers) <= MAX_ROWS:
        return list(peers)

    def urgency(peer: PeerProgress) -> tuple[bool, int, float]:
        return (
            peer.state not in {"diverged", "lost"},
            peer.round,
            criterion.rank(peer.figure) if peer.figure is not None else math.inf,
        )

    chosen = {id(peer) for peer in sorted(peers, key=urgency)[:MAX_ROWS]}
    return [peer for peer in peers if id(peer) in chosen]
