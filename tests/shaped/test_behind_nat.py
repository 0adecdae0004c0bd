"""Real peers behind real address translation, in network namespaces: dial-out, relay, and what the doctor says there.

Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config, load
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.peer_processes import peer_environment
from peer.state.metrics import MetricsStore
from tests.shaped.behind_nat import NatNetwork, missing_tools

_MISSING = missing_tools()

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # On machines that may be busy.
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.skipif(_MISSING is not None, reason=f"address translation cannot be set up here: {_MISSING}"),
]

PORT = 7700
ROUNDS = 60


def job(rounds: int) -> Config:
    overrides = (f"run.rounds={rounds}", "training.warmup_rounds=5", "evaluation.every_rounds=0")
    return load(environment={}, overrides=[*overrides, "transport.backoff_max_s=1", "transport.heartbeat_s=2"])


@contextlib.contextmanager
def peers(network: NatNetwork, places: dict[Path, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a peer for each file in a namespace; end what is left at the end."""
    processes = []
    try:
        for file, namespace in places.items():
            with open(file.with_name("log.txt"), "wb") as log:
                command = [*network.command(namespace), sys.executable, "-m", "peer", "run", "--config", str(file)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=peer_environment()))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask(network: NatNetwork, namespace: str, *arguments: str) -> tuple[int, Any]:
    """Return exit code and JSON of a `sotto` command on a machine."""
    command = [*network.command(namespace), sys.executable, "-m", "peer", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=peer_environment())
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def until(what: str, condition: Any, files: list[Path], within_s: float = 400.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        logs = "\n".join(f"{file.parent.name}: {file.with_name('log.txt').read_text()[-500:]}" for file in files)
        assert time.monotonic() < end, f"{what} did not happen\n{logs}"
        time.sleep(0.2)


def logged(file: Path, words: str) -> bool:
    return words in file.with_name("log.txt").read_text()


def of(findings: list[dict[str, str]], check: str) -> str:
    return " | ".join(f"{f['level']}: {f['sentence']} → {f['advice']}" for f in findings if f["check"] == check)


def test_two_peers_in_two_homes_train_with_a_public_one_that_relays(tmp_path: Path) -> None:
    """A directed ring of three: each link is one kind: dialled out from a home, dialled out from another, relayed."""
    with closing(NatNetwork(num_public=1, num_homes=2)) as network:
        hosts = [Host(network.public_address(0), PORT), Host(None, 0), Host(None, 0)]
        files = write_cluster(tmp_path, job(ROUNDS), hosts, relay=0)
        machines = [network.public[0], *network.homes]
        with peers(network, dict(zip(files, machines, strict=True))) as processes:
            until(
                "the link between the homes",
                lambda: logged(files[1], "link to peer-2 is up") and logged(files[2], "link to peer-1 is up"),
                files,
            )
            until("the end of the run", lambda: all(each.poll() is not None for each in processes), files)
            assert [each.returncode for each in processes] == [0, 0, 0]
        relayed = files[0].with_name("log.txt").read_text()
        assert re.search("relaying between (peer-1 and peer-2|peer-2 and peer-1)", relayed)  # Either may call.
        for file in files:
            store = MetricsStore(file.with_name("state") / "metrics.sqlite", read_only=True)
            assert len(store.rounds()) == ROUNDS
            store.close()
            assert (file.with_name("state") / "model.safetensors").exists()


def test_the_doctor_names_what_address_translation_hides(tmp_path: Path) -> None:
    """A peer in a home gives out its router's address: nobody gets in there until the router forwards the port."""
    with closing(NatNetwork(num_public=1, num_homes=1)) as network:
        router = network.router_address(0)
        hosts = [Host(network.public_address(0), PORT), Host(router, PORT)]
        files = write_cluster(tmp_path, job(1000), hosts)
        with peers(network, {files[0]: network.public[0]}):
            until("the public peer", lambda: logged(files[0], "listens on"), files[:1])
            arguments = ("doctor", "--config", str(files[1]))
            code, answer = ask(network, network.homes[0], *arguments)
            assert code == 6, answer
            found = of(answer["findings"], "peer-0")
            assert f"ok: answers at {hosts[0].address}:{PORT}" in found
            assert f"error: cannot reach this peer: peer-1 at {router}:{PORT} did not answer" in found
            assert f"open TCP port {PORT} in the firewall of this device, or forward it" in found

            network.forward_port(0, PORT)
            code, answer = ask(network, network.homes[0], *arguments)
            assert code == 0, answer
            assert f"ok: reaches this peer at {router}:{PORT}" in of(answer["findings"], "peer-0")

            # Given out as one that only dials, it needs no port, and is seen to come from its router.
            dialling = write_cluster(tmp_path / "again", job(1000), [hosts[0], Host(None, 0)])[1]
            for name in ("peer.pem", "peer.key", "ca.pem"):
                dialling.with_name(name).write_bytes(files[1].with_name(name).read_bytes())
                if name == "peer.key":
                    dialling.with_name(name).chmod(0o600)
            code, answer = ask(network, network.homes[0], "doctor", "--config", str(dialling))
            found = of(answer["findings"], "peer-0")
            assert f"has {router}:{PORT} for this peer, but our own list has no address" in found


def test_the_doctor_notices_that_full_packets_get_lost(tmp_path: Path) -> None:
    """A tunnel behind the router takes a part of each packet. Nobody says so at first, and then the router does."""
    with closing(NatNetwork(num_public=1, num_homes=1)) as network:
        files = write_cluster(tmp_path, job(1000), [Host(network.public_address(0), PORT), Host(None, 0)])
        with peers(network, {files[0]: network.public[0]}):
            until("the public peer", lambda: logged(files[0], "listens on"), files[:1])
            arguments = ("doctor", "--config", str(files[1]))
            code, answer = ask(network, network.homes[0], *arguments)
            assert code == 0, answer
            assert "ok: packets of up to 1500 bytes pass" in of(answer["findings"], "peer-0")

            network.limit_packets(0, 1300, tells=False)
            code, answer = ask(network, network.homes[0], *arguments)
            assert code == 6, answer
            found = of(answer["findings"], "peer-0")
            assert f"error: small packets reach {network.public_address(0)}:{PORT}, but full ones get lost" in found
            assert "lower the MTU" in found

            network.limit_packets(0, 1300, tells=True)
            code, answer = ask(network, network.homes[0], *arguments)
            assert code == 0, answer
            assert "ok: packets of up to 1300 bytes pass" in of(answer["findings"], "peer-0")
        # What the doctor tries is no offence, and fills no log.
        assert "broke the protocol" not in files[0].with_name("log.txt").read_text()
