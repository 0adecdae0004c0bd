"""Whether this device lets its peer begin a round, or a step: data plan, hours, battery, temperature.

Traffic is counted as TCP payload with segment headers, sent and received, including TLS, heartbeats, retransmissions
and relayed messages; without TLS and headers where the kernel cannot be asked. The setup of connections is not counted.
The counts are kept in the state folder: saved for each MiB, and at the end.
"""

from __future__ import annotations

import logging
import re
import zoneinfo
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from peer.config.options import LimitOptions
from peer.daemon.device.limit_rules import Reached, Usage, check_hours, check_usage, local_time, nearly_used
from peer.errors import ConfigError, StateError
from peer.net.counters import LinkCounters
from peer.state.disk import Disk
from peer.state.kept_file import KeptFile

log = logging.getLogger("sotto")

USAGE = KeptFile(
    "usage.json",
    asdict,
    lambda tree: Usage(str(tree["day"]), int(tree["day_bytes"]), int(tree["month_bytes"])),
    "restore it from a copy, or delete it to count this day and month from 0",
)
_SAVE_EVERY_BYTES = 1 << 20
_LOOK_EVERY_S = 5.0
"""Interval between readings of battery and temperature."""
_COOLED_BY = 3.0
"""Degrees below the limit at which a device that was too warm works again."""


Counters: TypeAlias = Callable[[], Mapping[int, LinkCounters]]
"""Returns the traffic counters of each neighbour (`peer.daemon.neighbors.Neighbors.counters`)."""
Sync: TypeAlias = Callable[[Callable[[], None]], Awaitable[None]]
"""Calls a function that waits for the disk, in a thread (`peer.daemon.runtime.Runtime.sync`)."""


class Limits:
    """The limits of one device."""

    def __init__(
        self, options: LimitOptions, disk: Disk, counters: Counters, *, sync: Sync, wall_clock: Callable[[], float]
    ) -> None:
        """`wall_clock` returns the seconds since 1970. Raises StateError if the counts cannot be read, and ConfigError
        if there is no thermometer."""
        self._options, self._disk, self._counters = options, disk, counters
        self._sync, self._wall_clock = sync, wall_clock
        self._zone = None if options.timezone == "local" else zoneinfo.ZoneInfo(options.timezone)
        self._usage = self._saved = USAGE.read(disk) or Usage()
        self._counted: dict[int, int] = {}
        """Neighbour → bytes of this process that are part of the usage."""
        self._reached: list[Reached] = []
        self._of_device: list[Reached] = []
        self._looked_at = self._began_at = float("-inf")
        self._is_hot = False
        self._said: set[str] = set()
        """Keys of the limits already logged as reached, or nearly."""
        if options.max_celsius is not None and _celsius(Path(options.sensors)) is None:
            problem = f"no thermal zone under {options.sensors} reports a temperature; remove it"
            raise ConfigError(problem, key="limits.max_celsius", value=options.max_celsius)

    async def may_begin(self, now: float, *, is_leaving: bool = False) -> bool:
        """Return whether a round may begin, and take it that it does. `now`: seconds on the clock of the run.
        `is_leaving`: whether the peer has announced that it leaves, and has to complete a few more rounds for that.
        Raises StateError."""
        self._look(now)
        if self._usage.day != self._saved.day or self._usage.day_bytes - self._saved.day_bytes >= _SAVE_EVERY_BYTES:
            # The loop must not wait for the disk: heartbeats are answered meanwhile.
            await self._sync(self._save)
        is_held = self._options.then == "pause" or now < self._began_at + self._options.slow_step_s
        if self._reached and is_held and not is_leaving:
            return False
        self._began_at = now
        return True

    @property
    def asks_to_leave(self) -> bool:
        """Whether a limit is reached at which the device leaves the run."""
        return self._options.then == "leave" and bool(self._reached)

    def figures(self) -> dict[str, object]:
        """Return the fields for `sotto status`."""
        return {
            "then": self._options.then,
            "day_bytes": self._usage.day_bytes,
            "month_bytes": self._usage.month_bytes,
            "reached": [
                {"reason": each.reason, "until": each.until and each.until.isoformat(sep=" ", timespec="minutes")}
                for each in self._reached
            ],
            "warnings": nearly_used(self._options, self._usage),
        }

    def close(self) -> None:
        """Save the counts."""
        if self._counted:
            self._count(local_time(self._wall_clock(), self._zone).date().isoformat())
            try:
                self._save()
            except StateError as error:
                # The peer has come to its end in good order otherwise.
                log.error("%s", error)

    def _look(self, now: float) -> None:
        """Find out which limits are reached."""
        at = local_time(self._wall_clock(), self._zone)
        self._count(at.date().isoformat())
        if now >= self._looked_at + _LOOK_EVERY_S:
            self._looked_at, self._of_device = now, [*self._look_at_device()]
        self._reached = [
            *check_usage(self._options, self._usage, at, self._zone),
            *check_hours(self._options, at, self._zone),
            *self._of_device,
        ]
        self._say()

    def _say(self) -> None:
        """Log each new limit once."""
        held = {
            "slow": f"one round in {self._options.slow_step_s:g} s",
            "pause": "begins no round",
            "leave": "leaves the run",
        }[self._options.then]
        # Figures change from look to look; the reason does not.
        lines = {re.sub(r"^[\d.]+ ", "", each.reason): f"{each.reason}: {held}" for each in self._reached}
        lines.update({sentence: sentence for sentence in nearly_used(self._options, self._usage)})
        for key in lines.keys() - self._said:
            log.warning("limits: %s", lines[key])
        if self._said and not lines:
            log.info("limits: none is reached any more")
        self._said = {*lines}

    def _count(self, day: str) -> None:
        self._usage = self._usage.at(day)
        for peer, counters in self._counters().items():
            carried, before = _carried(counters), self._counted.get(peer, 0)
            # A counter that a connection could not provide may fall and rise again: that is counted once.
            self._counted[peer] = max(carried, before)
            self._usage = self._usage.plus(self._counted[peer] - before)

    def _save(self) -> None:
        usage = self._usage
        USAGE.keep(self._disk, usage)
        self._saved = usage

    def _look_at_device(self) -> Iterator[Reached]:
        options, sensors = self._options, Path(self._options.sensors)
        if options.only_on_mains or options.min_battery_percent is not None:
            on_mains, percent = _power(sensors)
            if options.only_on_mains and not on_mains:
                yield Reached("not on mains (limits.only_on_mains)")
            least = options.min_battery_percent
            if least is not None and not on_mains and percent is not None and percent < least:
                yield Reached(f"{percent} % left in the battery, of limits.min_battery_percent = {least}")
        if options.max_celsius is not None:
            celsius = _celsius(sensors)
            self._is_hot = celsius is not None and celsius > options.max_celsius - _COOLED_BY * self._is_hot
            if self._is_hot:
                yield Reached(f"{celsius:.0f} °C, of limits.max_celsius = {options.max_celsius:g}")


def _carried(counters: LinkCounters) -> int:
    """Return the bytes of a link in both directions, from the lowest layer that was counted."""
    for sent, received in (
        (counters.packet_bytes_sent, counters.packet_bytes_received),
        (counters.socket_bytes_sent, counters.socket_bytes_received),
    ):
        if sent is not None and received is not None:
            return sent + received
    return counters.protobuf_bytes_sent + counters.protobuf_bytes_received


def _power(sensors: Path) -> tuple[bool, int | None]:
    """Return whether the device is on mains, and the charge of its least charged battery in percent."""
    percents, discharges, is_plugged_in = [], False, False
    for supply in sorted((sensors / "power_supply").glob("*")):
        if _text(supply / "type") != "Battery":
            is_plugged_in = is_plugged_in or _text(supply / "online") == "1"
        # Mice and headsets have batteries too.
        elif _text(supply / "scope") != "Device":
            discharges = discharges or _text(supply / "status") not in ("Charging", "Full", "Not charging")
            if (percent := _text(supply / "capacity")).isdecimal():
                percents.append(int(percent))
    return is_plugged_in or not discharges, min(percents, default=None)


def _celsius(sensors: Path) -> float | None:
    """Return the temperature of the warmest zone; None if none reports one."""
    found = [_text(path) for path in (sensors / "thermal").glob("thermal_zone*/temp")]
    return max((int(text) / 1000 for text in found if re.fullmatch(r"-?\d+", text)), default=None)


def _text(path: Path) -> str:
    """Return the text of a kernel file; empty if it cannot be read, such as that of a sensor that is switched off."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
