#!/usr/bin/env python3
"""What a container of the image does: init, peer, health, or else any command of sotto.

A container learns which peer it is from SOTTO_PEER_INDEX, or from the ordinal that a StatefulSet gives its host name
(`digits-3` is peer 3). The image knows no orchestrator beyond that.
"""

from __future__ import annotations

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


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code, if it returns at all."""
    match arguments:
        case ["init"]:
            return init(int(os.environ["SOTTO_PEERS"]), shlex.split(os.environ.get("SOTTO_OPTIONS", "")))
        case ["peer"]:
            end_beyond_the_cluster()
            command = [*SOTTO, "run", "--config", str(my_file())]
        case ["health"]:
            command = [*SOTTO, "status", "--config", str(my_file()), "--json"]
        case _:
            command = [*SOTTO, *arguments]
    # In place of this process, so that the signals of the engine reach the peer.
    os.execvp(command[0], command)


def init(num_peers: int, options: list[str]) -> int:
    """Write the kits of a compose cluster into the volumes of its peers, once; return the exit code."""
    wanted = {"peers": num_peers, "options": options}
    mark = AUTHORITY / "cluster.json"
    if mark.exists():
        made = json.loads(mark.read_text())
        if made == wanted:
            return 0
        print(
            f"the volumes hold a cluster of {made['peers']} peers with options {shlex.join(made['options'])!r}, not of "
            f"{num_peers} with {shlex.join(options)!r}: remove it with its volumes (down --volumes), or start it as it "
            "was",
            file=sys.stderr,
        )
        return _USAGE
    volumes = [KITS / f"peer-{index}" for index in range(num_peers)]
    if not all(volume.is_dir() for volume in volumes):
        mounted = len(list(KITS.glob("peer-*")))
        print(f"docker-compose.yml has volumes for {mounted} peers, not for {num_peers}", file=sys.stderr)
        return _USAGE
    made_in = AUTHORITY / "kits"
    listen = f"peer.metrics_listen=0.0.0.0:{METRICS_PORT}"
    command = [*SOTTO, "init", "cluster", str(made_in), "--force", "--peers", str(num_peers), "--set", listen, *options]
    # The services of compose have the names of the peers.
    hosts = [word for volume in volumes for word in ("--host", f"{volume.name}:{PORT}")]
    code = subprocess.run([*command, *hosts], check=False).returncode
    if code:
        return code
    for volume in volumes:
        shutil.copytree(made_in / volume.name, volume, dirs_exist_ok=True)
        # A peer alone has its key. The rest stays, for the operator: addresses, and certificates to revoke.
        (made_in / volume.name / "peer.key").unlink(missing_ok=True)
    mark.write_text(json.dumps(wanted))
    return 0


def end_beyond_the_cluster() -> None:
    """End this process if the cluster has fewer peers than compose has services for them."""
    num_peers = os.environ.get("SOTTO_PEERS")
    if num_peers is not None and my_index() >= int(num_peers):
        print(f"this cluster has {num_peers} peers, and peer {my_index()} is none of them")
        sys.exit(0)


def my_file() -> Path:
    """Return the configuration of the peer that this container is."""
    file = KITS / f"peer-{my_index()}" / "peer.toml"
    if not file.exists():
        sys.exit(f"{file} is not there: is its volume mounted, and does the run have as many peers?")
    return file


def my_index() -> int:
    """Return which peer this container is, counted from 0."""
    if (given := os.environ.get("SOTTO_PEER_INDEX")) is not None:
        return int(given)
    if (ordinal := re.fullmatch(r".+-(\d+)", socket.gethostname())) is not None:
        return int(ordinal[1])
    sys.exit("the host name ends in no number: set SOTTO_PEER_INDEX to say which peer this container is")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
