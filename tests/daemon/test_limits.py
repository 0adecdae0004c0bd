"""Limits of a device: calendar, sensors, counts that survive, and real peers of which one reaches its data cap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from peer.config.options import LimitOptions, load
from peer.daemon.device import limits
from peer.daemon.device.limit_rules import Usage, check_hours, check_usage, nearly_used
from peer.daemon.device.limits import Limits
from peer.errors import ConfigError, StateError
from peer.net.counters import LinkCounters
from peer.ops.local_cluster import Cluster
from peer.run.plan import validate_config
from peer.state.disk import Disk
from peer.train.threads import use_one_thread
from peer.watch.observer import open_observer
from tests.daemon.test_members import Devices
from tests.daemon.test_rounds import Audit

MIB = 1 << 20
BERLIN = ZoneInfo("Europe/Berlin")


class Links:
    """Two links whose counters the test sets."""

    def __init__(self) -> None:
        self.bytes: dict[int, int | None] = {1: 0, 2: 0}

    def counters(self) -> dict[int, LinkCounters]:
        return {
            peer: LinkCounters(packet_bytes_sent=size, packet_bytes_received=0 if size is not None else None)
            for peer, size in self.bytes.items()
        }


class Clock:
    """The clock on the wall."""

    def __init__(self) -> None:
        self.at = datetime(2026, 11, 30, 12, tzinfo=BERLIN)

    def __call__(self) -> float:
        return self.at.timestamp()


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Looks:
    """Limits with the disk and the clock of a test."""

    def __init__(self, wanted: LimitOptions, folder: Path, links: Links, clock: Clock) -> None:
        self.limits = Limits(wanted, Disk(folder), links.counters, sync=self._sync, wall_clock=clock)
        self.threads: list[str] = []
        """In which threads the counts were saved."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")

    async def _sync(self, save: Callable[[], None]) -> None:
        def named() -> None:
            self.threads.append(threading.current_thread().name)
            save()

        await asyncio.get_running_loop().run_in_executor(self._thread, named)

    def may_begin(self, now: float, *, is_leaving: bool = False) -> bool:
        return asyncio.run(self.limits.may_begin(now, is_leaving=is_leaving))

    def figures(self) -> dict[str, Any]:
        return self.limits.figures()


def options(**keys: object) -> LimitOptions:
    return LimitOptions.model_validate({"timezone": "Europe/Berlin", "then": "pause", **keys})


# -- calendar ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "next_day", "next_month"),
    [
        ("2026-02-28 23:59", "2026-03-01T00:00:00+01:00", "2026-03-01T00:00:00+01:00"),
        ("2028-02-28 10:00", "2028-02-29T00:00:00+01:00", "2028-03-01T00:00:00+01:00"),
        ("2026-12-31 00:00", "2027-01-01T00:00:00+01:00", "2027-01-01T00:00:00+01:00"),
        # Clocks change on these days.
        ("2026-03-29 01:30", "2026-03-30T00:00:00+02:00", "2026-04-01T00:00:00+02:00"),
        ("2026-10-25 02:30", "2026-10-26T00:00:00+01:00", "2026-11-01T00:00:00+01:00"),
    ],
)
def test_a_cap_is_lifted_when_the_calendar_says(at: str, next_day: str, next_month: str) -> None:
    time = datetime.fromisoformat(at).replace(tzinfo=BERLIN)
    reached = check_usage(options(day_mbytes=1, month_mbytes=1), Usage(at[:10], MIB, MIB), time, BERLIN)
    assert [each.until and each.until.isoformat() for each in reached] == [next_day, next_month]


def test_a_new_day_counts_from_0_and_so_does_a_new_month() -> None:
    usage = Usage("2026-11-29", 5, 7)
    assert usage.at("2026-11-29") is usage
    assert usage.at("2026-11-30") == Usage("2026-11-30", 0, 7)
    assert usage.at("2026-12-01") == Usage("2026-12-01", 0, 0)
    assert usage.at("2027-11-29") == Usage("2027-11-29", 0, 0)


@pytest.mark.parametrize(
    ("hours", "at", "until"),
    [
        ("22:00-07:00", "2026-11-30 21:59", "2026-11-30T22:00:00+01:00"),
        ("22:00-07:00", "2026-11-30 22:00", None),
        ("22:00-07:00", "2026-11-30 06:59", None),
        ("22:00-07:00", "2026-11-30 07:00", "2026-11-30T22:00:00+01:00"),
        ("09:00-17:30", "2026-11-30 17:29", None),
        ("09:00-17:30", "2026-11-30 17:30", "2026-12-01T09:00:00+01:00"),
        # 02:30 does not exist on that day.
        ("02:30-05:00", "2026-03-29 01:00", "2026-03-29T03:30:00+02:00"),
    ],
)
def test_hours_may_go_past_midnight_and_last_to_their_end(hours: str, at: str, until: str | None) -> None:
    time = datetime.fromisoformat(at).replace(tzinfo=BERLIN)
    reached = check_hours(options(hours=hours), time, BERLIN)
    assert [each.until and each.until.isoformat() for each in reached] == ([until] if until else [])


def test_a_limit_is_nearly_used_from_90_percent_on() -> None:
    found = [nearly_used(options(day_mbytes=10), Usage("", size * MIB, 0)) for size in (8, 9, 10)]
    assert found == [[], ["more than 90% of limits.day_mbytes = 10 is used"], []]


# -- counts ------------------------------------------------------------------------------------------------------------


def test_counts_survive_a_restart_and_count_nothing_twice(tmp_path: Path, clock: Clock) -> None:
    links = Links()
    first = Looks(options(day_mbytes=10), tmp_path, links, clock)
    links.bytes = {1: 3 * MIB, 2: 2 * MIB}
    assert first.may_begin(0.0)
    assert first.may_begin(1.0)
    assert first.figures()["day_bytes"] == 5 * MIB
    # A connection that cannot be asked, and one that can again.
    links.bytes = {1: None, 2: 2 * MIB}
    assert first.may_begin(2.0)
    links.bytes = {1: 3 * MIB, 2: 2 * MIB + 7}
    assert first.may_begin(3.0)
    # A crash: less than a MiB was not saved.
    crashed = Looks(options(day_mbytes=10), tmp_path, Links(), clock)
    assert crashed.figures()["day_bytes"] == 5 * MIB
    assert first.threads == ["disk_0"], "not in the thread of the event loop"
    first.limits.close()
    links = Links()
    second = Looks(options(day_mbytes=10), tmp_path, links, clock)
    assert second.figures()["day_bytes"] == 5 * MIB + 7
    links.bytes = {1: 5 * MIB, 2: 0}
    assert not second.may_begin(0.0)
    clock.at = datetime(2026, 12, 1, tzinfo=BERLIN)
    assert second.may_begin(1.0)
    assert Looks(options(day_mbytes=10), tmp_path, Links(), clock).figures()["month_bytes"] == 0


def test_damaged_counts_are_refused(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / limits.USAGE.name).write_text('{"day": 3}')
    with pytest.raises(StateError, match="or delete it"):
        Looks(options(day_mbytes=10), tmp_path, Links(), clock)


def test_it_warns_once_slows_down_and_says_when_it_is_over(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    links = Links()
    slow = Looks(options(day_mbytes=10, then="slow", slow_step_s=60), tmp_path, links, clock)
    caplog.set_level("INFO", "sotto")
    links.bytes[1] = 9 * MIB
    assert slow.may_begin(0.0)
    assert slow.may_begin(1.0)
    links.bytes[1] = 11 * MIB
    assert [slow.may_begin(now) for now in (2.0, 60.9, 61.0, 62.0)] == [False, False, True, False]
    assert slow.figures()["reached"] == [
        {"reason": "11.0 MiB carried of limits.day_mbytes = 10", "until": "2026-12-01 00:00+01:00"}
    ]
    clock.at = datetime(2026, 12, 1, tzinfo=BERLIN)
    assert slow.may_begin(63.0)
    assert [record.getMessage() for record in caplog.records] == [
        "limits: more than 90% of limits.day_mbytes = 10 is used",
        "limits: 11.0 MiB carried of limits.day_mbytes = 10: one round in 60 s",
        "limits: none is reached any more",
    ]


def test_a_device_that_is_to_leave_is_slowed_down_until_it_may(tmp_path: Path, clock: Clock) -> None:
    links = Links()
    found = Looks(options(day_mbytes=10, then="leave", slow_step_s=60), tmp_path, links, clock)
    assert found.may_begin(0.0)
    assert not found.limits.asks_to_leave
    links.bytes[1] = 11 * MIB
    assert [found.may_begin(now) for now in (1.0, 59.0, 60.0, 61.0)] == [False, False, True, False]
    assert found.limits.asks_to_leave
    assert found.may_begin(62.0, is_leaving=True), "what is announced needs a few more rounds"


# -- sensors -----------------------------------------------------------------------------------------------------------


def tell(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_battery_and_mains(tmp_path: Path, clock: Clock) -> None:
    sensors = tmp_path / "class"
    supplies = sensors / "power_supply"
    mains, charged = options(sensors=str(sensors), only_on_mains=True), {"min_battery_percent": 30}

    def may_begin(wanted: LimitOptions) -> bool:
        return Looks(wanted, tmp_path, Links(), clock).may_begin(0.0)

    assert may_begin(mains), "a device without a battery"
    tell(supplies / "mouse", type="Battery", scope="Device", status="Discharging", capacity="5")
    assert may_begin(mains)
    tell(supplies / "BAT0", type="Battery", status="Discharging", capacity="29")
    tell(supplies / "AC", type="Mains", online="0")
    battery = options(sensors=str(sensors), **charged)
    assert not may_begin(mains)
    assert not may_begin(battery)
    tell(supplies / "BAT0", capacity="30")
    assert not may_begin(mains)
    assert may_begin(battery)
    tell(supplies / "BAT0", capacity="5")
    tell(supplies / "AC", online="1")
    assert may_begin(mains)
    assert may_begin(battery)


def test_a_device_that_was_too_warm_cools_down_first(tmp_path: Path, clock: Clock) -> None:
    zone = tmp_path / "class" / "thermal" / "thermal_zone0"
    warm = options(sensors=str(tmp_path / "class"), max_celsius=70)
    with pytest.raises(ConfigError, match="no thermal zone"):
        Looks(warm, tmp_path, Links(), clock)
    tell(zone, temp="69000")
    found = Looks(warm, tmp_path, Links(), clock)
    answers = []
    for step, temperature in enumerate((70000, 70100, 68000, 67000, 69000)):
        tell(zone, temp=str(temperature))
        answers.append(found.may_begin(10.0 * step))
    assert answers == [True, False, False, True, True]


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["limits.then=pause", "limits.day_mbytes=5"], "limits.then"),
        (["limits.then=pause", "limits.day_mbytes=5", "rounds.late=skip"], None),
        (["limits.day_mbytes=5"], None),
        (["limits.then=pause"], None),
        (["limits.day_mbytes=5", "algorithm.name=ad-psgd", "graph.kind=ring"], None),
        (["limits.then=pause", "limits.day_mbytes=5", "algorithm.name=ad-psgd", "graph.kind=ring"], None),
        (["limits.then=leave", "limits.day_mbytes=5", "algorithm.name=ad-psgd", "graph.kind=ring"], "limits.then"),
        (["limits.then=leave", "limits.day_mbytes=5"], None),
        (["limits.then=leave", "limits.day_mbytes=5", "rounds.late=skip"], "limits.then"),
        (["limits.processor_share=0.5", "algorithm.name=ad-psgd", "graph.kind=ring"], None),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: list[str], key: str | None, tmp_path: Path) -> None:
    config = load(environment={}, overrides=settings)
    errors = [each.key for each in validate_config(config, tmp_path, 4) if each.key.startswith("limits")]
    assert errors == ([] if key is None else [key])


@pytest.mark.parametrize("setting", ["hours=22:00", "hours=25:00-03:00", "hours=07:00-07:00", "timezone=Mars/Olympus"])
def test_times_that_cannot_be_read_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="valid: "):
        load(environment={}, overrides=[f"limits.{setting}"])


def test_limits_are_each_devices_own() -> None:
    one, other = (load(environment={}, overrides=[f"limits.day_mbytes={size}"]) for size in (1, 2))
    assert one.run_digest() == other.run_digest() == load(environment={}).run_digest()


# -- real peers --------------------------------------------------------------------------------------------------------

ROUNDS = 120


# What moves Σx must be the gossip alone.
NO_STEPS = ("state.ledger=true", "training.learning_rate=1e-30", "training.momentum=none")


def limited(kits: Path, clock: Clock, limits: str, *, rounds: int, num_peers: int, options: Sequence[str]) -> Devices:
    """Return devices of which peer-1 has a cap of 1 MiB a day."""
    use_one_thread()
    devices = Devices(kits, rounds=rounds, num_peers=num_peers, options=options, wall_clock=clock)
    file = devices.files[1]
    text = file.read_text()
    assert "[limits]" not in text
    file.write_text(text + f'\n[limits]\nday_mbytes = 1\ntimezone = "Europe/Berlin"\n{limits}\n')
    return devices


@pytest.fixture
def devices(tmp_path: Path, clock: Clock) -> Devices:
    settings = (
        # Its messages are large enough for several days.
        "algorithm.name=sgp",
        "rounds.late=skip",
        # Nobody is late before it pauses: it could use up the rounds that it may be skipped.
        "rounds.late_after_s=2",
        "rounds.max_skipped_rounds=5",
        *NO_STEPS,
    )
    return limited(tmp_path / "kits", clock, 'then = "pause"', rounds=ROUNDS, num_peers=3, options=settings)


@pytest.mark.slow
def test_a_peer_pauses_at_its_cap_and_goes_on_the_next_day(devices: Devices, clock: Clock) -> None:
    devices.run(_pause_and_go_on, clock)
    local = devices.daemons[0].local
    folders = [file.parent / "state" for file in devices.files]
    audit = Audit(
        cast(Cluster, SimpleNamespace(setup=local.setup, trainer=local.trainer, state_folders=folders)), "sgp"
    )
    for round_ in range(ROUNDS // 2):
        sum_x, sum_u = audit.total(round_)
        assert sum_u == pytest.approx(3.0, abs=1e-12)
        np.testing.assert_allclose(sum_x, 3.0 * audit.x0, atol=4e-5)


async def _pause_and_go_on(devices: Devices, clock: Clock) -> None:
    for peer in range(3):
        devices.start(peer)

    def paused() -> dict[str, Any]:
        found: dict[str, Any] = devices.status(1)["limits"]
        return found

    await devices.until(lambda: devices.is_there(1) and bool(paused()["reached"]), within_s=30)
    assert paused()["reached"][0]["until"] == "2026-12-01 00:00+01:00"
    assert "limits" not in devices.status(0)
    seen = await open_observer(devices.kits).look()
    assert [peer.limits for peer in seen.peers[::2]] == [(), ()]
    assert seen.peers[1].limits[0].startswith("paused until 2026-12-01 00:00+01:00: ")
    await asyncio.sleep(1.0)
    held_at = devices.status(1)["round"]
    # The others go on for as many rounds as they may skip, then they wait.
    await devices.until(lambda: devices.status(0)["round"] > held_at, within_s=30)
    await asyncio.sleep(1.0)
    assert devices.status(1)["round"] == held_at
    assert devices.status(0)["round"] < ROUNDS
    # What was counted survives a kill: it does not begin the day anew.
    await devices.kill(1)
    devices.start(1)
    await devices.until(lambda: devices.is_there(1) and bool(paused()["reached"]), within_s=30)
    assert devices.status(1)["round"] == held_at
    for day in range(1, 100):
        if all(task.done() for task in devices.tasks.values()):
            break
        clock.at = datetime(2026, 12, 1 + day % 31, tzinfo=BERLIN)
        await asyncio.sleep(0.2)
    assert [await devices.tasks[peer] for peer in range(3)] == [0, 0, 0]
    assert [devices.daemons[peer].loop.round for peer in range(3)] == [ROUNDS] * 3
    for daemon in devices.daemons.values():
        daemon.close()


@pytest.mark.slow
def test_a_peer_leaves_the_run_at_its_cap_and_takes_no_weight_with_it(tmp_path: Path, clock: Clock) -> None:
    settings = ("algorithm.name=sgp", *NO_STEPS)
    devices = limited(tmp_path / "kits", clock, 'then = "leave"', rounds=ROUNDS, num_peers=3, options=settings)
    devices.run(_leave)


async def _leave(devices: Devices) -> None:
    for peer in range(3):
        devices.start(peer)
    await devices.until(lambda: devices.is_there(1) and bool(devices.status(1)["limits"]["reached"]), within_s=30)
    assert devices.status(1)["limits"]["then"] == "leave"
    async with asyncio.timeout(60):
        assert await devices.tasks[1] == 0
    assert devices.daemons[1].loop.has_left
    assert devices.daemons[1].loop.round < ROUNDS
    await devices.until(lambda: devices.members(0) == ["peer-0", "peer-2"])
    assert devices.standing(0, "peer-1") == "left"
    await devices.until(lambda: devices.tasks[0].done() and devices.tasks[2].done())
    # The heir has what it had.
    weights = [devices.participant(peer).algorithm.u for peer in (0, 2)]
    assert sum(weights) == pytest.approx(3.0, abs=1e-9)
    for daemon in devices.daemons.values():
        daemon.close()
    # Whoever starts it again finds that it has left, also on the next day.
    devices.start(1)
    async with asyncio.timeout(60):
        assert await devices.tasks[1] == 0
    assert devices.daemons[1].loop.has_left
    devices.daemons[1].close()


@pytest.mark.slow
def test_a_peer_without_rounds_begins_no_exchange_at_its_cap_and_still_answers(tmp_path: Path, clock: Clock) -> None:
    settings = ("algorithm.name=ad-psgd", "graph.kind=ring", "transport.linger_s=2")
    limits = 'then = "slow"\nslow_step_s = 1.0'
    asyncio.run(_answer(limited(tmp_path / "kits", clock, limits, rounds=400, num_peers=3, options=settings)))


async def _answer(devices: Devices) -> None:
    for peer in range(3):
        devices.start(peer)
    await devices.until(lambda: devices.is_there(1) and bool(devices.status(1)["limits"]["reached"]), within_s=60)
    begun_at, at = devices.status(1), devices.status(0)
    await asyncio.sleep(3.0)
    later, others = devices.status(1), devices.status(0)
    steps = later["round"] - begun_at["round"]
    assert steps <= 4 < others["round"] - at["round"], "only this peer is slowed down"
    assert later["exchanges"] - begun_at["exchanges"] > steps, "it answers its neighbours"
    assert later["limits"]["day_bytes"] > begun_at["limits"]["day_bytes"], "what answers cost is counted"
    await devices.stop(0, 1, 2)


@pytest.mark.slow
def test_a_peer_that_may_not_leave_any_more_is_slowed_down_and_says_why(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    # A departure could not take effect before the run ends.
    settings = ("algorithm.name=sgp", *NO_STEPS)
    limits = 'then = "leave"\nslow_step_s = 0.2'
    devices = limited(tmp_path / "kits", clock, limits, rounds=10, num_peers=3, options=settings)
    devices.run(_stay)
    said = [record.getMessage() for record in caplog.records]
    assert any("limits: this peer cannot leave the run now: the run ends after round 9" in line for line in said), said


async def _stay(devices: Devices) -> None:
    for peer in range(3):
        devices.start(peer)
    async with asyncio.timeout(60):
        assert [await devices.tasks[peer] for peer in range(3)] == [0, 0, 0]
    assert [devices.daemons[peer].loop.round for peer in range(3)] == [10] * 3
    assert not devices.daemons[1].loop.has_left
    for daemon in devices.daemons.values():
        daemon.close()
