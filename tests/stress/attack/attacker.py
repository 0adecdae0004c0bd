"""What an attack has at hand: certificates, a proper hello, and one stream to the victim with nothing in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer.config.options import Config, load
from peer.daemon.members.signed_statements import SignedStatements
from peer.net.rpc import StreamLost
from peer.net.security.authority import CertificateAuthority
from peer.net.security.credentials import Credentials, load_credentials
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.state.disk import Disk
from peer.state.statement_counter import StatementCounter
from tests.hostile.transport.caller import BareStream, hello
from tests.stress.attack.cluster import MALLORY, VICTIM

LOST = (StreamLost, asyncio.CancelledError, OSError)


class Stream(BareStream):
    """One stream to the victim."""

    def __init__(self, port: int, security: Credentials | None) -> None:
        super().__init__(port, f"peer-{VICTIM}", security)

    async def verdict(self, within_s: float = 30.0) -> str:
        """Return with which words, or how, the stream ended."""
        try:
            async with asyncio.timeout(within_s):
                while (envelope := await self.next()) is not None:
                    if envelope.HasField("close"):
                        return str(envelope.close.reason)
        except TimeoutError:
            return "nothing in this time"
        except LOST as error:
            return f"the connection is cut: {str(error)[:150]}"
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

    @property
    def config_file(self) -> Path:
        return self.kits / f"peer-{MALLORY}" / "peer.toml"

    def config(self) -> Config:
        return load(self.config_file, environment={})

    def credentials(self) -> Credentials:
        own = load_credentials(self.config().security, self.config_file.parent, f"peer-{MALLORY}")
        assert isinstance(own, Credentials)
        return own

    def statements(self) -> SignedStatements:
        """Return what signs in the attacker's name."""
        counter = StatementCounter(Disk(self.config_file.parent), time.time())
        return SignedStatements(
            self.credentials(), run=self.config().run.name, listed=(), counter=counter, unsigned="refuse"
        )

    def fact(self, name: str) -> Any:
        """Return what only whoever built the task knows: "test_classes", or "repair_request" in hexadecimal digits."""
        return json.loads((self.kits / "facts.json").read_text())[name]

    def authority(self) -> CertificateAuthority:
        return CertificateAuthority.load(self.kits / "ca.pem", self.kits / "ca.key")

    def hello(self, **changes: Any) -> pb.Envelope:
        facts = json.loads((self.kits / "hello.json").read_text())
        own = {"index": MALLORY, "name": f"peer-{MALLORY}", "nonce": int.from_bytes(os.urandom(7), "big")}
        return pb.Envelope(hello=hello(**{**facts, **own, "window_bytes": 1 << 16, **changes}))

    async def greeted(self, stream: Stream) -> None:
        """Say hello properly. Raises ConnectionError with the refusal."""
        await stream.send(self.hello())
        answer = await stream.next()
        if answer is None or not answer.HasField("hello"):
            raise ConnectionError(answer.close.reason if answer is not None else "the stream ends")


async def again_and_again(me: Attacker, once: Callable[[], Awaitable[str]], pause_s: float = 0.2) -> None:
    while me.going:
        try:
            me.note(await once())
        except LOST as error:
            me.note(f"the connection is cut: {str(error)[:100]}")
        await asyncio.sleep(pause_s)


async def as_member(me: Attacker, work: Callable[[Stream], Awaitable[None]], pause_s: float = 0.5) -> None:
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
            with contextlib.suppress(*LOST):
                await work(stream)
            return await verdict

    await again_and_again(me, once, pause_s)
