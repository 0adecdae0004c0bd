"""Network namespaces that are joined by links of given rate, latency and loss.

Each device has one interface, a TAP. tbf on it limits what is sent: TCP feels that queue. A program in C
(delay_switch.c) that holds all the TAPs adds latency and loss and serializes what is received; it needs nothing of the
kernel but TAP and tbf, works where there is no netem, and the links are gone when it ends, however it ends. Namespaces
carry a prefix and the id of the process that made them, so that `clean` finds those of a process that is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from peer.errors import LinkError
from peer.files import make_own_folder
from peer.links import tc
from peer.links.profiles import Profile
from peer.links.tc import BIG_SEGMENT_BYTES, limit_upload, queue_bytes, run

PREFIX = "sotto-link"
INTERFACE = "tap0"
_BIG_FROM_KBIT = 50_000
_SWITCH_MS = 0.07
"""Measured time of crossing the switch, one way; the latency that it adds is that much shorter."""
_REMOVE_S = 10.0
_NAMESPACES = Path("/run/netns")
_SWITCH = Path(__file__).with_name("delay_switch.c")

_serial = itertools.count()


def missing() -> str | None:
    """Return why links cannot be made here, in a sentence; None if they can."""
    if (reason := tc.missing()) is not None:
        return reason
    if shutil.which("gcc") is None:
        return "gcc is not installed (gcc and libc6-dev)"
    if not Path("/dev/net/tun").exists():
        return "the kernel has no TAP devices (/dev/net/tun)"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        add_namespace(name)
    except LinkError as error:
        return f"network namespaces cannot be made here: {error}"
    remove_namespace(name)
    return None


class LinkNetwork:
    """Devices in namespaces of their own, every one reachable from every other, until it is closed.

    As a context manager it is closed at the end, however that comes.
    """

    def __init__(self, profiles: Sequence[Profile], *, seed: int = 0) -> None:
        """Build it: one device for each profile. The latency from a to b is the mean of those of the two profiles, and
        a packet survives both of their losses. Raises LinkError if the kernel refuses; nothing is left behind then."""
        self.profiles = tuple(profiles)
        self.num_devices = len(self.profiles)
        self._names = [f"{PREFIX}-{os.getpid()}-{next(_serial)}" for _ in self.profiles]
        self._switch: subprocess.Popen[str] | None = None
        self.counters: list[Mapping[str, int]] = []
        """The switch's counters for each device, known once the network is closed: frames, their bytes, those dropped
        because they found a queue full, and those lost on purpose."""
        try:
            for name in self._names:
                add_namespace(name)
            self._start_switch(seed)
            for device in range(self.num_devices):
                self._configure(device)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def address(self, device: int) -> str:
        """Return the address of a device."""
        return f"10.78.{device // 250}.{device % 250 + 1}"

    def namespace(self, device: int) -> str:
        """Return the name of a device's namespace."""
        return self._names[device]

    def command(self, device: int) -> list[str]:
        """Return the prefix of a command that is to run on a device."""
        return ["ip", "netns", "exec", self.namespace(device)]

    def latency_ms(self, sender: int, receiver: int) -> float:
        """Return the latency that was asked for, one way."""
        return (self.profiles[sender].latency_ms + self.profiles[receiver].latency_ms) / 2

    def rate_kbit(self, sender: int, receiver: int) -> float:
        """Return the rate that was asked for, 0 where there is no limit."""
        limits = (self.profiles[sender].up_kbit, self.profiles[receiver].down_kbit)
        return min((limit for limit in limits if limit), default=0.0)

    def round_trip_ms(self, sender: int, receiver: int, frame_bytes: int) -> float:
        """Return the round trip of a frame on the requested link: both latencies, and its turn on the link."""
        result = 0.0
        for pair in ((sender, receiver), (receiver, sender)):
            rate = self.rate_kbit(*pair)
            result += self.latency_ms(*pair) + (frame_bytes * 8 / rate if rate else 0.0)
        return result

    def sent_bytes(self, device: int) -> int:
        """Return how many bytes have left a device's interface, Ethernet headers included."""
        return int(run(*self.command(device), "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"))

    def close(self) -> None:
        """Kill all processes on the devices, and remove everything."""
        for name in self._names:
            remove_namespace(name)
        if self._switch is not None:
            assert self._switch.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._switch.stdin.close()
            try:
                self._switch.wait(5)
            except subprocess.TimeoutExpired:
                self._switch.kill()
                self._switch.wait()
            assert self._switch.stdout is not None
            self.counters = [_counters(line) for line in self._switch.stdout.read().splitlines()]
            self._switch.stdout.close()
            self._switch = None

    def _start_switch(self, seed: int) -> None:
        lines = [f"seed {seed}"]
        for device, profile in enumerate(self.profiles):
            rate = round(profile.down_kbit * 1000)
            path = _NAMESPACES / self._names[device]
            lines.append(f"port {device} {path} {INTERFACE} {rate} {queue_bytes(profile, profile.down_kbit)}")
        for sender, receiver in itertools.permutations(range(self.num_devices), 2):
            latency_ns = round(max(0.0, self.latency_ms(sender, receiver) - _SWITCH_MS) * 1e6)
            survives = (1 - self.profiles[sender].loss) * (1 - self.profiles[receiver].loss)
            lines.append(f"link {sender} {receiver} {latency_ns} {round((1 - survives) * 1e6)}")
        self._switch = subprocess.Popen(
            [str(_built_switch())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write("\n".join([*lines, "go", ""]))
        self._switch.stdin.flush()
        if self._switch.stdout.readline() != "ready\n":
            assert self._switch.stderr is not None
            raise LinkError(self._switch.stderr.read().strip() or "the switch ended at once")

    def _configure(self, device: int) -> None:
        name, profile = self._names[device], self.profiles[device]
        # Announcements of IPv6 would be counted among the bytes of the links.
        quiet = ["sysctl", "-qw", f"net.ipv6.conf.{INTERFACE}.disable_ipv6=1"]
        subprocess.run([*self.command(device), *quiet], capture_output=True, check=False)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", INTERFACE, "address", _hardware_address(device), "txqueuelen", "1000")
        big = not profile.up_kbit or min(profile.up_kbit, profile.down_kbit or profile.up_kbit) >= _BIG_FROM_KBIT
        if profile.loss or not big:
            # One segment a packet, as on a wire; several at once would also be lost at once.
            run("ip", "-n", name, "link", "set", INTERFACE, "gso_max_segs", "1")
        elif profile.up_kbit:
            run("ip", "-n", name, "link", "set", INTERFACE, "gso_max_size", str(BIG_SEGMENT_BYTES))
        run("ip", "-n", name, "address", "add", f"{self.address(device)}/16", "dev", INTERFACE)
        run("ip", "-n", name, "link", "set", INTERFACE, "up")
        for other in range(self.num_devices):
            if other != device:
                where = [self.address(other), "lladdr", _hardware_address(other), "dev", INTERFACE]
                run("ip", "-n", name, "neighbour", "replace", *where, "nud", "permanent")
        if profile.up_kbit:
            limit_upload(["tc", "-n", name], INTERFACE, profile, big=big and not profile.loss)


def clean() -> list[str]:
    """Remove the namespaces of processes that are gone, with the processes inside; return their names."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    removed = []
    for line in listing.splitlines():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d+", line.split()[0])
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            remove_namespace(owner[0])
            removed.append(owner[0])
    return removed


def add_namespace(name: str) -> None:
    """Make a namespace whose name carries this process's id. Raises LinkError if the kernel refuses."""
    # A process that had this id before, and was killed, may have left it.
    if (_NAMESPACES / name).exists():
        remove_namespace(name)
    run("ip", "netns", "add", name)


def remove_namespace(name: str) -> None:
    """Kill the processes in a namespace and remove it."""
    until = time.monotonic() + _REMOVE_S
    while time.monotonic() < until:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        if not inside.split():
            break
        for pid in inside.split():
            subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
        time.sleep(0.01)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _built_switch() -> Path:
    """Return the compiled switch, made anew when its source has changed. Raises LinkError."""
    source = _SWITCH.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}-{os.geteuid()}"
    try:
        # Its content is run, perhaps as root, and everybody may make a folder or a link of this name.
        make_own_folder(folder, 0o700)
    except OSError as error:
        raise LinkError(f"{folder} cannot be used: {error.strerror}; move it away") from None
    program = folder / f"delay_switch-{hashlib.sha256(source).hexdigest()[:16]}"
    if not program.exists():
        beside = folder / f".{os.getpid()}"
        command = ["gcc", "-O2", "-Wall", "-o", str(beside), str(_SWITCH)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkError(f"the switch cannot be compiled: {done.stderr.strip()}")
        beside.rename(program)
    return program


def _hardware_address(device: int) -> str:
    return f"02:00:00:00:{device >> 8:02x}:{device & 255:02x}"


def _counters(line: str) -> Mapping[str, int]:
    words = line.split()
    return dict(zip(words[2::2], map(int, words[3::2]), strict=True))
