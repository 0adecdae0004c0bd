"""Attacks a running cluster in every way that its threat model names, and shows what the others notice of it.

    python tools/attack.py [--seconds 4] [--only NAME ...] [--json FILE]

Four real peers train together over mutual TLS (choco-sgd, `rounds.late = "skip"`), with the default limits. A fifth one
of their list is the attacker: it holds a certificate of the cluster, and for some attacks certificates that it should
not have. Each attack runs in a process of its own, at lower priority, since on its own machine it would not take the
peers' processor time; what is left of that is in the figures. Round times are those that the peers recorded, before,
during and after; the error is what the attacker was told, or how its connection ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio

from peer.config import Config, load
from peer.config_writer import Host, write_cluster
from peer.errors import SottoError
from peer.net.hello import PROTOCOL_MAX, PROTOCOL_MIN
from peer.net.security import CertificateAuthority, Credentials, Role, load_credentials
from peer.net.transport import _open_channel
from peer.ops import control
from peer.ops.local_cluster import free_ports, peer_environment
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.state.metrics import MetricsStore

HONEST = 4
VICTIM = 0
MALLORY = 4
_GENEROUS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_LOST = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError, OSError)


# The attacker


class Stream:
    """One stream to the victim, with nothing between the attack and the bytes."""

    def __init__(self, port: int, security: Credentials | None) -> None:
        channel: Any = _open_channel(f"127.0.0.1:{port}", f"peer-{VICTIM}", security, _GENEROUS)
        self._channel = channel
        self._call: Any = channel.stream_stream("/sottovoce.v1.Peer/Exchange")()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, data: bytes | pb.Envelope) -> None:
        await self._call.write(data if isinstance(data, bytes) else data.SerializeToString())

    async def next(self) -> pb.Envelope | None:
        data = await self._call.read()
        return None if data is grpc.aio.EOF else pb.Envelope.FromString(data)

    async def verdict(self, within_s: float = 30.0) -> str:
        """Return with which words, or how, the stream ended."""
        try:
            async with asyncio.timeout(within_s):
                while (envelope := await self.next()) is not None:
                    if envelope.HasField("close"):
                        return str(envelope.close.reason)
        except TimeoutError:
            return "nothing in this time"
        except _LOST as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return f"the connection is cut: {str(details)[:150]}"
        return "the stream ends without a word"


@dataclass
class Attacker:
    """What an attack has at hand."""

    kits: Path
    port: int
    until: float
    attempts: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def going(self) -> bool:
        return time.monotonic() < self.until

    def note(self, reason: str) -> None:
        self.attempts += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def config(self) -> Config:
        return load(self.kits / f"peer-{MALLORY}" / "peer.toml", environment={})

    def credentials(self) -> Credentials:
        own = load_credentials(self.config().security, self.kits / f"peer-{MALLORY}", f"peer-{MALLORY}")
        assert isinstance(own, Credentials)
        return own

    def authority(self) -> CertificateAuthority:
        return CertificateAuthority.load(self.kits / "ca.pem", self.kits / "ca.key")

    def hello(self, **changes: Any) -> pb.Envelope:
        facts = json.loads((self.kits / "hello.json").read_text())
        fields: dict[str, Any] = {
            "protocol_min": PROTOCOL_MIN,
            "protocol_max": PROTOCOL_MAX,
            "index": MALLORY,
            "name": f"peer-{MALLORY}",
            "nonce": int.from_bytes(os.urandom(7), "big"),
            "window_bytes": 1 << 16,
            "chunk_bytes": 1 << 16,
            "heartbeat_ms": 10_000,
            **facts,
        }
        return pb.Envelope(hello=pb.Hello(**(fields | changes)))

    async def greeted(self, stream: Stream) -> None:
        """Say hello properly. Raises ConnectionError with the refusal."""
        await stream.send(self.hello())
        answer = await stream.next()
        if answer is None or not answer.HasField("hello"):
            raise ConnectionError(answer.close.reason if answer is not None else "the stream ends")


async def _again_and_again(me: Attacker, once: Callable[[], Awaitable[str]], pause_s: float = 0.2) -> None:
    while me.going:
        try:
            me.note(await once())
        except _LOST as error:
            me.note(f"the connection is cut: {str(error)[:100]}")
        await asyncio.sleep(pause_s)


def _as_whom(me: Attacker, who: Callable[[], Credentials | None], **changes: Any) -> Awaitable[None]:
    security = who()

    async def once() -> str:
        async with Stream(me.port, security) as stream:
            with contextlib.suppress(*_LOST):
                await stream.send(me.hello(**changes))
            return await stream.verdict()

    return _again_and_again(me, once)


async def nothing(me: Attacker) -> None:
    """No attack: a process that computes, to tell what its processor time alone costs the peers."""
    while me.going:
        sum(range(10_000))
    me.attempts, me.reasons = 1, {"no attack, only as much processor time": 1}


async def other_cluster(me: Attacker) -> None:
    """A certificate of another cluster's CA."""
    elsewhere = CertificateAuthority.create("elsewhere")
    theirs = elsewhere.credentials(elsewhere.issue(f"peer-{MALLORY}"))
    mixed = Credentials(theirs.identity, me.authority().certificate, theirs.certificate, theirs.key)
    await _as_whom(me, lambda: mixed)


async def expired(me: Attacker) -> None:
    """A certificate of this CA that expired."""
    authority = me.authority()
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
    await _as_whom(me, lambda: authority.credentials(authority.issue(f"peer-{MALLORY}", days=10, now=then)))


async def revoked(me: Attacker) -> None:
    """A certificate of this CA that was taken back."""
    pem, key = (me.kits / "revoked-peer.pem").read_bytes(), (me.kits / "revoked-peer.key").read_bytes()
    own = me.credentials()
    await _as_whom(me, lambda: Credentials(own.identity, own.ca, pem, key))


async def operator(me: Attacker) -> None:
    """An operator's certificate in place of a peer's."""
    authority = me.authority()
    await _as_whom(me, lambda: authority.credentials(authority.issue("operator", role=Role.OPERATOR)))


async def stranger(me: Attacker) -> None:
    """A certificate of this CA for a peer that is in nobody's list."""
    authority = me.authority()
    await _as_whom(me, lambda: authority.credentials(authority.issue("eve")))


async def other_name(me: Attacker) -> None:
    """A member that says it is another member."""
    await _as_whom(me, me.credentials, index=1, name="peer-1")


async def no_tls(me: Attacker) -> None:
    """A caller without TLS."""
    await _as_whom(me, lambda: None)


async def connections(me: Attacker) -> None:
    """TCP connections that say nothing, as many as the system lets it open."""
    opened: list[socket.socket] = []
    while me.going:
        with contextlib.suppress(OSError):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", me.port))
            opened.append(each)
            me.attempts += 1
        if len(opened) >= 500:
            for each in opened:
                each.close()
            opened.clear()
        await asyncio.sleep(0.002)
    me.reasons["never heard: a bounded number at a time, 10 s each"] = me.attempts


async def handshakes(me: Attacker) -> None:
    """TLS handshakes of a stranger, one after the other, on four connections at a time."""
    elsewhere = CertificateAuthority.create("elsewhere")
    theirs = elsewhere.credentials(elsewhere.issue(f"peer-{MALLORY}"))
    mixed = Credentials(theirs.identity, me.authority().certificate, theirs.certificate, theirs.key)

    async def once() -> str:
        async with Stream(me.port, mixed) as stream:
            return await stream.verdict()

    await asyncio.gather(*(_again_and_again(me, once, 0.0) for _ in range(4)))


async def hellos(me: Attacker) -> None:
    """A member that connects, says hello, and connects anew."""
    own = me.credentials()

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            await stream.send(me.hello())
            answer = await stream.next()
            return "let in" if answer is not None and answer.HasField("hello") else str(answer and answer.close.reason)

    await _again_and_again(me, once, 0.0)


async def _member(me: Attacker, work: Callable[[Stream], Awaitable[None]], pause_s: float = 0.5) -> None:
    """Do something after a proper hello, again and again."""
    own = me.credentials()

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            try:
                await me.greeted(stream)
            except ConnectionError as error:
                return str(error)
            # Listens meanwhile: after a write that failed there is nothing left to be read.
            verdict = asyncio.ensure_future(stream.verdict())
            with contextlib.suppress(*_LOST):
                await work(stream)
            return await verdict

    await _again_and_again(me, once, pause_s)


async def envelopes(me: Attacker) -> None:
    """A member that floods with empty envelopes."""

    async def work(stream: Stream) -> None:
        while me.going:
            await stream.send(pb.Envelope())

    await _member(me, work, 0.0)


async def notes(me: Attacker) -> None:
    """A member that floods with notes of 60 kB."""

    async def work(stream: Stream) -> None:
        note = pb.Envelope(bulletins=[pb.Bulletin(topic="evaluation", data=b"x" * 60_000)])
        while me.going:
            await stream.send(note)

    await _member(me, work, 0.0)


async def requests(me: Attacker) -> None:
    """A member that floods with frames outside the sequence, more than it has credit for."""

    async def work(stream: Stream) -> None:
        chunk = pb.Envelope(chunks=[pb.Chunk(sequence=0, data=os.urandom(60_000))])
        while me.going:
            await stream.send(chunk)

    await _member(me, work, 0.0)


async def oversized_frame(me: Attacker) -> None:
    """A member that announces a frame of a terabyte."""

    async def work(stream: Stream) -> None:
        await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=b"x", frame_bytes=1 << 40)]))

    await _member(me, work)


async def oversized_message(me: Attacker) -> None:
    """A member that sends one message of 64 MB."""

    async def work(stream: Stream) -> None:
        await stream.send(b"\0" * (64 << 20))

    await _member(me, work)


async def malformed_message(me: Attacker) -> None:
    """A member that sends bytes that are no envelope."""

    async def work(stream: Stream) -> None:
        await stream.send(b"\xff" + os.urandom(5000))

    await _member(me, work)


async def malformed_frame(me: Attacker) -> None:
    """A member whose frames are random bytes."""

    async def work(stream: Stream) -> None:
        await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=os.urandom(20_000))]))

    await _member(me, work)


async def silent_tls(me: Attacker) -> None:
    """Callers with a good certificate that open streams and never say hello."""
    own = me.credentials()

    async def once() -> str:
        async with Stream(me.port, own) as stream:
            return await stream.verdict(max(0.1, me.until - time.monotonic()))

    await asyncio.gather(*(_again_and_again(me, once) for _ in range(20)))


async def dripping_hello(me: Attacker) -> None:
    """TCP callers that send one byte of TLS a second."""

    async def once() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", me.port)
        try:
            for byte in b"\x16\x03\x01\x02\x00" + bytes(600):
                writer.write(bytes((byte,)))
                await writer.drain()
                if not me.going:
                    return "still open; cut 10 s after it was accepted"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        if not await reader.read(100):
                            return "the connection is cut"
        finally:
            writer.close()
        return "it may go on"

    await asyncio.gather(*(_again_and_again(me, once, 0.05) for _ in range(40)))


async def dripping_frame(me: Attacker) -> None:
    """A member that sends its frame one byte at a time."""

    async def work(stream: Stream) -> None:
        for at in range(10_000):
            if not me.going:
                return
            await stream.send(pb.Envelope(chunks=[pb.Chunk(sequence=1, data=b"x", offset=at, frame_bytes=10_000)]))
            await asyncio.sleep(0.2)

    await _member(me, work)


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        nothing, other_cluster, expired, revoked, operator, stranger, other_name, no_tls,
        connections, handshakes, hellos, envelopes, notes, requests,
        oversized_frame, oversized_message, malformed_message, malformed_frame,
        silent_tls, dripping_hello, dripping_frame,
    )
}  # fmt: skip


def attack_now(name: str, kits: Path, port: int, seconds: float) -> None:
    """Run one attack in this process and print what it met with as JSON."""
    os.nice(10)
    me = Attacker(kits, port, time.monotonic() + seconds)

    async def limited() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 2.0):
                await ATTACKS[name](me)

    asyncio.run(limited())
    print(json.dumps({"attempts": me.attempts, "reasons": me.reasons}), flush=True)
    os._exit(0)  # gRPC takes its time with hundreds of half-open calls.


# The cluster


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attack."""

    attack: str
    attempts: int
    told: str
    """What the attacker was told most often."""
    before_ms: float
    """Median duration of a round over the four honest peers."""
    during_ms: float
    after_ms: float
    slowest_before_ms: float
    slowest_during_ms: float
    memory_mb: float
    """Of the victim, the most during the attack."""
    handles: int
    log_bytes: int
    """What the victim wrote into its log meanwhile."""


class Cluster:
    """Four real peers, and the folder of a fifth."""

    def __init__(self, directory: Path) -> None:
        self.kits = directory
        settings = (
            "algorithm.name=choco-sgd", "graph.kind=complete", "run.rounds=1000000",
            "rounds.late=skip", "rounds.max_skipped_rounds=10000000", "rounds.late_after_s=2",
            "evaluation.every_rounds=0", "peer.min_step_s=0.02",
            "training.schedule=constant", "training.learning_rate=0.01",
            # The attacker's own messages never come: each round keeps a vector of the model for them, in memory and in
            # checkpoints, which `rounds.max_skipped_rounds` bounds elsewhere. With a small model that is little.
            "training.task_options={hidden=32}",
        )  # fmt: skip
        config = load(environment={}, overrides=list(settings))
        hosts = [Host("127.0.0.1", port) for port in free_ports(HONEST)]
        self.port = hosts[VICTIM].port
        self.files = write_cluster(directory, config, [*hosts, Host(None, 0)])
        authority = CertificateAuthority.load(directory / "ca.pem", directory / "ca.key")
        lost = authority.issue(f"peer-{MALLORY}")
        lost.write(directory / "revoked-peer.pem", directory / "revoked-peer.key")
        pem = authority.revoke(b"", [lost.identity.serial])
        for file in self.files:
            file.with_name("revoked.pem").write_bytes(pem)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for file in self.files[:HONEST]:
            with open(file.with_name("log.txt"), "wb") as log:
                command = [sys.executable, "-m", "peer", "run", "--config", str(file)]
                self.processes.append(subprocess.Popen(command, stderr=log, stdout=log, env=peer_environment()))
        self._write_hello()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write_hello(self) -> None:
        """Take the facts of a proper hello from one that a peer of this configuration would say."""
        from peer.daemon.process import open_peer

        config = load(self.files[MALLORY], environment={})
        daemon = open_peer(config, self.files[MALLORY].parent)
        try:
            transport = daemon._make_transport()
            hello = transport._hello
        finally:
            daemon.close()
        names = ("run", "algorithm", "model_digest", "graph_digest", "run_digest", "num_peers", "software")
        (self.kits / "hello.json").write_text(json.dumps({name: getattr(hello, name) for name in names}))

    def wait_for_round(self, round_: int, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with contextlib.suppress(SottoError):
                if all(self.status(peer)["round"] >= round_ for peer in range(HONEST)):
                    return
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.3)
        logs = "\n".join(file.with_name("log.txt").read_text()[-600:] for file in self.files[:HONEST])
        raise SystemExit(f"the cluster does not train:\n{logs}")

    def status(self, peer: int) -> dict[str, Any]:
        config = load(self.files[peer], environment={})
        return control.call(config, self.files[peer].parent, None, "status")

    def clock_offsets(self) -> list[float]:
        """Return what to add to a monotonic time of ours to get the run's clock of each peer."""
        return [float(self.status(peer)["seconds"]) - time.monotonic() for peer in range(HONEST)]

    def durations_ms(self, begin: float, end: float, offsets: list[float]) -> list[float]:
        """Return the durations of the rounds that the honest peers ended in a span of our monotonic clock."""
        found: list[float] = []
        for peer in range(HONEST):
            store = MetricsStore(self.files[peer].with_name("state") / "metrics.sqlite", read_only=True)
            times = [record.time_s - offsets[peer] for record in store.rounds()]
            store.close()
            found += [1000 * (two - one) for one, two in itertools.pairwise(times) if begin <= one and two <= end]
        return found

    def figures(self) -> tuple[float, int, int]:
        """Return megabytes of memory, open files and bytes of log of the victim."""
        pid = self.processes[VICTIM].pid
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        handles = len(os.listdir(f"/proc/{pid}/fd"))
        log = self.files[VICTIM].with_name("log.txt").stat().st_size
        return int(fields["VmRSS"].split()[0]) / 1024, handles, log


def measure(cluster: Cluster, name: str, seconds: float) -> Row:
    """Attack once, with a quiet span before and after."""
    offsets = cluster.clock_offsets()
    begin = time.monotonic()
    time.sleep(seconds)
    log_before = cluster.figures()[2]
    memory, handles, log = 0.0, 0, 0
    attack = time.monotonic()
    command = [sys.executable, __file__, "--attack-now", name, str(cluster.kits), str(cluster.port), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as attacker:
        while attacker.poll() is None:
            now = cluster.figures()
            memory, handles, log = max(memory, now[0]), max(handles, now[1]), now[2]
            time.sleep(0.1)
            if time.monotonic() > attack + seconds + 30:
                attacker.kill()
        assert attacker.stdout is not None
        assert attacker.stderr is not None
        output, trouble = attacker.stdout.read(), attacker.stderr.read()
    over = time.monotonic()
    time.sleep(seconds + 1.0)  # The peers write their figures twice a second.
    met = json.loads(output) if output else {"attempts": 0, "reasons": {f"the attacker failed: {trouble[-300:]!r}": 1}}
    before, during = cluster.durations_ms(begin, attack, offsets), cluster.durations_ms(attack, over, offsets)
    return Row(
        attack=name,
        attempts=met["attempts"],
        told=max(met["reasons"], key=met["reasons"].get, default="nothing"),
        before_ms=statistics.median(before),
        during_ms=statistics.median(during),
        after_ms=statistics.median(cluster.durations_ms(over, over + seconds, offsets)),
        slowest_before_ms=max(before),
        slowest_during_ms=max(during),
        memory_mb=memory,
        handles=handles,
        log_bytes=log - log_before,
    )


def describe(row: Row) -> str:
    """Return a row as one line."""
    rounds = f"{row.before_ms:.0f} / {row.during_ms:.0f} / {row.after_ms:.0f} ms"
    slowest = f"{row.slowest_before_ms:.0f} / {row.slowest_during_ms:.0f}"
    cost = f"{row.memory_mb:.0f} MB, {row.handles} handles, {row.log_bytes} B of log"
    return f"{row.attack:<18} {row.attempts:>6} x   round {rounds}, slowest {slowest}   {cost}   {row.told}"


def main() -> None:
    """Attack a cluster of its own and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each attack lasts")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="these attacks alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--attack-now", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack_now:
        name, kits, port, seconds = arguments.attack_now
        attack_now(name, Path(kits), int(port), float(seconds))
        return
    rows = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="sotto-attack-") as folder, Cluster(Path(folder)) as cluster:
        cluster.wait_for_round(20)
        for name in arguments.only:
            row = measure(cluster, name, arguments.seconds)
            rows.append(row)
            print(describe(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
