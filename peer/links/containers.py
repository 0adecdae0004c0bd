"""Limits what leaves containers that run already, each named by the id of its first process."""

from __future__ import annotations

import subprocess

from peer.errors import LinkError
from peer.links.profiles import Profile
from peer.links.tc import limit_upload


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
