#!/usr/bin/env python3
"""What a container of the image does: init, add, peer, health, or else any command of sotto.

A container learns which peer it is from SOTTO_PEER_INDEX, or from the ordinal that a StatefulSet gives its host name
(`digits-3` is peer 3). The image knows no orchestrator beyond that.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

KITS = Path(os.environ.get("SOTTO_KITS", "/kits"))
"""Where the folders of peers are mounted: a peer's container has its own, that of `init` all of them."""
AUTHORITY = Path("/authority")
"""Where the keys of the CA and of the operator stay. Peers do not mount it."""
PORT = 7700
METRICS_PORT = 9470
SOTTO = [sys.executable, "-m", "peer"]
"""The command, of the interpreter that runs this, whatever PATH says."""

_USAGE = 2


class WrongVariable(Exception):
    """A variable of the environment, or of .env, that cannot be meant."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code, if it returns at all."""
    try:
        return run(arguments)
    except OSError as error:
        say(f"{error}: may user {os.getuid()} of group {os.getgid()} use the volumes?")
        return 1
    except WrongVariable as error:
        say(str(error))
        return _USAGE


def run(arguments: list[str]) -> int:
    """Do what `main` does. Raises OSError and WrongVariable."""
    match arguments:
        case ["init" | "add" as command]:
            return init(number("SOTTO_PEERS") or 0, given_options(), adds=command == "add")
        case ["peer"]:
            end_beyond_the_cluster()
            command = [*SOTTO, "run", "--config", str(my_file())]
        case ["health"]:
            command = [*SOTTO, "status", "--config", str(my_file()), "--json"]
        case _:
            command = [*SOTTO, *arguments]
    # In place of this process, so that the signals of the engine reach the peer.
    os.execvp(command[0], command)


def init(num_peers: int, options: list[str], *, adds: bool = False) -> int:
    """Write the kits of a compose cluster into the volumes of its peers, once; return the exit code.

    With `adds` make what is missing afterwards: kits of more peers, which join the run, and that of a peer whose volume
    was lost, with a new key.
    """
    mark, made_in = AUTHORITY / "cluster.json", AUTHORITY / "kits"
    wanted = {"peers": num_peers, "options": options}
    made = json.loads(mark.read_text()) if mark.exists() else None
    volumes = [KITS / f"peer-{index}" for index in range(num_peers)]
    if made == wanted and not adds:
        link_states(made_in, volumes)
        return 0
    if made is not None and not (adds and made["options"] == options and made["peers"] <= num_peers):
        say(
            f"the volumes hold a cluster of {made['peers']} peers with options {shlex.join(made['options'])!r}, and "
            f"this is for {num_peers} with {shlex.join(options)!r}. To go on with it, put what it was made with into "
            f"the file .env beside docker-compose.yml: SOTTO_PEERS={made['peers']} and "
            f"SOTTO_OPTIONS={shlex.join(made['options'])}. To add peers: `run --rm init add`. A second cluster takes "
            "another name (--project-name). Only `down --volumes` forgets this one, with its models."
        )
        return _USAGE
    if not all(volume.is_dir() for volume in volumes):
        mounted = len(list(KITS.glob("peer-*")))
        say(f"docker-compose.yml has volumes for {mounted} peers, not for {num_peers}")
        return _USAGE
    code = write_kits(made_in, volumes, options) if made is None else add_kits(made_in, volumes)
    if code == 0:
        link_states(made_in, volumes)
        mark.write_text(json.dumps(wanted))
    return code


def link_states(made_in: Path, volumes: list[Path]) -> None:
    """Let the operator's kits lead to what peers leave on disk: one that has finished answers nobody any more."""
    for volume in volumes:
        if not (state := made_in / volume.name / "state").is_symlink():
            state.symlink_to(volume / "state")


def write_kits(made_in: Path, volumes: list[Path], options: list[str]) -> int:
    """Make a cluster, and give each volume the kit of its peer; return the exit code."""
    listen = f"peer.metrics_listen=0.0.0.0:{METRICS_PORT}"
    peers = ["--peers", str(len(volumes))]
    command = [*SOTTO, "init", "cluster", str(made_in), "--force", *peers, "--set", listen, *options]
    # The services of compose have the names of the peers.
    hosts = [word for volume in volumes for word in ("--host", f"{volume.name}:{PORT}")]
    code = subprocess.run([*command, *hosts], check=False).returncode
    if code:
        return code
    for volume in volumes:
        copy_kit(made_in / volume.name, volume)
        # A peer alone has its key. The rest stays, for the operator: addresses, and certificates to revoke.
        (made_in / volume.name / "peer.key").unlink(missing_ok=True)
    return 0


def add_kits(made_in: Path, volumes: list[Path]) -> int:
    """Give each empty volume a kit, as `sotto init --join` and `sotto admin sign` make it; return the exit code."""
    for volume in volumes:
        if (volume / "peer.toml").exists():
            continue
        # What an earlier attempt left.
        (volume / "peer.key").unlink(missing_ok=True)
        host = f"{volume.name}:{PORT}"
        ask = [*SOTTO, "init", "--join", str(volume), "--name", volume.name, "--host", host]
        # The request was made here, so that nobody has to confirm it.
        sign = [*SOTTO, "admin", "sign", str(made_in), str(volume / "request.pem"), "--name", volume.name, "--yes"]
        for command in (ask, sign):
            if code := subprocess.run(command, check=False).returncode:
                return code
        copy_kit(made_in / volume.name, volume)
    return 0


def copy_kit(kit: Path, volume: Path) -> None:
    """Copy what a folder holds into a volume, which may belong to another user."""
    # Last the file by which a kit is known to be complete.
    for file in sorted(kit.iterdir(), key=lambda file: file.name == "peer.toml"):
        if file.is_symlink() and file.name == "state":
            continue  # It leads into the volume.
        if file.is_dir():
            shutil.copytree(file, volume / file.name, dirs_exist_ok=True)
        else:
            shutil.copy2(file, volume / file.name)


def end_beyond_the_cluster() -> None:
    """End this process if the cluster has fewer peers than compose has services for them."""
    num_peers = number("SOTTO_PEERS")
    if num_peers is not None and my_index() >= num_peers:
        say(f"this cluster has {num_peers} peers, and peer {my_index()} is none of them")
        sys.exit(0)


def my_file() -> Path:
    """Return the configuration of the peer that this container is."""
    file = KITS / f"peer-{my_index()}" / "peer.toml"
    if not file.exists():
        say(
            f"{file} is not there: is its volume mounted, and does the run have as many peers? In a compose "
            "cluster, `run --rm init add` writes a new kit into the volume of a peer that was lost"
        )
        sys.exit(1)
    return file


def my_index() -> int:
    """Return which peer this container is, counted from 0."""
    if (given := number("SOTTO_PEER_INDEX")) is not None:
        return given
    if (ordinal := re.fullmatch(r".+-(\d+)", socket.gethostname())) is not None:
        return int(ordinal[1])
    say("the host name ends in no number: set SOTTO_PEER_INDEX to say which peer this container is")
    sys.exit(1)


def number(variable: str) -> int | None:
    """Return the number in a variable; None where it is not set. Raises WrongVariable."""
    if (given := os.environ.get(variable)) is None:
        return None
    # Not what `isdecimal` says: an editor for Windows leaves a carriage return behind.
    with contextlib.suppress(ValueError):
        if int(given) >= 0:
            return int(given)
    raise WrongVariable(f"{variable} is {given!r}, and no number")


def given_options() -> list[str]:
    """Return the words of SOTTO_OPTIONS. Raises WrongVariable."""
    given = os.environ.get("SOTTO_OPTIONS", "")
    try:
        return shlex.split(given)
    except ValueError as error:
        raise WrongVariable(f"SOTTO_OPTIONS is {given!r}, which a shell could not read either: {error}") from None


def say(sentence: str) -> None:
    """Write a line to the log of the container, with the time as the peer's own lines have it."""
    now = datetime.datetime.now().astimezone()
    print(f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
