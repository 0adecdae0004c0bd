"""Settings of the kernel: commands of iproute2, and the queue that limits an upload."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from peer.errors import LinkError
from peer.links.profiles import Profile

BIG_SEGMENT_BYTES = 16_000
"""TCP hands over segments of up to this size where the rate is high: one packet each would cost too much CPU."""
_SEGMENT_BYTES = 1514
_MIN_QUEUE_BYTES = 64_000


def missing() -> str | None:
    """Return why nothing can be shaped here, in a sentence; None if it can."""
    if os.geteuid() != 0:
        return "shaping links needs root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed ({package})"
    return None


def limit_upload(tc: Sequence[str], interface: str, profile: Profile, *, big: bool) -> None:
    """Limit what leaves an interface with tbf. `tc` is the command, in the right namespace; `big` allows big segments.

    Raises LinkError if the kernel refuses.
    """
    burst = BIG_SEGMENT_BYTES if big else 2 * _SEGMENT_BYTES
    rate = ["rate", f"{round(profile.up_kbit * 1000)}bit", "burst", str(burst)]
    room = ["limit", str(queue_bytes(profile, profile.up_kbit))]
    run(*tc, "qdisc", "add", "dev", interface, "root", "handle", "1:", "tbf", *rate, *room)


def queue_bytes(profile: Profile, rate_kbit: float) -> int:
    """Return how much may wait for its turn at a rate."""
    return max(_MIN_QUEUE_BYTES, round(rate_kbit * profile.queue_ms / 8))


def run(*command: str) -> str:
    """Run a command; return its output. Raises LinkError with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
