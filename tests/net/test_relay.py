"""Two peers that cannot dial each other, connected through an ordinary one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from peer.config.options import TransportOptions
from peer.errors import ConfigError, StateError
from peer.net.control import call_control
from peer.net.neighbor import Neighbor, RelayAddress
from peer.net.relay import MAX_TUNNELS, PieceStream, RelayService
from peer.net.rpc import Caller, Channel, DialledStream, ServedStream, Server
from peer.net.security.credentials import Credentials
from peer.net.services import RELAY_SERVICE
from peer.net.tasks import Tasks
from peer.net.transport import Transport
from peer.net.tunnels import Tunnels
from peer.proto.sottovoce.v1.relay_pb2 import Piece
from peer.rate_limits import Allowance
from tests.net.transport_peers import NAMES, Mind, authority, build, credentials, passive, running, until

OPTIONS = TransportOptions(backoff_max_s=0.3, dial_timeout_s=5, heartbeat_s=1.0)


def beyond(index: int, relay: RelayAddress) -> Neighbor:
    return Neighbor(index, NAMES[index], None, dial=True, relay=relay)


@contextlib.asynccontextmanager
async def relayed_pair(
    ben: Mind, cleo: Mind, *, security: Any = "own", rate: float = 1250.0, ends: TransportOptions = OPTIONS
) -> AsyncIterator[tuple[Transport, Transport, Transport]]:
    """ada relays; cleo waits there; ben dials cleo. Neither of the two is a neighbour of ada."""
    options = OPTIONS.model_copy(update={"relay_kbytes_per_s": rate})
    ada = build(0, Mind(), [], options=options, security=security, members=NAMES)
    async with running(ada):
        relay = RelayAddress(NAMES[0], f"127.0.0.1:{ada.port}")
        waits = build(
            2, cleo, [passive(1)], listen=None, options=ends, own_relay=relay,
            security=security,
        )  # fmt: skip
        dials = build(1, ben, [beyond(2, relay)], listen=None, options=ends, security=security)
        async with running(waits, dials):
            yield ada, dials, waits


@pytest.mark.parametrize("security", ["own", None], ids=["mtls", "insecure"])
def test_frames_pass_both_ways_and_are_counted_where_they_pass(security: Any) -> None:
    async def story() -> None:
        ben, cleo = Mind(), Mind()
        async with relayed_pair(ben, cleo, security=security) as (ada, dials, waits):
            await until(lambda: dials.is_up(2) and waits.is_up(1))
            for number in range(20):
                ben.send(2, b"%d" % number * 1000)
                cleo.send(1, b"%d" % number * 2000)
            await until(lambda: len(cleo.frames) == 20 and len(ben.frames) == 20)
            assert [frame for _, frame in cleo.frames] == [b"%d" % number * 1000 for number in range(20)]
            there, back = ada.relay.carried["ben", "cleo"], ada.relay.carried["cleo", "ben"]
            frames = sum(len(b"%d" % number) * 1000 for number in range(20))
            assert there >= frames
            assert back >= 2 * frames
            await until(lambda: dials.relayed(2) is not None)
            sent, received = dials.relayed(2) or (0, 0)
            assert sent <= ada.relay.carried["ben", "cleo"] + 65536
            assert received <= ada.relay.carried["cleo", "ben"]
            counters = dials.counters(2)
            assert counters.socket_bytes_sent is not None
            assert counters.socket_bytes_sent > counters.protobuf_bytes_sent

    asyncio.run(story())


def test_the_relay_carries_nothing_that_it_could_read() -> None:
    """What passes is TLS between the two ends: no word of a frame shows in it."""
    secret = b"a model that is nobody else's business" * 50

    async def story() -> None:
        ben, cleo = Mind(), Mind()
        seen = bytearray()
        async with relayed_pair(ben, cleo) as (ada, dials, waits):
            passing = ada.relay._pass_on

            async def listening(data: bytes, *rest: Any) -> None:
                seen.extend(data)
                await passing(data, *rest)

            ada.relay._pass_on = listening  # type: ignore[assignment, method-assign]
            ben.send(2, secret)
            await until(lambda: dials.is_up(2) and waits.is_up(1) and cleo.frames)
        assert len(seen) > len(secret)
        assert secret[:40] not in seen
        assert b"sottovoce" not in seen

    asyncio.run(story())


def test_a_relay_that_restarts_is_found_again() -> None:
    async def story() -> None:
        ben, cleo = Mind(), Mind()
        first = build(0, Mind(), [], options=OPTIONS, members=NAMES)
        await first.start()
        relay = RelayAddress(NAMES[0], f"127.0.0.1:{first.port}")
        waits = build(2, cleo, [passive(1)], listen=None, options=OPTIONS, own_relay=relay)
        dials = build(1, ben, [beyond(2, relay)], listen=None, options=OPTIONS)
        async with running(waits, dials):
            await until(lambda: dials.is_up(2) and waits.is_up(1))
            await first.close("it must")
            await until(lambda: not dials.is_up(2))
            second = build(0, Mind(), [], listen=relay.address, options=OPTIONS, members=NAMES)
            async with running(second):
                ben.send(2, b"after the restart")
                await until(lambda: (1, b"after the restart") in cleo.frames)

    asyncio.run(story())


def test_a_peer_that_does_not_wait_there_is_named() -> None:
    async def story() -> None:
        ada = build(0, Mind(), [], options=OPTIONS, members=NAMES)
        async with running(ada):
            relay = RelayAddress(NAMES[0], f"127.0.0.1:{ada.port}")
            dials = build(1, Mind(), [beyond(2, relay)], listen=None, options=OPTIONS)
            async with running(dials):
                await until(lambda: 2 in dials.problems)
                assert "cleo cannot be reached: its relay ada" in dials.problems[2]
                assert "'cleo' does not wait at this relay; is it running" in dials.problems[2]

    asyncio.run(story())


def test_who_relays_for_nobody_says_so() -> None:
    async def story() -> None:
        async with relayed_pair(Mind(), Mind(), rate=0) as (_, dials, _waits):
            await until(lambda: "relays for nobody" in dials.problems.get(2, ""))

    asyncio.run(story())


def test_the_rate_of_what_is_carried_is_bounded() -> None:
    async def story() -> None:
        ben, cleo = Mind(), Mind()
        async with relayed_pair(ben, cleo, rate=400.0) as (ada, dials, waits):
            await until(lambda: dials.is_up(2) and waits.is_up(1))
            loop = asyncio.get_running_loop()
            begin, before = loop.time(), sum(ada.relay.carried.values())
            ben.send(2, bytes(1_000_000))
            await until(lambda: cleo.frames)
            carried, took = sum(ada.relay.carried.values()) - before, loop.time() - begin
            # A second's worth may pass at once.
            assert carried <= 400_000 * (took + 1.0) + 2 * 65536

    asyncio.run(story())


def test_neighbours_beyond_relays_that_are_dialled_at_the_same_time_are_not_confused() -> None:
    async def story() -> None:
        ben, cleo, dan = Mind(), Mind(), Mind()
        ada = build(0, Mind(), [], options=OPTIONS, members=NAMES)
        async with running(ada):
            relay = RelayAddress(NAMES[0], f"127.0.0.1:{ada.port}")
            third = build(2, cleo, [passive(1)], listen=None, options=OPTIONS, own_relay=relay)
            fourth = build(3, dan, [passive(1)], listen=None, options=OPTIONS, own_relay=relay)
            dials = build(1, ben, [beyond(2, relay), beyond(3, relay)], listen=None, options=OPTIONS)
            async with running(third, fourth, dials):
                await until(lambda: dials.is_up(2) and dials.is_up(3), within_s=10)

    asyncio.run(story())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "no-such-host.invalid:7700"])
def test_the_sockets_of_tunnels_are_made_when_they_are_needed_and_removed(
    listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    relay = RelayAddress(NAMES[0], "127.0.0.1:9")

    async def story() -> None:
        waits = build(2, Mind(), [passive(1)], listen=listen, options=OPTIONS, own_relay=relay)
        assert not list(tmp_path.iterdir())
        try:
            async with running(waits):
                assert list(tmp_path.iterdir())
        except ConfigError:
            assert "no-such-host" in listen
        assert not list(tmp_path.iterdir())

    asyncio.run(story())


def test_a_temporary_folder_with_a_long_path_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes 107 bytes; gRPC said nothing, and the peer waited for ever."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def story() -> None:
        ben, cleo = Mind(), Mind()
        async with relayed_pair(ben, cleo) as (_, dials, waits):
            await until(lambda: dials.is_up(2) and waits.is_up(1))

    asyncio.run(story())


def test_where_no_folder_for_sockets_can_be_made_the_start_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    relay = RelayAddress(NAMES[0], "127.0.0.1:9")
    with pytest.raises(StateError, match=r"/tmp: Read-only file system.*set TMPDIR"):
        asyncio.run(build(2, Mind(), [passive(1)], options=OPTIONS, own_relay=relay).start())


def test_a_relay_that_names_caller_after_caller_does_not_fill_the_memory() -> None:
    async def story() -> None:
        held, most, named = 0, 0, 0

        async def accept(stream: ServedStream) -> None:
            nonlocal held, most, named
            held, named = held + 1, named + 1
            most = max(most, held)
            try:
                await stream.read()
                await stream.write(Piece(peer=f"caller-{named}").SerializeToString())
                while await stream.read() is not None:
                    pass
            finally:
                held -= 1

        relay = Server([], max_concurrent=1000)
        relay.serve_streams(RELAY_SERVICE, {"Accept": accept})
        port = relay.bind("127.0.0.1:0", None)
        await relay.start()
        own_relay = RelayAddress(NAMES[0], f"127.0.0.1:{port}")
        waits = build(2, Mind(), [passive(1)], listen=None, options=OPTIONS, own_relay=own_relay, security=None)
        async with running(waits):
            await until(lambda: named >= MAX_TUNNELS)
            await asyncio.sleep(0.5)
            assert most == MAX_TUNNELS
        await relay.stop(0)

    asyncio.run(story())


def test_a_caller_that_comes_while_a_heartbeat_is_written_is_not_lost() -> None:
    """gRPC ends a stream when a write to it is cancelled."""

    class Stream:
        """A relay's, which names a caller before the first heartbeat is through, and then sends data."""

        def __init__(self) -> None:
            self.pieces = [Piece(peer="cleo"), Piece(data=b"hello from cleo")]
            self.beating, self.through = asyncio.Event(), asyncio.Event()
            self.cut = False

        async def read(self) -> bytes | None:
            await self.beating.wait()
            if not self.pieces:
                await asyncio.Event().wait()
            return self.pieces.pop(0).SerializeToString()

        async def write(self, data: bytes) -> None:
            if Piece.FromString(data) == Piece():
                self.beating.set()
                try:
                    await self.through.wait()
                except asyncio.CancelledError:
                    self.cut = True
                    raise

        async def abandon(self) -> None: ...

    async def story() -> None:
        stream, heard, taken = Stream(), asyncio.Event(), asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.read(100) == b"hello from cleo"
            heard.set()

        tunnels = Tunnels(
            name="ben",
            open_stream=lambda relay, method: cast(DialledStream, stream),
            tasks=Tasks(),
            heartbeat_s=1.0,
            blame=lambda address, error: None,
        )
        server = await asyncio.start_unix_server(listen, tunnels.listening_socket)
        waits = asyncio.create_task(tunnels.wait_for_caller(RelayAddress("ada", "127.0.0.1:9"), taken))
        await until(taken.is_set)
        stream.through.set()
        await until(heard.is_set)
        assert not stream.cut
        waits.cancel()
        server.close()
        tunnels.close()

    asyncio.run(story())


class Methods:
    """A server that keeps what it is to serve."""

    def serve_streams(self, service: str, methods: dict[str, Callable[[Any], Coroutine[None, None, None]]]) -> None:
        self.accept, self.connect = methods["Accept"], methods["Connect"]


class Held:
    """A stream whose writes wait until they are let through."""

    def __init__(self, name: str, *first: Piece, flows: bool = False) -> None:
        self.caller = Caller(f"unix:{name}", (), None)
        self.incoming: asyncio.Queue[Piece] = asyncio.Queue()
        self.written: list[Piece] = []
        self.flowing = asyncio.Event()
        if flows:
            self.flowing.set()
        for piece in first:
            self.incoming.put_nowait(piece)

    async def read(self) -> bytes:
        return (await self.incoming.get()).SerializeToString()

    async def write(self, data: bytes) -> None:
        await self.flowing.wait()
        self.written.append(Piece.FromString(data))
        await asyncio.sleep(0.02)  # It is there before its sender hears of that.


def relay_of_anybody(idle_s: float = 60.0) -> RelayService:
    def blame(address: str, error: Exception) -> None:
        raise error

    return RelayService(
        identify=lambda _, claimed: claimed,
        account=lambda caller: caller.address,
        kbytes_per_s=1e6,
        idle_s=idle_s,
        blame=blame,
    )


class Crowd:
    """Peers at one relay, each stream of them a task."""

    def __init__(self, tasks: asyncio.TaskGroup, *, idle_s: float = 60.0) -> None:
        self._tasks, self._served = tasks, list[asyncio.Task[None]]()
        self._methods = Methods()
        relay_of_anybody(idle_s).serve(cast(Server, self._methods))

    async def wait(self, name: str) -> tuple[Held, asyncio.Task[None]]:
        """Have a peer wait for a caller."""
        stream = Held(name, Piece(sender=name), flows=True)
        task = self._tasks.create_task(self._methods.accept(stream))
        self._served.append(task)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return stream, task

    async def call(self, name: str, peer: str) -> tuple[Held, asyncio.Task[None]]:
        """Have a peer call one; return when it has its answer."""
        stream = Held(name, Piece(sender=name, peer=peer), flows=True)
        task = self._tasks.create_task(self._methods.connect(stream))
        self._served.append(task)
        await until(lambda: stream.written)
        return stream, task

    async def connect(self, name: str, peer: str) -> tuple[Held, asyncio.Task[None]]:
        await self.wait(peer)
        return await self.call(name, peer)

    def leave(self) -> None:
        for task in self._served:
            task.cancel()


def test_the_caller_hears_that_it_is_connected_before_any_data() -> None:
    """The end that waits may answer before the relay's words to the caller are through."""

    async def story() -> None:
        methods = Methods()
        relay_of_anybody().serve(cast(Server, methods))
        waits, calls = Held("cleo", Piece(sender="cleo")), Held("ben", Piece(sender="ben", peer="cleo"))
        waits.flowing.set()
        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(methods.accept(waits))]
            await asyncio.sleep(0)
            ends.append(tasks.create_task(methods.connect(calls)))
            await until(lambda: waits.written == [Piece(peer="ben")])
            waits.incoming.put_nowait(Piece(data=b"hello from cleo"))
            await asyncio.sleep(0.01)
            calls.flowing.set()
            await until(lambda: calls.written == [Piece(peer="cleo"), Piece(data=b"hello from cleo")])
            for end in ends:
                end.cancel()

    asyncio.run(story())


def test_a_chunk_that_takes_long_through_a_relay_is_no_silence() -> None:
    async def story() -> None:
        ben, cleo = Mind(), Mind()
        hasty = OPTIONS.model_copy(update={"heartbeat_s": 0.3})
        async with relayed_pair(ben, cleo, rate=250.0, ends=hasty) as (_, dials, waits):
            await until(lambda: dials.is_up(2) and waits.is_up(1))
            # A quarter of a second's worth passes at once; the rest takes 2 s, where 0.9 s of silence are allowed.
            ben.send(2, bytes(750_000))
            await until(lambda: cleo.frames)
            assert [event[0] for event in cleo.events] == ["up"]

    asyncio.run(story())


def test_a_peer_whose_certificate_is_revoked_is_relayed_for_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    own = authority().credentials(authority().issue("ada"))

    async def story() -> None:
        ben, cleo = Mind(), Mind()
        ada = build(0, Mind(), [], options=OPTIONS, members=NAMES, security=own)
        async with running(ada):
            relay = RelayAddress(NAMES[0], f"127.0.0.1:{ada.port}")
            waits = build(2, cleo, [passive(1)], listen=None, options=OPTIONS, own_relay=relay)
            dials = build(1, ben, [beyond(2, relay)], listen=None, options=OPTIONS)
            async with running(waits, dials):
                await until(lambda: dials.is_up(2) and waits.is_up(1))
                listed = authority().revoke(b"", [credentials("cleo").identity.serial]).decode()
                await call_control(relay.address, "revoke", {"list": listed}, name="ada", security=credentials("ben"))
                await until(lambda: not dials.is_up(2))
                await until(lambda: "cannot wait at relay ada: the certificate of 'cleo' was revoked" in caplog.text)

    asyncio.run(story())


async def turned_away(ada: Transport, security: Credentials, claimed: str, method: str) -> str:
    stream = PieceStream(Channel(f"127.0.0.1:{ada.port}", NAMES[0], security).stream(RELAY_SERVICE, method))
    try:
        await stream.write(Piece(sender=claimed, peer="cleo"))
        answer = await stream.read()
        assert answer is not None
        return answer.refusal
    finally:
        await stream.abandon()


@pytest.mark.parametrize("method", ["Accept", "Connect"])
def test_nobody_waits_or_calls_under_anothers_name(method: str) -> None:
    async def story() -> None:
        ada = build(0, Mind(), [], options=OPTIONS, members=NAMES)
        async with running(ada):
            refusal = await turned_away(ada, credentials("ben"), "cleo", method)
            assert refusal == "'cleo' shows the certificate of peer 'ben'"
            refusal = await turned_away(ada, credentials("eve"), "eve", method)
            assert refusal == "'eve' is no peer of this run; compare the lists of peers"

    asyncio.run(story())


def test_a_peer_is_not_connected_with_itself() -> None:
    async def story() -> None:
        ada = build(0, Mind(), [], options=OPTIONS, members=NAMES)
        async with running(ada):
            relay = RelayAddress(NAMES[0], f"127.0.0.1:{ada.port}")
            waits = build(2, Mind(), [passive(1)], listen=None, options=OPTIONS, own_relay=relay)
            async with running(waits):
                await until(lambda: "cleo" in ada.relay._waiting)
                refusal = await turned_away(ada, credentials("cleo"), "cleo", "Connect")
                assert refusal == "a peer reaches itself without a relay"
                assert not ada.relay._tunnels

    asyncio.run(story())


@pytest.mark.parametrize("silent", ["cleo", "ben", "both"])
def test_a_connection_over_which_nothing_passes_ends(silent: str) -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            crowd = Crowd(tasks, idle_s=0.2)
            waits, waiting = await crowd.wait("cleo")
            calls, calling = await crowd.call("ben", "cleo")
            begin = asyncio.get_running_loop().time()
            while not (waiting.done() and calling.done()):
                assert asyncio.get_running_loop().time() < begin + 5
                for name, stream in (("cleo", waits), ("ben", calls)):
                    if silent not in (name, "both"):
                        stream.incoming.put_nowait(Piece(data=b"heartbeat"))
                await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() >= begin + 0.15
            crowd.leave()

    asyncio.run(story())


def test_an_end_that_takes_nothing_is_given_up() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            crowd = Crowd(tasks, idle_s=0.2)
            waits, waiting = await crowd.wait("cleo")
            calls, calling = await crowd.call("ben", "cleo")
            waits.flowing.clear()
            calls.incoming.put_nowait(Piece(data=b"model"))
            waits.incoming.put_nowait(Piece())
            await until(lambda: waiting.done() and calling.done())
            crowd.leave()

    asyncio.run(story())


def test_a_pair_that_connects_again_and_again_keeps_two_connections() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            crowd = Crowd(tasks)
            made = [await crowd.connect("ben", "cleo") for _ in range(5)]
            await until(lambda: [task.done() for _, task in made] == [True, True, True, False, False])
            crowd.leave()

    asyncio.run(story())


def test_no_member_keeps_the_others_out_however_many_connections_it_makes() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            crowd = Crowd(tasks)
            # Two of them, since one calls 60 times at once and not more often.
            names = ["eve"] * 40 + ["mal"] * (MAX_TUNNELS - 41)
            greedy = [await crowd.connect(name, f"peer-{number}") for number, name in enumerate(names)]
            other, task = await crowd.connect("ben", "cleo")
            assert other.written == [Piece(peer="cleo")]
            assert not any(task.done() for _, task in greedy)
            # All places are taken: another member's connection costs the greediest its oldest, and its own none.
            dan, _ = await crowd.connect("dan", "cleo")
            assert dan.written == [Piece(peer="cleo")]
            await until(lambda: greedy[0][1].done())
            more, _ = await crowd.connect("eve", "peer-99")
            assert more.written == [Piece(refusal=f"this relay carries {MAX_TUNNELS} connections, and no more")]
            assert not task.done()
            crowd.leave()

    asyncio.run(story())


def test_a_member_that_calls_without_end_is_told_to_wait() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            crowd = Crowd(tasks)
            said = [(await crowd.call("eve", "nobody"))[0].written[0].refusal for _ in range(70)]
            assert "does not wait at this relay" in said[0]
            assert said[-1] == "'eve' calls too often; try again later"
            assert "does not wait" in (await crowd.call("ben", "nobody"))[0].written[0].refusal
            crowd.leave()

    asyncio.run(story())


def test_streams_that_never_say_their_name_are_few() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            methods = Methods()
            relay_of_anybody().serve(cast(Server, methods))
            silent = [tasks.create_task(methods.accept(Held("eve", flows=True))) for _ in range(32)]
            await asyncio.sleep(0)
            one_more, honest = Held("eve", flows=True), Held("cleo", Piece(sender="cleo"), flows=True)
            await methods.accept(one_more)
            assert one_more.written == [Piece(refusal="too many streams wait for their first piece")]
            waiting = tasks.create_task(methods.accept(honest))
            honest.incoming.put_nowait(Piece())
            await until(lambda: honest.written == [Piece()])
            for task in (*silent, waiting):
                task.cancel()

    asyncio.run(story())


def test_an_error_that_nobody_expected_ends_only_the_stream_that_led_to_it() -> None:
    blamed: list[tuple[str, str]] = []

    def identify(caller: Caller, claimed: str) -> str:
        if claimed == "eve":
            raise ZeroDivisionError("a bug")
        return claimed

    async def story() -> None:
        methods = Methods()
        RelayService(
            identify=identify,
            account=lambda caller: caller.address,
            kbytes_per_s=1e6,
            idle_s=60.0,
            blame=lambda address, error: blamed.append((address, type(error).__name__)),
        ).serve(cast(Server, methods))
        await methods.connect(Held("eve", Piece(sender="eve", peer="ben"), flows=True))
        honest = Held("cleo", Piece(sender="cleo", peer="ben"), flows=True)
        await methods.connect(honest)
        assert "'ben' does not wait at this relay" in honest.written[0].refusal

    asyncio.run(story())
    assert blamed == [("unix:eve", "ZeroDivisionError")]


def test_pieces_are_charged_however_little_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life before a connection, and data of one byte after it, are carried at a pace."""
    monkeypatch.setattr(Allowance, "_refill", lambda self, now: None)

    async def story() -> None:
        ada = build(0, Mind(), [], options=OPTIONS.model_copy(update={"relay_kbytes_per_s": 50.0}), members=NAMES)
        async with running(ada):
            address, answers = f"127.0.0.1:{ada.port}", 0
            waits = PieceStream(Channel(address, NAMES[0], credentials("cleo")).stream(RELAY_SERVICE, "Accept"))
            await waits.write(Piece(sender="cleo"))
            for _ in range(200):
                await waits.write(Piece())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    while await waits.read() is not None:
                        answers += 1
            assert 50 <= answers < 120  # Later ones wait longer and longer.
            await waits.abandon()

            taker = PieceStream(Channel(address, NAMES[0], credentials("cleo")).stream(RELAY_SERVICE, "Accept"))
            await taker.write(Piece(sender="cleo"))
            await until(lambda: not ada.relay.is_idle)
            caller = PieceStream(Channel(address, NAMES[0], credentials("ben")).stream(RELAY_SERVICE, "Connect"))
            while True:  # The first stream may still be known there.
                await caller.write(Piece(sender="ben", peer="cleo"))
                answer = await caller.read()
                assert answer is not None
                if answer.peer:
                    break
                caller = PieceStream(Channel(address, NAMES[0], credentials("ben")).stream(RELAY_SERVICE, "Connect"))
            for _ in range(200):
                await caller.write(Piece(data=b"x"))
            await asyncio.sleep(0.5)
            assert 49 <= ada.relay.carried["ben", "cleo"] < 120
            await caller.abandon()
            await taker.abandon()

    asyncio.run(story())
