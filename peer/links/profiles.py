"""Named links: rates, latency and loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The link of one device to the network that joins all devices."""

    up_kbit: float
    """Upload in units of 1000 bit/s, Ethernet headers included; 0 means no limit."""
    down_kbit: float
    """Download."""
    latency_ms: float
    """Latency from one device to another, one way, without queues and serialisation."""
    loss: float = 0.0
    """Fraction of packets lost at random in each direction."""
    queue_ms: float = 500.0
    """Length of the queue before packets are dropped, in milliseconds at the rate."""
    source: str = ""
    """Origin of the figures."""

    def __post_init__(self) -> None:
        if min(self.up_kbit, self.down_kbit, self.latency_ms) < 0 or not 0 <= self.loss < 1 or self.queue_ms <= 0:
            raise ValueError(f"{self} is no link: rates and latency are not negative, loss is a fraction below 1")

    @property
    def round_trip_ms(self) -> float:
        return 2 * self.latency_ms


def _symmetric(rate_kbit: float, latency_ms: float, source: str) -> Profile:
    return Profile(up_kbit=rate_kbit, down_kbit=rate_kbit, latency_ms=latency_ms, source=source)


_MONIQUA = "Moniqua, section 6"
_TYPICAL = "typical of its kind"

PROFILES: Mapping[str, Profile] = {
    "moniqua-200mbit-0.15ms": _symmetric(200_000, 0.15, _MONIQUA),
    "moniqua-100mbit-0.15ms": _symmetric(100_000, 0.15, _MONIQUA),
    "moniqua-100mbit-1ms": _symmetric(100_000, 1.0, _MONIQUA),
    "moniqua-1mbit-1ms": _symmetric(1_000, 1.0, _MONIQUA),
    "moniqua-asynchronous": _symmetric(20_000, 0.15, _MONIQUA),
    "10mbit": _symmetric(10_000, 1.0, "between the paper's profiles"),
    "3g": Profile(up_kbit=768, down_kbit=1_600, latency_ms=75, source=_TYPICAL),
    "lte": Profile(up_kbit=5_000, down_kbit=12_000, latency_ms=35, source=_TYPICAL),
    "dsl": Profile(up_kbit=1_000, down_kbit=16_000, latency_ms=15, source=_TYPICAL),
    "satellite": Profile(up_kbit=3_000, down_kbit=25_000, latency_ms=300, queue_ms=1000, source=_TYPICAL),
    "lossy-wifi": Profile(up_kbit=20_000, down_kbit=20_000, latency_ms=3, loss=0.01, source=_TYPICAL),
    "unshaped": Profile(up_kbit=0, down_kbit=0, latency_ms=0, source="as fast as the machine"),
}


def find(name: str) -> Profile:
    """Return a profile by its name. Raises ConfigError that lists the names."""
    if name not in PROFILES:
        raise ConfigError("unknown link profile", value=name, valid=", ".join(PROFILES))
    return PROFILES[name]
