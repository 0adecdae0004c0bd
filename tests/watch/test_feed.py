"""The poller and its listeners: parts that changed, looks that fail, memory that stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from peer.errors import StateError
from peer.watch import feed as feeds
from peer.watch.feed import MOST_EVENTS, Feed
from peer.watch.observer import MOST_LINES, Logs, Observer, open_observer
from peer.watch.snapshot import PeerView, Snapshot


class Story(Observer):
    """An observer whose looks are told beforehand."""

    def __init__(self, looks: Callable[[int], Snapshot]) -> None:
        super().__init__("run", [], None)
        self.looks, self.number = looks, 0

    async def look(self) -> Snapshot:
        self.number += 1
        return self.looks(self.number)


def snapshot(number: int, state: str = "running") -> Snapshot:
    peer = PeerView(index=0, name="a", state=state, round=number, loss=float("nan"))
    return Snapshot(name="run", kind="run", at=float(number), rounds=100, peers=[peer])


def test_a_listener_gets_all_parts_and_then_those_that_changed() -> None:
    async def story() -> None:
        feed = Feed(Story(snapshot))
        await feed.look()
        changes = feed.changes()
        first = dict(await anext(changes))
        assert first.keys() == {"run", "peers", "edges", "charts", "events", "log"}
        assert json.loads(first["peers"])[0][5] is None, "browsers read no NaN"
        await feed.look()
        assert dict(await anext(changes)).keys() == {"run", "peers"}
        await feed.close()
        with pytest.raises(StopAsyncIteration):
            await anext(changes)

    asyncio.run(story())


def test_a_listener_that_was_away_gets_the_newest_only() -> None:
    async def story() -> None:
        feed = Feed(Story(snapshot))
        await feed.look()
        changes = feed.changes()
        await anext(changes)
        for _ in range(50):
            await feed.look()
        (run,) = [json.loads(part) for name, part in await anext(changes) if name == "run"]
        assert run["round"] == 51
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "nothing is left to send"
        waiting.cancel()

    asyncio.run(story())


def test_a_look_that_fails_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_AFTER_FAILURE_S", 0.0)
    monkeypatch.setattr(feeds, "_EVERY_S", 0.0)

    def looks(number: int) -> Snapshot:
        if number == 1:
            raise KeyError("what a peer of another release leaves out")
        return snapshot(number)

    async def story() -> None:
        feed = Feed(Story(looks))
        polling = asyncio.create_task(feed.poll())
        parts = dict(await anext(feed.changes()))
        assert json.loads(parts["run"])["round"] >= 2
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling

    asyncio.run(story())


def test_events_and_logs_are_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        feed = Feed(Story(lambda number: snapshot(number, "unreachable" if number % 2 else "running")))
        for _ in range(2 * MOST_EVENTS):
            await feed.look()
        assert len(feed.events) == MOST_EVENTS
        assert feed.events[-1].text == "a is back"

    asyncio.run(story())
    file = tmp_path / "log.txt"
    logs = Logs({"a": file})
    logs.read()
    file.write_text("".join(f"line {n}\n" for n in range(10_000)) + "unfinished")
    logs.read()
    assert len(logs.lines) == MOST_LINES
    assert logs.lines[-1] == ("a", "line 9999")
    with open(file, "a") as opened:
        opened.write(" \x1b[31mred\n")
    logs.read()
    assert logs.lines[-1] == ("a", "unfinished  [31mred")
    file.write_text("anew\n")
    logs.read()
    assert logs.lines[-1] == ("a", "anew")


def test_time_left_follows_the_last_minute() -> None:
    async def story() -> None:
        feed = Feed(Story(snapshot))
        for _ in range(5):
            await feed.look()
        (run,) = [json.loads(part) for name, part in await anext(feed.changes()) if name == "run"]
        # A round a second: 95 are left.
        assert run["left_s"] == pytest.approx(95.0)

    asyncio.run(story())


def test_a_folder_that_vanishes_is_an_error_before_and_none_after(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    observer = open_observer(tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    (tmp_path / "run").rmdir()
    assert asyncio.run(observer.look()).peers == []
    with pytest.raises(StateError):
        open_observer(tmp_path / "run")
