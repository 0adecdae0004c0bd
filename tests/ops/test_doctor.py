"""What `sotto doctor` finds, with neighbours that are real listeners on loopback."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest

from peer import __version__
from peer.config.options import SHARED_SECTIONS, Config, load
from peer.config.writer import write_peer_file
from peer.net.hello import HelloInfo
from peer.net.neighbor import Neighbor
from peer.net.security.authority import CertificateAuthority
from peer.net.security.credentials import load_credentials
from peer.net.transport import Transport
from peer.ops import doctor
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.enrollment import admit, propose, request
from peer.ops.local_cluster import free_ports
from peer.state.checkpoints import Checkpoint, StateFolder
from peer.wire.start_model import StartModel
from tests.cli.runner import sotto
from tests.net.transport_peers import Mind

Change = Callable[[Config], Config]


def same(config: Config) -> Config:
    return config


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    """Three peers on a directed ring: 0 and 1 listen, 2 dials out."""
    one, two = free_ports(2)
    hosts = [Host("127.0.0.1", one), Host("127.0.0.1", two), Host(None, 0)]
    write_cluster(tmp_path, load(environment={}), hosts)
    return tmp_path


@contextmanager
def running(folder: Path, index: int, change: Change = same, **hello: Any) -> Iterator[None]:
    """A peer of the cluster that answers, in a thread with a loop of its own."""
    file = folder / f"peer-{index}" / "peer.toml"
    config = change(load(file, environment={}))
    ready, over = Event(), Event()

    async def serve() -> None:
        others = [Neighbor(i, p.name, p.advertise, dial=False) for i, p in enumerate(config.peers) if i != index]
        facts: dict[str, Any] = {
            "run": "digits", "algorithm": "x", "run_digest": config.run_digest(), "start": StartModel(""),
            "graph_digest": "", "num_peers": 3, "name": config.peers[index].name, "shared_sections": SHARED_SECTIONS,
            "software": f"sottovoce {__version__}", "settings": config.shared_settings(),
        }  # fmt: skip
        transport = Transport(
            me=index, listen=config.peer.listen, neighbors=others, hello=HelloInfo(**(facts | hello)),
            security=load_credentials(config.security, file.parent, None), options=config.transport, handler=Mind(),
        )  # fmt: skip
        await transport.start()
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.01)
        await transport.close("the test is over")

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        over.set()
        thread.join()


def rewrite(folder: Path, index: int, change: Change) -> None:
    file = folder / f"peer-{index}" / "peer.toml"
    write_peer_file(file, change(load(file, environment={})), force=True)


def advertise(index: int, address: str | None, relay: str | None = None) -> Change:
    def change(config: Config) -> Config:
        peers = list(config.peers)
        peers[index] = peers[index].model_copy(update={"advertise": address, "relay": relay})
        return config.model_copy(update={"peers": tuple(peers)})

    return change


def examine(folder: Path, index: int) -> tuple[int, list[dict[str, str]]]:
    result = sotto("doctor", "--config", str(folder / f"peer-{index}" / "peer.toml"), "--json")
    return result.exit_code, json.loads(result.stdout)["findings"]


def of(findings: list[dict[str, str]], check: str, level: str) -> str:
    return " | ".join(
        f"{f['sentence']} → {f['advice']}" for f in findings if (f["check"], f["level"]) == (check, level)
    )


def test_a_healthy_peer_is_reached_both_ways_before_it_runs(kits: Path) -> None:
    with running(kits, 1):
        code, findings = examine(kits, 0)
    assert code == 0
    assert {each["level"] for each in findings} == {"ok"}
    assert "is free; this peer is not running" in of(findings, "port", "ok")
    assert "reaches this peer at 127.0.0.1:" in of(findings, "peer-1", "ok")
    assert "bytes pass on the way there" in of(findings, "peer-1", "ok")
    assert "cannot be dialled; it dials this peer" in of(findings, "peer-2", "ok")


def test_a_peer_that_only_dials_out_is_told_how_it_is_seen(kits: Path) -> None:
    with running(kits, 0), running(kits, 1):
        code, findings = examine(kits, 2)
    assert code == 0
    assert "accepts no connections" in of(findings, "port", "ok")
    assert "does not dial this peer; it sees connections from 127.0.0.1" in of(findings, "peer-0", "ok")


def test_a_neighbour_that_does_not_run_and_one_that_cannot_dial_back(kits: Path) -> None:
    code, findings = examine(kits, 0)
    assert code == 6
    assert "nobody listens at 127.0.0.1:" in of(findings, "peer-1", "error")
    assert "start that peer, or correct its advertise" in of(findings, "peer-1", "error")
    # The others know this peer under an address that leads nowhere.
    (nowhere,) = free_ports(1)
    for index in range(3):
        rewrite(kits, index, advertise(0, f"127.0.0.1:{nowhere}"))
    with running(kits, 1):
        code, findings = examine(kits, 0)
    assert code == 6
    assert f"cannot reach this peer: nobody listens at 127.0.0.1:{nowhere}" in of(findings, "peer-1", "error")
    assert f"open TCP port {nowhere} in the firewall of this device, or forward it" in of(findings, "peer-1", "error")


def test_after_its_last_round_a_peer_needs_no_neighbour(kits: Path) -> None:
    rewrite(kits, 0, lambda config: config.model_copy(update={"run": config.run.model_copy(update={"rounds": 40})}))
    folder = StateFolder(kits / "peer-0" / "state")
    folder.checkpoints.save(Checkpoint(40, {}, {}))
    folder.close()
    code, findings = examine(kits, 0)
    assert code == 0
    assert "is free; this peer has finished after 40 rounds" in of(findings, "port", "ok")
    assert "it need not, since this peer has finished after 40 rounds" in of(findings, "peer-1", "ok")


def test_an_address_that_nobody_answers_at_is_named_before_a_firewall(kits: Path) -> None:
    reason = "no device answers at 10.0.0.3:7700, the address of peer-0, or a firewall there rejects it"
    answer = {"neighbor": 0, "address": "10.0.0.3:7700", "reached": False, "reason": reason, "link": True}
    *_, found = doctor._way_back(load(kits / "peer-0" / "peer.toml", environment={}), "peer-1", answer)
    assert 0 <= found.advice.index("correct its advertise") < found.advice.index("firewall")


def test_a_name_that_a_neighbour_cannot_resolve_is_no_matter_of_a_firewall(kits: Path) -> None:
    for index in range(3):
        rewrite(kits, index, advertise(0, "nowhere.invalid:7700"))
    with running(kits, 1):
        _, findings = examine(kits, 0)
    finding = of(findings, "peer-1", "error")
    assert "the host name in nowhere.invalid:7700" in finding
    assert "DNS settings" in finding
    assert "firewall" not in finding


def test_a_private_address_that_does_not_answer_may_be_that_of_another_network(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "open_connection", Mock(side_effect=TimeoutError))
    for address, said in (("10.0.0.1:7700", True), ("[fd00::1]:7700", True), ("9.9.9.9:7700", False)):
        rewrite(kits, 0, advertise(1, address))
        assert ("from its own network or VPN alone" in of(examine(kits, 0)[1], "peer-1", "error")) is said


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EHOSTUNREACH, "correct its advertise address, or open TCP port"),
        (errno.ENETUNREACH, "check the network of this device"),
    ],
)
def test_what_the_system_says_of_an_address_decides_on_the_advice(
    number: int, advice: str, kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "open_connection", Mock(side_effect=OSError(number, os.strerror(number))))
    _, findings = examine(kits, 0)
    assert f"cannot be reached: {os.strerror(number)} → {advice}" in of(findings, "peer-1", "error")


def test_what_the_peer_could_not_listen_with_is_a_finding_among_the_others(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.net.rpc.Server.bind", lambda *_: 0)
    code, findings = examine(kits, 0)
    assert "nothing can be served there with this certificate and key" in of(findings, "port", "error")
    assert "nobody listens at 127.0.0.1:" in of(findings, "peer-1", "error")
    assert code


def test_lists_jobs_and_releases_that_differ_are_named(kits: Path) -> None:
    def other_rate(config: Config) -> Config:
        training = config.training.model_copy(update={"learning_rate": 0.5})
        return advertise(0, "10.9.9.9:1")(config.model_copy(update={"training": training}))

    with running(kits, 1, other_rate, software="sottovoce 9.9"):
        code, findings = examine(kits, 0)
    assert code == 6
    assert (
        "its configuration differs from ours in [training]: training.learning_rate is 0.5 there and not set here"
        in of(findings, "peer-1", "error")
    )
    file = kits / "peer-0" / "peer.toml"
    file.write_text(file.read_text().replace('task = "digits"', 'task = "loop"'))
    with running(kits, 1, other_rate):
        script_findings = examine(kits, 0)[1]
    assert "its configuration differs" not in str(script_findings), "join sets what a script trains with"
    assert f"peer-0 runs {__version__}, peer-1 9.9" in of(findings, "releases", "warning")
    assert "has 10.9.9.9:1 for this peer, but our own list has 127.0.0.1:" in of(findings, "peer-1", "warning")


def test_a_clock_that_is_off_is_told_with_both_directions(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = list(doctor._clock("ben", 120.0, 0.5))
    assert (ahead[0].level, ahead[0].sentence) == ("warning", "its clock is 120 s ahead of ours")
    assert "timedatectl set-ntp true" in ahead[0].advice
    assert next(iter(doctor._clock("ben", -200_000.0, 0.5))).level == "error"
    # What the way there and back may explain is no difference.
    assert not list(doctor._clock("ben", 5.5, 1.0))
    with running(kits, 1):
        true_time = doctor.time.time
        monkeypatch.setattr("peer.net.control.time.time", lambda: true_time() + 3600)
        # Both modules share the clock; only the neighbour's answer is an hour ahead.
        monkeypatch.setattr("peer.ops.doctor.time", type("Clock", (), {"time": staticmethod(true_time)}))
        _, findings = examine(kits, 0)
    assert "its clock is 3600 s ahead of ours" in of(findings, "peer-1", "warning")


def test_certificates_that_end_soon_are_revoked_readable_or_of_others(kits: Path) -> None:
    folder = kits / "peer-0"
    authority = CertificateAuthority.load(kits / "ca.pem", kits / "ca.key")

    def use(days: int, name: str = "peer-0", by: CertificateAuthority = authority) -> None:
        for file in (folder / "peer.pem", folder / "peer.key"):
            file.unlink()
        by.issue(name, days=days).write(folder / "peer.pem", folder / "peer.key")

    use(days=10)
    _, findings = examine(kits, 0)
    assert "9 days from now → renew it: `sotto init --join renewed --name peer-0` here" in of(
        findings, "certificate", "warning"
    )
    use(days=10, name="peer-1")
    code, findings = examine(kits, 0)
    assert (code, "is made out to 'peer-1', but this peer is 'peer-0'" in of(findings, "certificate", "error")) == (
        3,
        True,
    )
    use(days=10, by=CertificateAuthority.create("elsewhere"))
    assert "they belong to different runs" in of(examine(kits, 0)[1], "certificate", "error")
    use(days=100)
    (folder / "peer.key").chmod(0o644)
    assert "every user of this machine may read" in of(examine(kits, 0)[1], "certificate", "error")
    (folder / "peer.key").chmod(0o600)
    assert sotto("admin", "revoke", str(kits), "peer-0").exit_code == 6
    assert "was revoked" in of(examine(kits, 0)[1], "certificate", "error")


def test_a_port_of_another_program_is_named(kits: Path) -> None:
    listen = load(kits / "peer-0" / "peer.toml", environment={}).peer.listen or ""
    with socket.create_server(("127.0.0.1", int(listen.rpartition(":")[2]))):
        code, findings = examine(kits, 0)
    assert code == 2
    assert "is in use by another program → stop that program, or change peer.listen" in of(findings, "port", "error")


def test_two_that_cannot_be_dialled_need_a_relay(kits: Path) -> None:
    rewrite(kits, 0, advertise(1, None))
    rewrite(kits, 0, advertise(0, None))
    code, findings = examine(kits, 0)
    assert code == 2
    assert "can be dialled → on every device, give one of the two an advertise" in of(findings, "peer-1", "error")


def test_a_device_that_is_reached_through_a_relay_can_make_its_sockets(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(kits, 2, advertise(2, None, relay="peer-0"))
    assert "it is reached through relay peer-0" in of(examine(kits, 2)[1], "address", "ok")
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(errno.EACCES, os.strerror(errno.EACCES))))
    code, findings = examine(kits, 2)
    assert "no folder for the sockets to a relay" in of(findings, "address", "error")
    assert code


def test_a_device_that_was_signed_later_need_not_be_known_yet(kits: Path) -> None:
    request(kits / "peer-3", "garage", None, 7700)
    assert admit(kits, propose(kits, (kits / "peer-3" / "request.pem").read_bytes())).index == 3
    with running(kits, 0), running(kits, 1):
        code, findings = examine(kits, 3)
    assert (code, {each["level"] for each in findings}) == (0, {"ok"})
    assert "does not know this peer yet; it will once this peer is started" in of(findings, "peer-0", "ok")
    assert "this peer joins through another one" in of(findings, "peer-2", "ok")


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        pytest.param(lambda received: True, None, id="everything-arrives"),
        pytest.param(lambda received: received < 100, "full ones get lost", id="small-packets-arrive"),
        pytest.param(lambda received: False, None, id="a-listener-that-waits"),
    ],
)
def test_full_packets_are_missed_only_where_small_ones_arrive(
    ends: Callable[[int], bool], verdict: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that ends a connection after zeros, but behaves as if it had not received those of full packets."""
    monkeypatch.setattr(doctor, "TIMEOUT_S", 1.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not ends(len(await reader.read(1 << 16))):
            await reader.read()
        writer.close()

    async def look() -> doctor.Finding | None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await doctor._full_packets("peer-1", f"{host}:{port}")

    found = asyncio.run(look())
    assert (found is None) == (verdict is None)
    if found is not None and verdict is not None:
        assert verdict in found.sentence
        assert (found.level, found.exit_code) == ("error", 6)
