"""Bare devices for tests: each a Debian that its own systemd has booted, in namespaces of its own, with a cable.

All share one base system below an overlay, so that each installs packages, adds users and enables services for itself.
What a device runs is in a PID namespace below a process of the test, and its network and mounts are in namespaces of
another one: both end with the test, however it ends. A test that was killed leaves files and empty control groups.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

_PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates,systemd-sysv,dbus,iproute2,openssh-server"
_BOOT_S = 120.0
_CGROUPS = [Path("/sys/fs/cgroup") / part for part in ("systemd", "unified", "")]
"""Where systemd may keep its groups: version 1, both side by side, version 2."""

_serial = itertools.count()


def missing() -> str | None:
    """Return why there can be no devices here, in a sentence; None if there can."""
    if os.geteuid() != 0:
        return "namespaces, overlays and loop devices need root"
    needed = {
        "ip": "iproute2",
        "mkfs.ext4": "e2fsprogs",
        "systemd-nspawn": "systemd-container",
        "debootstrap": "debootstrap",
    }
    for tool, package in needed.items():
        if shutil.which(tool) is None:
            return f"{tool} is not installed ({package})"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlays"
    return None


def base_system(kept: Path) -> Path:
    """Return the root folder of a Debian that boots, made if `kept` has none. Raises CalledProcessError."""
    folder = kept / "device"
    if not folder.exists():
        beside = folder.with_name(".device.new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(beside)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        # An empty one is filled at the first boot, with another identity for each device.
        (beside / "etc" / "machine-id").write_text("")
        beside.rename(folder)
    return folder


_DISK_BYTES = 8 << 30
_PLACE = """
mkfs.ext4 -q "$2/disk.img"
mkdir "$2/disk" "$2/root"
mount -o loop "$2/disk.img" "$2/disk"
mkdir "$2/disk/upper" "$2/disk/work"
mount -t overlay overlay -o lowerdir="$1",upperdir="$2/disk/upper",workdir="$2/disk/work" "$2/root"
ip link set lo up
echo ready
exec sleep infinity
"""
_BOOT = """
for part in $1; do mkdir -p $part; echo $$ > $part/cgroup.procs; done
exec nsenter --target $2 --mount --net unshare --pid --fork --kill-child --mount-proc systemd-nspawn --quiet --boot \
  --register=no --keep-unit --link-journal=no --console=pipe --resolv-conf=off --timezone=off --machine=$3 \
  --directory=$4
"""


class Device:
    """A system with a network that joins it to the other devices; switched off at first."""

    def __init__(self, address: str, base: Path, folder: Path) -> None:
        """Make it; `base` is a system's root folder, which stays as it is, `folder` holds what the device changes.

        Raises RuntimeError if the kernel refuses.
        """
        self.address = address
        self._folder, self._log = folder, folder / "console.log"
        group = f"sotto-device-{os.getpid()}-{next(_serial)}"
        self._groups = [part / group for part in _CGROUPS if (part / "cgroup.procs").exists()]
        self._at = folder / "root"
        folder.mkdir(parents=True)
        # A disk of its own is one file to remove, rather than 50,000.
        with (folder / "disk.img").open("wb") as disk:
            disk.truncate(_DISK_BYTES)
        spaces = ["unshare", "--mount", "--net", "--propagation", "private", "setpriv", "--pdeathsig", "KILL"]
        self._place = subprocess.Popen(
            [*spaces, "sh", "-ec", _PLACE, "sh", str(base), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._place.stdout is not None
        if (said := self._place.stdout.readline()) != "ready\n":
            raise RuntimeError(f"a device cannot be made: {said}")
        self.root = Path(f"/proc/{self._place.pid}/root{self._at}")
        """Where its files are seen from outside."""
        self._system: subprocess.Popen[bytes] | None = None

    def connect(self, other: Device) -> None:
        """Lay a cable between two devices. Raises RuntimeError."""
        ends = [["eth0", "netns", str(device._place.pid)] for device in (self, other)]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for device in (self, other):
            inside = ["nsenter", "--target", str(device._place.pid), "--net", "ip"]
            _run(*inside, "address", "add", f"{device.address}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")

    def boot(self) -> None:
        """Switch it on; return when its systemd has started what is enabled. Raises RuntimeError if that fails."""
        name = f"device-{self.address.rpartition('.')[2]}"
        words = [" ".join(map(str, self._groups)), str(self._place.pid), name, str(self._at)]
        with self._log.open("ab") as log:
            self._system = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "sh", "-ec", _BOOT, "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + _BOOT_S
        while time.monotonic() < until and self._system.poll() is None:
            if "running" in self.shell("systemctl is-system-running --wait || true", check=False):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{name} does not start: {self._log.read_text(errors='replace')[-2000:]}")

    def shell(self, script: str, *, check: bool = True) -> str:
        """Run lines as root, as after a login; return what they printed.

        Raises RuntimeError with the last words if one fails, unless `check` is false.
        """
        if (first := self._first_process()) is None:
            if check:
                raise RuntimeError(f"{self.address} does not run: {self._log.read_text(errors='replace')[-2000:]}")
            return ""
        spaces = [f"--{name}" for name in ("mount", "uts", "ipc", "net", "pid", "cgroup", "root")]
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        login = ["env", "--ignore-environment", "--chdir=/root", "HOME=/root", path, "sh", "-exc", script]
        command = ["nsenter", "--target", str(first), *spaces, *login]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{self.address}: {(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def cut_power(self) -> None:
        """Switch it off in the middle of what it does."""
        if self._system is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._system.pid, signal.SIGKILL)
            self._system.wait()
            self._system = None
        for group in self._groups:
            _remove_groups(group)

    def close(self) -> None:
        """Cut its power and give its place back, with more than a gigabyte that it has written."""
        self.cut_power()
        self._place.kill()
        self._place.communicate()
        shutil.rmtree(self._folder)

    def _first_process(self) -> int | None:
        """Return the process that is number 1 in the device, as its number is seen from here."""
        if self._system is None:
            return None
        pid = self._system.pid
        for _ in range(2):  # `unshare` waits for nspawn, and that for systemd.
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except FileNotFoundError:
                return None
            if not children:
                return None
            pid = int(children[0])
        return pid


def _remove_groups(top: Path) -> None:
    """Remove a control group with those below; the kernel may take a moment to see that they are empty."""
    for _ in range(50):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if not top.exists():
            return
        time.sleep(0.1)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
