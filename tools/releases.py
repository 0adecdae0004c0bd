"""Peers of several releases on this machine, each a process that runs from its kit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peer import __version__
from peer.config.options import load
from peer.errors import SottoError
from peer.ops import control
from peer.ops.peer_processes import ForkServer, PeerProcess, start_process

REPOSITORY = Path(__file__).resolve().parents[1]
PREDECESSOR = REPOSITORY / "tests" / "fixtures" / "predecessor" / "sottovoce-0.2.0-py3-none-any.whl"
"""The wheel of the release before this one."""

_END_S = 120.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Release:
    """An installed release."""

    version: str
    packages: Path
    """The folder in which Python finds its packages; its dependencies are those of this process."""
    server: ForkServer | None = None
    """The process from which its peers are forked; without one, each is started anew."""
    python: str = ""
    """The interpreter, by default that of this process."""

    def interpreter(self) -> list[str]:
        """Return the command of a Python that finds this release."""
        # Without PYTHONSAFEPATH, the packages in the working directory would come first.
        return ["env", "PYTHONSAFEPATH=1", f"PYTHONPATH={self.packages}", self.python or sys.executable]

    def fork_server(self) -> ForkServer:
        """Start the process from which its peers can be forked."""
        is_older = (self.packages / "peer" / "fork_server.py").exists()  # As release 0.2 has it.
        return ForkServer([*self.interpreter(), "-m", "peer.fork_server" if is_older else "peer.cli.fork_server"])

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `sotto` with these arguments."""
        return [*self.interpreter(), "-m", "peer", *arguments]

    def sotto(self, *arguments: str) -> str:
        """Run a command of this release; return its output. Raises SottoError if it fails."""
        return _output(self.command(*arguments))


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_END_S)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise SottoError(f"{' '.join(command)} ended with code {done.returncode}: {said}")
    return done.stdout.strip()


def this_release() -> Release:
    """Return the release of these sources."""
    return Release(__version__, REPOSITORY)


def unpacked(wheel: Path, folder: Path) -> Release:
    """Return the release in a wheel, unpacked into a folder."""
    version = re.match(r"sottovoce-([^-]+)-", wheel.name)
    if version is None:
        raise SottoError(f"{wheel.name} is no wheel of sottovoce")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return Release(version[1], folder)


class Device:
    """One device: a kit, and the process that runs from it."""

    def __init__(self, kit: Path) -> None:
        self.kit, self.name, self.file = kit, kit.name, kit / "peer.toml"
        self.release: Release | None = None
        """The running release; None while there is none."""
        self._process: PeerProcess | None = None

    @property
    def log(self) -> str:
        """All that its processes have logged."""
        file = self.kit / "log.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, release: Release, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start its peer, with these variables in its environment."""
        own = [f"{name}={value}" for name, value in environment.items()]
        arguments, log = ("run", "--config", str(self.file)), self.kit / "log.txt"
        if release.server is not None and not own:
            self._process = release.server.start(arguments, log)
        else:
            self._process = start_process(["env", *own, *release.command(*arguments)], log)
        self.release = release

    def stop(self) -> int:
        """End its process with SIGTERM; return the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """End its process with SIGKILL; return the exit code."""
        return self._end(signal.SIGKILL)

    def wait(self, timeout_s: float = _END_S) -> int:
        """Return the exit code of its process when it has ended."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self.release = None
        return code

    @property
    def exit_code(self) -> int | None:
        """The exit code of its process; None while it runs, or was never started."""
        return None if self._process is None else self._process.poll()

    def status(self) -> dict[str, Any] | None:
        """Return the status of its peer; None where it does not answer."""
        try:
            return control.call(load(self.file, environment={}), self.kit, None, "status")
        except SottoError:
            return None

    def round(self) -> int:
        """Return the rounds that its peer has completed; −1 where it does not answer."""
        status = self.status()
        return -1 if status is None else int(status["round"])

    def _end(self, sig: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(sig)
        return self.wait()


class Devices:
    """The devices of a run."""

    def __init__(self, kits: Path) -> None:
        """`kits`: a folder that `sotto init cluster` wrote."""
        self.all = [Device(file.parent) for file in sorted(kits.glob("peer-*/peer.toml"))]

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *exception: object) -> None:
        for device in self.all:
            if device.release is not None and device.exit_code is None:
                device.kill()

    def start(self, release: Release) -> None:
        """Start all peers."""
        for device in self.all:
            device.start(release)

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 240.0) -> None:
        """Wait until the condition holds. Raises SottoError if a peer fails, or it takes too long."""
        deadline = time.monotonic() + within_s
        while not condition():
            for device in self.all:
                if device.release is not None and device.exit_code is not None:
                    last = device.log.strip().splitlines()[-1:]
                    raise SottoError(f"{what}: {device.name} ended with code {device.exit_code}: {' '.join(last)}")
            if time.monotonic() > deadline:
                raise SottoError(f"{what}: not within {within_s:g} s")
            time.sleep(_POLL_S)

    def until_beyond(self, round_: int, devices: Sequence[Device] = ()) -> None:
        """Wait until these peers, by default all, have completed more than so many rounds."""
        waiting = [*(devices or self.all)]

        def are_beyond() -> bool:
            while waiting and waiting[0].round() > round_:
                waiting.pop(0)
            return not waiting

        self.until(are_beyond, f"rounds after {round_}")

    def furthest(self) -> int:
        """Return the completed rounds of the peer that is furthest."""
        return max(device.round() for device in self.all)

    def finish(self, timeout_s: float = _END_S) -> list[int]:
        """Return the exit codes of all processes when all have ended."""
        return [device.wait(timeout_s) for device in self.all]
