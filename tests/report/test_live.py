"""What is shown while a run goes on."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from peer.records import PeerProgress, Progress
from peer.report import live
from peer.report.live import MAX_ROWS, LineView, RunView, line, open_view, select_rows

PEERS = tuple(
    PeerProgress(
        name=f"peer-{index}",
        round=40 + index,
        loss=0.5,
        figure=0.9 + index / 100,
        payload_bytes=1_000,
        frame_bytes=1_200,
        socket_bytes=2_000,
        values=25_000,
        neighbors=2,
        neighbors_up=2 - index,
        state="training",
    )
    for index in range(2)
)
RUN = Progress(phase="training", rounds=100, elapsed_s=8.0, peers=PEERS, averaged_figure=0.95, consensus_distance=0.25)


def shown(progress: Progress, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(RunView(progress))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_table_has_every_peer_and_the_figures_of_the_run() -> None:
    text = shown(RUN)
    for figure in (
        "training",
        "round 40 of 100",
        "8.0 s",
        "12 s left",
        "90.0 %",
        "95.0 %",
        "2.00 kB",
        "100×",
    ):
        assert figure in text
    for peer in PEERS:
        assert peer.name in text
    assert "1/2" in text


def test_the_time_left_is_that_of_the_rounds_since_the_first_of_this_process() -> None:
    begun = replace(RUN, elapsed_s=34.0, begun_at_round=20, begun_at_s=30.0)
    assert "12 s left" in shown(begun)
    assert "about 12 s left" in line(begun)
    assert "left" not in shown(replace(begun, begun_at_round=39))
    assert "left" not in shown(replace(begun, begun_at_s=33.0))


def test_a_narrow_terminal_shows_fewer_columns_whole() -> None:
    peers = tuple(replace(PEERS[0], name=f"peer-{index}", payload_bytes=10**8, round=1000) for index in range(8))
    text = shown(replace(RUN, peers=peers, rounds=1000), width=80)
    assert "…" not in text
    assert "socket" in text
    assert "frames" not in text
    assert "frames" in shown(RUN, width=120)


def test_before_the_first_round_nothing_is_made_up() -> None:
    text = shown(Progress(phase="starting peers", rounds=100, elapsed_s=0.1, peers=(PeerProgress(name="peer-0"),)))
    assert "starting peers" in text
    assert "%" not in text
    assert "left" not in text
    assert "×" not in text


def test_while_peers_start_it_says_how_many_are_ready() -> None:
    run = replace(RUN, phase="starting peers", ready=1)
    assert "starting peers 1/2" in shown(run)
    assert "starting peers 1/2" in line(run)
    assert "starting peers  " in line(replace(run, ready=None))


def test_the_slowest_peer_is_the_round_of_the_run_and_the_worst_needs_all() -> None:
    assert RUN.round == 40
    assert RUN.worst_figure == 0.9
    silent = replace(PEERS[0], figure=None)
    assert replace(RUN, peers=(silent, PEERS[1])).worst_figure is None


def test_of_many_peers_those_in_trouble_and_the_slowest_are_shown() -> None:
    many = [replace(PEERS[0], name=f"p{index}", round=500 + index) for index in range(200)]
    many[150] = replace(many[150], state="lost")
    many[180] = replace(many[180], round=3)
    names = [peer.name for peer in select_rows(many)]
    assert len(names) == MAX_ROWS
    assert {"p150", "p180", "p0"} <= set(names)
    assert names == sorted(names, key=lambda name: int(name[1:]))
    assert "176 more" in shown(replace(RUN, peers=tuple(many)))


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    output = io.StringIO()
    with LineView(Console(file=output, width=60)) as view:
        for moment in range(100):
            view.update(replace(RUN, elapsed_s=moment / 4))
        view.update(replace(RUN, elapsed_s=25.0, phase="one process on all data"))
    lines = output.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].split()[:2] == ["0", "ms"]
    assert "one process on all data" in lines[-1]


def test_a_silence_without_a_terminal_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TELL_EVERY_S", 0.01)
    monkeypatch.setattr(live, "_LOOK_EVERY_S", 0.01)
    output = io.StringIO()
    with LineView(Console(file=output, width=60)) as view:
        view.update(Progress(phase="preparing", rounds=100, elapsed_s=0.0))
        until = time.monotonic() + 60
        while output.getvalue().count("preparing") < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert output.getvalue().count("preparing") >= 3


def test_lines_go_where_stderr_was_when_the_view_was_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulated scripts print elsewhere while it is their turn."""
    with open_view(live=False) as show:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        show(RUN)
    monkeypatch.undo()
    assert "round 40/100" in capsys.readouterr().err


def test_the_last_state_is_always_printed() -> None:
    output = io.StringIO()
    with LineView(Console(file=output)) as view:
        view.update(RUN)
        view.update(replace(RUN, elapsed_s=8.1, peers=(replace(PEERS[0], round=100),)))
    assert "round 100/100" in output.getvalue().splitlines()[-1]


def test_a_line_tells_of_trouble() -> None:
    assert "peer-1 lost" in line(replace(RUN, peers=(PEERS[0], replace(PEERS[1], state="lost"))))


def test_names_are_not_markup() -> None:
    assert "[red]x" in shown(replace(RUN, peers=(replace(PEERS[0], name="[red]x"),)))
    assert "[red]x lost" in line(replace(RUN, peers=(replace(PEERS[0], name="[red]x", state="lost"),)))


def test_the_live_view_draws_and_restores_the_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    with open_view(live=True, console=console) as show:
        show(RUN)
    assert "peer-1" in output.getvalue()
    assert output.getvalue().rstrip().endswith("\x1b[?25h")


def test_where_nobody_watches_there_are_lines() -> None:
    output = io.StringIO()
    with open_view(live=False, console=Console(file=output, width=140)) as show:
        show(RUN)
    assert output.getvalue() == f"{line(RUN)}\n"
