"""Control calls and relayed connections as gRPC would hand them over, told lies: bytes from callers, and from a relay.

The services are those of production, with their functions as they are registered; only the streams are in memory.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import cast

from peer.foreign_text import printable
from peer.net.admission import CONTROL_VERBS
from peer.net.neighbor import RelayAddress
from peer.net.rpc import Caller, DialledStream, ServedStream, Server
from peer.net.tasks import Tasks
from peer.net.transport import Transport
from peer.net.tunnels import Tunnels
from peer.proto.sottovoce.v1 import control_pb2
from peer.proto.sottovoce.v1.relay_pb2 import Piece
from tests.hostile import forged_certificates as forged
from tests.stress.meaning.answers import no_number
from tests.stress.meaning.protobuf_lies import changed
from tests.stress.meaning.worlds import PromiseBroken

_LONGEST_REFUSAL = 300
_MOST_TURNS = 400
"""More than all pieces of one case take."""
_ADDRESSES = ("ipv4:127.0.0.1:40001", "ipv4:192.0.2.7:40001", "ipv6:[::1]:40001", "unix:", "", "ipv4:x\x1b[2J")
_TEXTS = ("", "{}", "[]", "null", '{"name": "peer-1"}', '{"index": 0}', '{"list": "x"}', '{"list": 7}', "[" * 40_000)


class _Registered(Server):
    """The functions that a server would serve."""

    def __init__(self) -> None:
        self.streams: dict[str, Callable[[ServedStream], Awaitable[None]]] = {}
        self.calls: dict[str, Callable[[Caller, bytes], Awaitable[bytes]]] = {}

    def serve_streams(self, service: str, methods: Mapping[str, Callable[[ServedStream], Awaitable[None]]]) -> None:
        self.streams |= methods

    def serve_calls(self, service: str, methods: Mapping[str, Callable[[Caller, bytes], Awaitable[bytes]]]) -> None:
        self.calls |= methods


class _Script(ServedStream):
    """A stream whose other end says some messages, and ends."""

    def __init__(self, caller: Caller, said: Iterable[bytes], patience: int = 0) -> None:
        """`patience`: for so many turns of the loop it is silent before it ends."""
        self.caller, self._said, self._patience = caller, deque(said), patience
        self.heard: list[bytes] = []

    async def read(self) -> bytes | None:
        await asyncio.sleep(0)
        if self._said:
            return self._said.popleft()
        for _ in range(self._patience):
            await asyncio.sleep(0)
        return None

    async def write(self, data: bytes) -> None:
        self.heard.append(data)
        await asyncio.sleep(0)


class _Socket(asyncio.Transport):
    """The local end of a relayed connection, which takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.taken += len(data)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class Callers:
    """Those who call one peer, and the relay that it calls."""

    def __init__(self, random: Random, transport: Transport, folder: Path, blobs: tuple[bytes, ...]) -> None:
        """`folder`: of the peer, beside those of the others."""
        self._random, self._transport, self._blobs = random, transport, blobs
        self._server = _Registered()
        transport.relay.serve(self._server)
        transport.control.serve(self._server)
        cluster = folder.parent
        honest = [*(cluster / f"peer-{peer}" / "peer.pem" for peer in range(3)), cluster / "operator.pem"]
        self._certificates = [path.read_bytes() for path in honest]

    def _caller(self) -> Caller:
        random = self._random
        certificate: bytes | None = random.choice(self._certificates)
        if random.random() < 0.3:
            certificate = random.choice((None, forged.armoured(random.choice(self._blobs), "CERTIFICATE"), b"x"))
        return Caller(random.choice(_ADDRESSES), (), certificate)

    # Control calls.

    def control(self) -> None:
        """A control call with any bytes. Raises CallRefused, and PromiseBroken where what it says is no answer."""
        random = self._random
        caller, verb = self._caller(), random.choice(CONTROL_VERBS).capitalize()
        if verb == "Stop" and caller.certificate in (self._certificates[0], self._certificates[-1]):
            return  # It may.
        asyncio.run(self._call(caller, verb, self._request()))

    async def _call(self, caller: Caller, verb: str, request: bytes) -> None:
        try:
            async with asyncio.timeout(0.001):
                answer = await self._server.calls[verb](caller, request)
        except TimeoutError:
            return  # It waits for the loop of rounds, which has not begun.
        finally:
            self._check_no_bug()
        json.loads(control_pb2.ControlResponse.FromString(answer).result, parse_constant=no_number)

    def _request(self) -> bytes:
        random = self._random
        honest = control_pb2.ControlRequest(arguments=random.choice(_TEXTS), challenge=bytes(16))
        if random.random() < 0.3:
            # No neighbour: such a one would be dialled.
            index = random.choice((0, -1, 3, 1 << 70, 0.5, "1", None, [1]))
            honest.arguments = json.dumps({"index": index, "name": "peer-9", "list": random.choice((None, "x", "ä"))})
        lie = changed(random, honest, random.choice((0, 0, 1, 2)), self._blobs).SerializeToString()
        return lie if random.random() < 0.9 else random.randbytes(random.randrange(60))

    # The relay.

    def relay(self) -> None:
        """Ends that wait and call at this peer's relay, with lies among their pieces."""
        asyncio.run(self._relay())

    async def _relay(self) -> None:
        random = self._random
        streams = [(random.choice(("Accept", "Accept", "Connect")), self._end()) for _ in range(random.randint(2, 6))]
        tasks = [asyncio.ensure_future(self._server.streams[method](stream)) for method, stream in streams]
        for _ in range(_MOST_TURNS):
            await asyncio.sleep(0)
            if all(task.done() for task in tasks):
                break
        for task in tasks:
            task.cancel()
        for problem in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(problem, Exception):
                raise problem
        self._check_no_bug()
        for _, stream in streams:
            for heard in map(Piece.FromString, stream.heard):
                if len(heard.refusal) > _LONGEST_REFUSAL:
                    raise PromiseBroken(f"a refusal of {len(heard.refusal)} characters")
        relay = self._transport.relay
        if not relay.is_idle:
            raise PromiseBroken("the relay keeps what has ended")

    def _end(self) -> _Script:
        """Return the stream of one end: honest in most of its pieces."""
        random = self._random
        me = random.randrange(3)
        first = Piece(sender=f"peer-{me}", peer=f"peer-{random.randrange(3)}")
        caller = Caller(random.choice(_ADDRESSES), (), self._certificates[me])
        return _Script(caller if random.random() < 0.8 else self._caller(), self._pieces(first), random.randrange(40))

    def _pieces(self, first: Piece) -> Iterator[bytes]:
        random = self._random
        for number in range(random.randint(0, 8)):
            honest = Piece(data=b"bytes") if number else first
            lie = changed(random, honest, random.choice((0, 0, 0, 1, 2)), self._blobs).SerializeToString()
            yield lie if random.random() < 0.95 else random.randbytes(random.randrange(40))

    # The other end: what a relay says to a peer that waits there, or calls through it.

    def tunnel(self) -> None:
        """A relay that lies to this peer."""
        asyncio.run(self._tunnel())

    async def _tunnel(self) -> None:
        random, blamed = self._random, list[Exception]()
        stream = _Script(Caller("", (), None), self._pieces(Piece(peer="peer-2")))
        tasks = Tasks()
        tunnels = Tunnels(
            name="peer-0",
            open_stream=lambda relay, method: cast(DialledStream, stream),
            tasks=tasks,
            heartbeat_s=1.0,
            blame=lambda address, error: blamed.append(error),
        )
        relay = RelayAddress("peer-1", "192.0.2.1:7700")
        try:
            if random.random() < 0.5:
                await tunnels.wait_for_caller(relay, asyncio.Event())
            else:
                reader = asyncio.StreamReader()
                reader.feed_data(b"bytes")
                protocol = asyncio.StreamReaderProtocol(reader)
                loop = asyncio.get_running_loop()
                await tunnels.call("peer-2", relay, reader, asyncio.StreamWriter(_Socket(), protocol, reader, loop))
        finally:
            tunnels.close()
        if blamed:
            raise blamed[0]
        for trouble in tunnels.trouble.values():
            if trouble != printable(trouble) or len(trouble) > _LONGEST_REFUSAL:
                raise PromiseBroken(f"trouble with a relay is told in its own words: {trouble!r}")

    def _check_no_bug(self) -> None:
        """Raise PromiseBroken where a service met what it did not expect, and blamed its caller for it."""
        problem = self._transport.offences.last(-1)
        if problem is not None:
            raise PromiseBroken(f"a call that nothing was prepared for: {problem}")
