"""The attacker: a real peer in this process that takes full part in the run, and says more than it should.

Its own numbers count without what it adds. A frame that it inserts gets the next number on the wire, and all behind it
move up by one; where the receiver refuses it and the connection ends, the next honest frame gets that number. So the
good frames are all sent, whatever becomes of the bad ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer import wire
from peer.config.options import load
from peer.daemon.assembly import Parts
from peer.daemon.incoming import Incoming
from peer.daemon.process import Daemon, open_peer
from peer.net import handshake, hello
from peer.net.transport import Transport
from peer.wire.message import Message, MessageKind

HONEST = (0, 1, 2)
ME = 3
STRIKE_ROUND = 8
"""The lie is told when the attacker has completed this many rounds."""
_LINK_WAIT_S = 30.0


class Tongue:
    """Stands between the attacker's peer and its transport. Implements `peer.net.handler.Handler` by way of
    `Incoming`, which hears everything but what concerns the frames that were added."""

    def __init__(self, heard: Incoming) -> None:
        self.last: dict[int, bytes] = {}
        """Neighbour → the last honest frame of a round that it was sent."""
        self.told: list[str] = []
        """Why links ended since the lie."""
        self._heard = heard
        self._transport: Transport | None = None
        self._sent: dict[int, int] = {}
        """Neighbour → the highest of our own numbers that went over the present connection, or did before."""
        self._added: dict[int, set[int]] = {peer: set() for peer in HONEST}
        """Neighbour → numbers on the wire of frames that were added and that the neighbour has, or may have."""
        self._instead: dict[int, Callable[[bytes], bytes | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._heard, name)

    # -- what the peer says --------------------------------------------------------------------------------------------

    def attach(self, transport: Transport) -> Transport:
        """Take over what goes to the transport."""
        self._transport = transport
        self._send, self._bulletin = transport.send, transport.bulletin
        setattr(transport, "send", self.say)  # noqa: B010 - a method in the place of a method
        return transport

    def say(self, peer: int, seq: int, frame: bytes) -> None:
        """Send what the honest peer sends."""
        if seq == 0:
            self._send(peer, 0, frame)
            return
        if not self._is_notice(frame):
            self.last[peer] = frame
        forge = self._instead.get(peer)
        if forge is not None and (forged := forge(frame)) is not None:
            frame = forged
            self._instead.pop(peer, None)
        self._sent[peer] = max(seq, self._sent.get(peer, 0))
        self._send(peer, self._on_wire(peer, seq), frame)

    # -- what the attacker says ----------------------------------------------------------------------------------------

    def insert(self, peer: int, frame: bytes) -> None:
        """Send a frame that is none of the peer's own."""
        number = self._on_wire(peer, self._sent.get(peer, 0)) + 1
        while number in self._added[peer]:
            number += 1
        self._added[peer].add(number)
        self._send(peer, number, frame)

    def replace_next(self, peer: int, forge: Callable[[bytes], bytes | None]) -> None:
        """Send `forge(frame)` once in the place of a frame of the peer's own, where that is not None."""
        self._instead[peer] = forge

    def bare(self, peer: int, frame: bytes) -> None:
        """Send a frame outside the sequence."""
        self._send(peer, 0, frame)

    def tell(self, peer: int, topic: str, data: bytes) -> None:
        """Send a note that is none of the peer's own."""
        with contextlib.suppress(Exception):
            self._bulletin(peer, topic, data)

    # -- what the transport says ---------------------------------------------------------------------------------------

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """A link is up; what the neighbour refused is taken back."""
        added = self._added[peer] = {number for number in self._added.get(peer, ()) if number <= remote_has}
        own = remote_has - len(added)
        frames = self._heard.link_up(peer, own)
        self._sent[peer] = max([own, *(seq for seq, _ in frames)])
        return [(self._on_wire(peer, seq) if seq else 0, frame) for seq, frame in frames]

    def link_down(self, peer: int, reason: str) -> None:
        """A link ended."""
        self.told.append(reason)
        self._heard.link_down(peer, reason)

    def receipt(self, peer: int, upto: int) -> None:
        """A neighbour has frames for good."""
        self._heard.receipt(peer, upto - sum(number <= upto for number in self._added.get(peer, ())))

    def _on_wire(self, peer: int, seq: int) -> int:
        for number in sorted(self._added.get(peer, ())):
            if number <= seq:
                seq += 1
        return seq

    @staticmethod
    def _is_notice(frame: bytes) -> bool:
        return frame[:2] == b"SM"


class Insider:
    """What a lie has at hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / f"peer-{ME}" / "peer.toml"
        self.config = load(file, environment={})
        self.base = file.parent
        self.daemon: Daemon = open_peer(self.config, self.base)
        parts: Parts = self.daemon.parts
        self.tongue = Tongue(parts.incoming)
        make_transport = parts.make_transport
        parts.incoming = self.tongue  # type: ignore[assignment]
        setattr(parts, "make_transport", lambda: self.tongue.attach(make_transport()))  # noqa: B010
        self.layout = self.daemon.local.trainer.layout
        self.report: dict[str, Any] = {}
        """What is told of the lie beside the time: figures of its own."""
        self.said: list[bytes] = []
        """The bad bytes."""

    @property
    def round(self) -> int:
        """Rounds that the attacker's peer has completed."""
        return self.daemon.loop.round

    async def reached(self, round_: int) -> None:
        """Return when so many rounds are done and all links are up."""
        deadline = time.monotonic() + _LINK_WAIT_S
        while self.round < round_ or (
            not all(map(self.daemon.neighbors.is_up, HONEST)) and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.005)

    def message(self, peer: int) -> Message:
        """Return the last honest message to a peer."""
        return wire.decode(self.tongue.last[peer], self.layout)

    def forged(self, peer: int, *, ahead: int = 1, **changes: Any) -> bytes:
        """Return the message of a round `ahead` of the last one that a peer was sent, with changes."""
        last = self.message(peer)
        return wire.encode(replace(last, round=last.round + ahead, **changes) if "round" not in changes else
                           replace(last, **changes), self.layout)  # fmt: skip

    def insert(self, frame: Callable[[int], bytes] | bytes, *peers: int) -> None:
        """Insert a frame into the stream to some peers, to all by default."""
        for peer in peers or HONEST:
            bad = frame if isinstance(frame, bytes) else frame(peer)
            self.said.append(bad)
            self.tongue.insert(peer, bad)

    def replace_next(self, peer: int, **changes: Any) -> None:
        """Change the next message of a round to a peer."""

        def forge(frame: bytes) -> bytes | None:
            if frame[:2] != b"SV":
                return None
            message = wire.decode(frame, self.layout)
            if message.kind is not MessageKind.GOSSIP:
                return None
            changed = {key: value(message) if callable(value) else value for key, value in changes.items()}
            self.said.append(wire.encode(replace(message, **changed), self.layout))
            return self.said[-1]

        self.tongue.replace_next(peer, forge)

    def bare(self, frame: Callable[[int], bytes], *peers: int) -> None:
        """Send a frame outside the sequence."""
        for peer in peers or HONEST:
            self.said.append(frame(peer))
            self.tongue.bare(peer, self.said[-1])

    def tell(self, topic: str, data: bytes, *peers: int) -> None:
        """Send a note to some peers, to all by default."""
        self.said.append(data)
        for peer in peers or HONEST:
            self.tongue.tell(peer, topic, data)

    async def live(self, lie: Callable[[Insider], Awaitable[None]] | None) -> int:
        """Take part in the run to its end, and lie in the midst of it; return the exit code of the peer."""

        async def strike() -> None:
            await self.reached(STRIKE_ROUND)
            assert lie is not None
            struck = {"time": time.monotonic(), "round": self.round}
            self.tongue.told.clear()
            task = asyncio.ensure_future(lie(self))
            while not task.done():
                await asyncio.sleep(0.05)
                self._write(struck)
            self._write(struck)
            task.result()
            while True:
                await asyncio.sleep(0.2)
                self._write(struck)

        striking = asyncio.ensure_future(strike()) if lie is not None else None
        try:
            return await self.daemon.main()
        finally:
            if striking is not None:
                striking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await striking

    def _write(self, struck: dict[str, Any]) -> None:
        distinct = list(dict.fromkeys(self.said))
        report = {
            **struck,
            **self.report,
            "bytes": sum(map(len, self.said)),
            "said": [each.hex() for each in distinct[:20]],
            "told": self.tongue.told[:20],
        }
        beside = self.folder / ".strike.json"
        beside.write_text(json.dumps(report))
        beside.rename(self.folder / "strike.json")


def speak_as(release: Path) -> None:
    """Say from now on that this peer speaks what an installation does: until all do, members believe what the release
    before said."""
    newest = re.search(r"^NEWEST = (\d+)", (release / "peer" / "protocol.py").read_text(), re.MULTILINE)
    assert newest is not None
    for module in (hello, handshake):
        for name in ("PROTOCOL_MIN", "PROTOCOL_MAX"):
            setattr(module, name, int(newest[1]))
