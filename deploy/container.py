#!/usr/bin/env python3
"""What a container of the image does: init, peer, health, or else any command of sotto.

A container learns which peer it is from SOTTO_PEER_INDEX, from the ordinal that a StatefulSet gives its host name
(`digits-3` is peer 3), or, as a replica of a compose service, from the number that the engine's name server has for its
address (`project_peer_4` is peer 3; compose counts from 1). The image knows no orchestrator beyond that.
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
"""What `sotto init cluster` wrote: a folder for each peer, and the certificate of the operator."""
AUTHORITY = Path("/authority")
"""Where the key of the CA stays. Peers do not mount it."""
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
            command = [*SOTTO, "run", "--config", str(my_file())]
        case ["health"]:
            command = [*SOTTO, "status", "--config", str(my_file()), "--json"]
        case _:
            command = [*SOTTO, *arguments]
    # In place of this process, so that the signals of the engine reach the peer.
    os.execvp(command[0], command)


def init(num_peers: int, options: list[str]) -> int:
    """Write the kits of a compose cluster into the volumes, once; return the exit code."""
    wanted = {"peers": num_peers, "options": options}
    mark = KITS / "cluster.json"
    if mark.exists():
        made = json.loads(mark.read_text())
        if made == wanted:
            return 0
        print(
            f"the volume holds a cluster of {made['peers']} peers with options {shlex.join(made['options'])!r}, not of "
            f"{num_peers} with {shlex.join(options)!r}: remove it with its volumes (down --volumes), or start it as it "
            "was",
            file=sys.stderr,
        )
        return _USAGE
    own = name_in_network()
    found = re.fullmatch(r"(.+[-_])init([-_])\d+", own)
    if found is None:
        print(f"{own} is not the service `init` of a compose project", file=sys.stderr)
        return _USAGE
    made_in = AUTHORITY / "kits"
    # Compose 1 puts underscores into names, which a certificate cannot bear: it is made out to names of ours, and
    # peers check those.
    hosts = {f"replica-{k}:{PORT}": f"{found[1]}peer{found[2]}{k + 1}:{PORT}" for k in range(num_peers)}
    listen = f"peer.metrics_listen=0.0.0.0:{METRICS_PORT}"
    command = [*SOTTO, "init", "cluster", str(made_in), "--force", "--peers", str(num_peers), "--set", listen, *options]
    code = subprocess.run([*command, *(word for host in hosts for word in ("--host", host))], check=False).returncode
    if code:
        return code
    for file in made_in.glob("peer-*/peer.toml"):
        text = file.read_text()
        for ours, theirs in hosts.items():
            text = text.replace(f'"{ours}"', f'"{theirs}"')
        file.write_text(text)
    for entry in (*(f"peer-{index}" for index in range(num_peers)), "ca.pem", "operator.pem", "operator.key"):
        if (made_in / entry).is_dir():
            shutil.copytree(made_in / entry, KITS / entry, dirs_exist_ok=True)
            shutil.rmtree(made_in / entry)
        elif (made_in / entry).exists():  # There are none in the mode without certificates.
            shutil.copy2(made_in / entry, KITS / entry)
    mark.write_text(json.dumps(wanted))
    return 0


def my_file() -> Path:
    """Return the configuration of the peer that this container is."""
    file = KITS / f"peer-{my_index()}" / "peer.toml"
    if not file.exists():
        sys.exit(f"{file} is not there: is the volume of the kits mounted, and does the run have as many peers?")
    return file


def my_index() -> int:
    """Return which peer this container is, counted from 0."""
    if (given := os.environ.get("SOTTO_PEER_INDEX")) is not None:
        return int(given)
    if (ordinal := re.fullmatch(r".+-(\d+)", socket.gethostname())) is not None:
        return int(ordinal[1])
    own = name_in_network()
    if (number := re.fullmatch(r".+[-_](\d+)", own)) is not None:
        return int(number[1]) - 1
    sys.exit(f"{own} ends in no number: set SOTTO_PEER_INDEX to say which peer this container is")


def name_in_network() -> str:
    """Return the name that the engine's name server has for this container."""
    address = socket.gethostbyname(socket.gethostname())
    # /etc/hosts would answer with the host name.
    found = subprocess.run(["getent", "-s", "dns", "hosts", address], capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"the name server knows no name for {address}: set SOTTO_PEER_INDEX to say which peer this is")
    return found.stdout.split()[1].partition(".")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
