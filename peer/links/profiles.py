"""Named links: rates, latency and loss."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


_FILE = Path(__file__).with_name("profiles.toml")
PROFILES: Mapping[str, Profile] = {
    name: Profile(**fields) for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


def find(name: str) -> Profile:
    """Return a profile by its name. Raises ConfigError that lists the names."""
    if name not in PROFILES:
        raise ConfigError("unknown link profile", value=name, valid=", ".join(PROFILES))
    return PROFILES[name]
