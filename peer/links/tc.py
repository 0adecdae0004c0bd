"""Settings of the kernel: commands of iproute2, the queue that limits an upload, and limits on what leaves containers
that run already, each named by the id of its first process."""

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


def process_of(container: str) -> int:
    """Return the first process of a container. Raises LinkError if it does not run."""
    command = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LinkError("docker is not installed, so containers cannot be found by their ids") from None
    if done.returncode or not int(done.stdout):
        raise LinkError(f"container {container} does not run: {done.stderr.strip()}")
    return int(done.stdout)


def shape(pid: int, interface: str, profile: Profile) -> str | None:
    """Limit the traffic that leaves a container, named by the id of its first process; return a sentence on limits that
    could not be set.

    netem adds the latency and the loss where the kernel has it. Raises LinkError if not even the rate can be limited,
    or if netem refuses what it is asked for. Shaping again replaces earlier limits.
    """
    release(pid, interface)
    inside = ["nsenter", "--target", str(pid), "--net", "tc"]
    if profile.up_kbit:
        limit_upload(inside, interface, profile, big=False)
    if not (profile.latency_ms or profile.loss):
        return None
    where = ["parent", "1:1"] if profile.up_kbit else ["root"]
    options = ["netem", "delay", f"{profile.latency_ms}ms", "loss", f"{profile.loss * 100}%"]
    command = [*inside, "qdisc", "add", "dev", interface, *where, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    if "unknown" in done.stderr:
        return f"no latency and no loss: this kernel has no netem ({done.stderr.strip()})"
    raise LinkError(f"{' '.join(command)}: {done.stderr.strip()}")


def release(pid: int, interface: str) -> None:
    """Undo `shape`."""
    command = ["nsenter", "--target", str(pid), "--net", "tc", "qdisc", "del", "dev", interface, "root"]
    subprocess.run(command, capture_output=True, check=False)
