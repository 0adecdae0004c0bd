"""A container engine for tests: the machine's own, or one that is started here and ended afterwards.

The engine of the machine is taken where one answers. Otherwise `dockerd` is started in a process group of its own with
a data folder of its own, which takes root, and both are gone when the test session ends.

The image is built from a clean copy of what git tracks. Where no registry can be reached its base is made by
debootstrap, and wheels come from the index that pip is configured for on this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC_BASE = re.findall(r"(?m)^ARG BASE=(\S+)", (ROOT / "deploy" / "Dockerfile").read_text())[0]
OWN_BASE = "sotto-test-base:bookworm"
_PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates"
_START_S = 60.0


def missing() -> str | None:
    """Return why no containers can be run here, in a sentence; None if they can."""
    for tool, package in (("docker", "docker.io"), ("docker-compose", "docker-compose")):
        if _client(tool) is None:
            return f"{tool} is not installed (Debian's package is {package})"
    if _answers(dict(os.environ)):
        return None
    if os.geteuid() != 0:
        return "no container engine answers, and starting one takes root"
    if shutil.which("dockerd") is None:
        return "no container engine answers, and there is no dockerd to start"
    if not Path("/sys/fs/cgroup").is_dir():
        return "no container engine answers, and the kernel has no control groups to start one with"
    return None


class Engine:
    """A running engine, and its two clients."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` says where the engine listens."""
        # Compose 1 builds through the client, whose BuildKit knows stages and skips those that nobody needs.
        self._environment = {**environment, "DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}
        # A newer client that comes first on the PATH may lack the component that builds.
        self._environment["PATH"] = os.pathsep.join(["/usr/bin", environment["PATH"]])

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Run the client; return what it printed. Raises RuntimeError with its last lines if it fails."""
        return self._run([_client("docker") or "docker", *arguments], {}, ROOT, check)

    def compose(self, folder: Path, settings: Mapping[str, str], *arguments: str, check: bool = True) -> str:
        """Run compose on the file of a folder, with variables of its own."""
        return self._run([_client("docker-compose") or "docker-compose", *arguments], settings, folder, check)

    def _run(self, command: Sequence[str], settings: Mapping[str, str], folder: Path, check: bool) -> str:
        environment = {**self._environment, **settings}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if check and done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
        return done.stdout


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """Lend an engine; one that was started for it keeps everything below `folder` and is ended afterwards."""
    environment = dict(os.environ)
    if _answers(environment):
        yield Engine(environment)
        return
    # The path of a Unix socket may have 107 characters.
    socket = Path("/run") / f"sotto-test-{os.getpid()}.sock"
    environment["DOCKER_HOST"] = f"unix://{socket}"
    # Otherwise the engine would turn it on itself, and drop what bridges of others forward.
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    paths = {"data-root": folder / "data", "exec-root": folder / "exec", "pidfile": folder / "dockerd.pid"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    with (folder / "dockerd.log").open("wb") as log:
        engine = subprocess.Popen(
            ["dockerd", f"--host={environment['DOCKER_HOST']}", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for(environment, engine, folder / "dockerd.log")
        yield Engine(environment)
    finally:
        with contextlib.suppress(ProcessLookupError):
            engine.terminate()
            engine.wait(60)
        with contextlib.suppress(ProcessLookupError):  # containerd and its shims belong to the same group.
            os.killpg(engine.pid, signal.SIGKILL)
        socket.unlink(missing_ok=True)


def copy_of_the_tree(destination: Path) -> Path:
    """Copy the files that git tracks, as they are in the working tree, as a fresh clone would have them."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listing.decode().split("\0")):
        if (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)
    return destination


def build_settings(engine: Engine, tree: Path, kept: Path) -> dict[str, str]:
    """Return the variables of compose with which the image of a tree can be built here.

    Where no registry answers they name a base image and wheels that are made for it; `kept` keeps them for later runs.
    """
    if _is_there(engine) or _can_pull(engine):
        return {}
    if not engine.docker("images", "--quiet", OWN_BASE).strip():
        archive = kept / "base.tar"
        if not archive.exists():
            _debootstrap(archive)
        engine.docker("import", str(archive), OWN_BASE)
    shutil.copytree(wheels(tree, kept), tree / "deploy" / "wheels", copy_function=os.link)
    return {"SOTTO_BASE": OWN_BASE, "SOTTO_PIP_OPTIONS": "--no-index"}


def wheels(tree: Path, kept: Path) -> Path:
    """Return a folder with all that the image installs, filled if `kept` has none. Raises CalledProcessError."""
    folder = kept / "wheels"
    if not folder.exists():
        _download_wheels(tree, folder)
    return folder


def _can_pull(engine: Engine) -> bool:
    engine.docker("pull", "--quiet", PUBLIC_BASE, check=False)
    return _is_there(engine)


def _is_there(engine: Engine) -> bool:
    # A list of images does not find one that is named by its digest.
    return bool(engine.docker("image", "inspect", "--format", "{{.Id}}", PUBLIC_BASE, check=False).strip())


def _debootstrap(archive: Path) -> None:
    """Make the file system of a Debian with Python and a compiler. Raises CalledProcessError."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    folder = archive.with_suffix(".d")
    shutil.rmtree(folder, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    beside = archive.with_suffix(".new")
    subprocess.run(["tar", "-C", str(folder), "-cf", str(beside), "--exclude=./var/cache/apt/*", "."], check=True)
    beside.rename(archive)
    shutil.rmtree(folder)


def _download_wheels(tree: Path, wheels: Path) -> None:
    """Fetch what the image installs, for the Python of the image, with the pip of this environment."""
    beside = wheels.with_name(".wheels.new")
    shutil.rmtree(beside, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(beside), "--no-deps", "--require-hashes"]
    pinned = ["--requirement", str(tree / "deploy" / "requirements.txt")]
    subprocess.run([*pip, "--python-version", "3.11", "--only-binary=:all:", *pinned], check=True)
    beside.rename(wheels)


def _client(tool: str) -> str | None:
    return shutil.which(tool, path=os.pathsep.join(["/usr/bin", os.environ["PATH"]]))


def _answers(environment: Mapping[str, str]) -> bool:
    client = _client("docker")
    if client is None:
        return False
    asked = subprocess.run([client, "version", "--format", "{{.Server.Version}}"], env=dict(environment),
                           capture_output=True, check=False)  # fmt: skip
    return asked.returncode == 0


def _wait_for(environment: Mapping[str, str], engine: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while not _answers(environment):
        if engine.poll() is not None or time.monotonic() > until:
            tail = "\n".join(log.read_text().splitlines()[-10:])
            raise RuntimeError(f"the container engine does not start:\n{tail}")
        time.sleep(0.2)
