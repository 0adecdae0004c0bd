"""Days, months and hours of the wall clock, and their effect on limits. Reads no clock and no file.

Times are seconds since 1970; a zone of None is that of the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, tzinfo

from peer.config.options import LimitOptions

_WARN_AT = 0.9
_MIB = 1 << 20


@dataclass(frozen=True)
class Usage:
    """Traffic of the links in one calendar day, and in its month."""

    day: str = ""
    """The day in the form 2026-11-23."""
    day_bytes: int = 0
    month_bytes: int = 0

    def at(self, day: str) -> Usage:
        """Return the usage on another day: what a new day or month has not carried is 0."""
        if day == self.day:
            return self
        return Usage(day, 0, self.month_bytes if day[:7] == self.day[:7] else 0)

    def plus(self, size: int) -> Usage:
        """Return the usage after `size` more bytes."""
        return replace(self, day_bytes=self.day_bytes + size, month_bytes=self.month_bytes + size)


@dataclass(frozen=True)
class Reached:
    """A limit that is reached."""

    reason: str
    until: datetime | None = None
    """When it is lifted, if that is known."""


def local_time(now: float, zone: tzinfo | None) -> datetime:
    """Return the time on the wall, with its zone."""
    return datetime.fromtimestamp(now, zone) if zone is not None else datetime.fromtimestamp(now).astimezone()


def check_usage(options: LimitOptions, usage: Usage, time: datetime, zone: tzinfo | None) -> list[Reached]:
    """Return which limits on traffic are reached."""
    found = []
    next_day = _midnight(time + timedelta(days=1), zone)
    next_month = _midnight(time.replace(day=1) + timedelta(days=31), zone, day=1)
    for key, carried, limit, until in (
        ("day_mbytes", usage.day_bytes, options.day_mbytes, next_day),
        ("month_mbytes", usage.month_bytes, options.month_mbytes, next_month),
    ):
        if limit is not None and carried >= limit * _MIB:
            found.append(Reached(f"{carried / _MIB:.1f} MiB carried of limits.{key} = {limit}", until))
    return found


def nearly_used(options: LimitOptions, usage: Usage) -> list[str]:
    """Return a sentence for each limit on traffic of which 90 % are used, but not all."""
    return [
        f"more than {_WARN_AT:.0%} of limits.{key} = {limit} is used"
        for key, carried, limit in (
            ("day_mbytes", usage.day_bytes, options.day_mbytes),
            ("month_mbytes", usage.month_bytes, options.month_mbytes),
        )
        if limit is not None and _WARN_AT * limit * _MIB <= carried < limit * _MIB
    ]


def check_hours(options: LimitOptions, time: datetime, zone: tzinfo | None) -> list[Reached]:
    """Return whether it is outside `hours`."""
    if options.working_minutes is None:
        return []
    begin, end = options.working_minutes
    minute = 60 * time.hour + time.minute
    works = begin <= minute < end if begin < end else minute >= begin or minute < end
    if works:
        return []
    day = time if minute < begin else time + timedelta(days=1)
    until = _midnight(day, zone, minutes=begin)
    return [Reached(f'outside limits.hours = "{options.hours}"', until)]


def _midnight(time: datetime, zone: tzinfo | None, *, day: int | None = None, minutes: int = 0) -> datetime:
    """Return when the day of `time` (or `day` of its month) is `minutes` old by the clock on the wall."""
    # Built from the date rather than by adding hours: a day may have 23 or 25 of them.
    wall = datetime(time.year, time.month, day or time.day, minutes // 60, minutes % 60, tzinfo=zone)
    # There and back: a time that the change to summer time leaves out is shown as it will be read off the clock.
    return local_time(wall.timestamp(), zone)
