from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import TransportOptions
from peer.errors import (
    ConfigError,
    DataError,
    LocalProtocolError,
    PeerUnreachable,
    RemoteError,
    RemoteProtocolError,
    SecurityError,
)
from peer.net import tcp_info
from peer.net import transport as transports
from peer.net.control import call_control
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.net.hello import PROTOCOL_MAX
from peer.net.listener import bind
from peer.net.neighbor import Neighbor
from peer.net.rpc import StreamLost
from peer.net.security.certificates import Role
from peer.net.unreachable import why_unreachable
from peer.wire.data_meaning import meanings_of
from peer.wire.start_model import StartModel
from tests.net.transport_peers import (
    NAMES,
    QUICK,
    Mind,
    Proxy,
    authority,
    build,
    credentials,
    dialled,
    hello_of,
    pair,
    passive,
    running,
    until,
)
from tests.ops.answering import STATUS


def frames_of(mind: Mind, peer: int) -> list[bytes]:
    return [frame for sender, frame in mind.frames if sender == peer]


@pytest.mark.parametrize("security", ["own", None], ids=["mtls", "insecure"])
def test_frames_pass_both_ways_in_order_over_one_connection(security: Any) -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben, security=security) as (listener, dialler):
            sent = [os.urandom(size) for size in (1, 400, 70_000, 3_000_000, 16)]
            for frame in sent:
                ada.send(1, frame)
                ben.send(0, frame[::-1])
            await until(lambda: len(ada.frames) == len(ben.frames) == len(sent))
            assert frames_of(ben, 0) == sent
            assert frames_of(ada, 1) == [frame[::-1] for frame in sent]
            await until(lambda: ada.backlog(1) == ben.backlog(0) == 0)
            assert listener.counters(1).connections == dialler.counters(0).connections == 1

    asyncio.run(story())


def test_a_frame_larger_than_the_window_passes_in_small_pieces() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        options = TransportOptions(chunk_kbytes=8, window_kbytes=64)
        async with pair(ada, ben, options=options) as (_, dialler):
            frame = os.urandom(2_000_003)
            ben.send(0, frame)
            ben.send(0, b"after it")
            await until(lambda: len(ada.frames) == 2)
            assert frames_of(ada, 1) == [frame, b"after it"]
            assert dialler.counters(0).frames_sent == 2

    asyncio.run(story())


def test_peers_with_different_chunk_sizes_understand_each_other() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        listener = build(0, ada, [passive(1)], options=TransportOptions(chunk_kbytes=4, window_kbytes=64))
        async with running(listener):
            dialler = build(1, ben, [dialled(0, listener.port)], listen=None, options=TransportOptions())
            async with running(dialler):
                await until(lambda: listener.is_up(1) and dialler.is_up(0))
                frame = os.urandom(5_000_000)
                ben.send(0, frame)
                ada.send(1, frame)
                await until(lambda: ada.frames and ben.frames)
                assert frames_of(ada, 1) == frames_of(ben, 0) == [frame]

    asyncio.run(story())


def test_a_link_that_breaks_again_and_again_delivers_every_frame_exactly_once() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        options = TransportOptions(backoff_max_s=0.2, chunk_kbytes=16)
        listener = build(0, ada, [passive(1)], options=options)
        async with running(listener), Proxy(listener.port or 0) as proxy:
            proxy.cut_after = 150_000
            dialler = build(1, ben, [dialled(0, proxy.port)], listen=None, options=options)
            async with running(dialler):
                there = [os.urandom(20_000) for _ in range(40)]
                back = [os.urandom(5_000) for _ in range(60)]
                for number in range(60):
                    if number < 40:
                        ben.send(0, there[number])
                    ada.send(1, back[number])
                    await asyncio.sleep(0)
                await until(lambda: len(ada.frames) == 40 and len(ben.frames) == 60)
                await until(lambda: ada.backlog(1) == ben.backlog(0) == 0)
                assert proxy.connections > 3, "the story needs interruptions"
                assert frames_of(ada, 1) == there
                assert frames_of(ben, 0) == back
                assert dialler.counters(0).reconnects > 1
                assert dialler.counters(0).frames_resent + listener.counters(1).frames_resent > 0

    asyncio.run(story())


def test_a_listener_that_restarts_is_found_again_and_gets_what_it_lacks() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        first = build(0, ada, [passive(1)])
        await first.start()
        port = first.port
        dialler = build(1, ben, [dialled(0, port)], listen=None)
        async with running(dialler):
            ben.send(0, b"one")
            await until(lambda: ada.frames)
            await first.close("back soon")
            await until(lambda: not dialler.is_up(0))
            ben.send(0, b"two")
            second = build(0, ada, [passive(1)], listen=f"127.0.0.1:{port}")
            async with running(second):
                await until(lambda: len(ada.frames) == 2)
                assert frames_of(ada, 1) == [b"one", b"two"]
                assert ("goodbye", 0, "back soon") in ben.events
                assert ben.events[-1] == ("up", 0, 1)

    asyncio.run(story())


def test_frames_outside_the_sequence_pass_between_the_others_and_need_no_receipt() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben, options=TransportOptions(chunk_kbytes=4)) as (_, dialler):
            dialler.send(0, 0, b"a request before anything else")
            ben.send(0, os.urandom(20_000))
            dialler.send(0, 0, b"r" * 30_000)
            ben.send(0, b"second")
            await until(lambda: len(ada.frames) == 2)
            assert ada.requests == [(1, b"a request before anything else"), (1, b"r" * 30_000)]
            await until(lambda: ben.backlog(0) == 0)
            assert dialler.counters(0).frames_resent == 0
            assert dialler.counters(0).frames_sent == 4

    asyncio.run(story())


def test_what_is_sent_last_is_counted_on_the_socket_too() -> None:
    """gRPC has taken all of it when the link is out of use, and the kernel has not."""

    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (_, dialler):
            ben.send(0, os.urandom(3_000_000))
            await dialler.close("done")
            sent = dialler.counters(0)
            assert sent.socket_bytes_sent is not None
            assert 3_000_000 < sent.protobuf_bytes_sent < sent.socket_bytes_sent

    asyncio.run(story())


def test_a_link_that_is_reset_says_why_and_comes_back() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (listener, dialler):
            listener.blame(1, RemoteProtocolError("its checksum is wrong"))
            await until(lambda: len(ada.events) == 3 and len(ben.events) == 3)
            assert ada.events[1] == ("down", 1, "its checksum is wrong")
            assert ben.events[1] == ("down", 0, "it ended the connection: its checksum is wrong")
            assert dialler.counters(0).reconnects == 1

    asyncio.run(story())


def test_receipts_are_batched() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (listener, _):
            before = listener.counters(1).protobuf_bytes_sent
            for number in range(64):
                ben.send(0, b"frame")
                await until(lambda number=number: len(ada.frames) == number + 1)  # type: ignore[misc]
            await until(lambda: ben.backlog(0) == 0)
            # A receipt takes 2 bytes: eight of them, and one more if the machine was slow for half a second.
            assert listener.counters(1).protobuf_bytes_sent - before <= 2 * 12
            ben.send(0, b"a last one, alone")
            await until(lambda: ben.backlog(0) == 0)

    asyncio.run(story())


def test_a_receiver_that_takes_nothing_stops_its_sender() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        ada.takes_at_once = False
        options = TransportOptions(chunk_kbytes=16, window_kbytes=64)
        async with pair(ada, ben, options=options) as (listener, dialler):
            for _ in range(40):
                ben.send(0, bytes(10_000))
            await until(lambda: len(ada.frames) >= 6)
            await asyncio.sleep(0.3)
            # At most the window that was granted at first and the one while less than a window was held.
            assert len(ada.frames) <= 2 * 65536 // 10_000 + 1
            assert dialler.is_up(0)
            while len(ada.frames) < 40:
                listener.taken(1, ada.heard[1].last_seq)
                await asyncio.sleep(0.005)
            assert frames_of(ada, 1) == [bytes(10_000)] * 40

    asyncio.run(story())


def test_notes_arrive_and_are_refused_if_too_large() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (listener, dialler):
            assert dialler.bulletin(0, "evaluation", b"x" * MAX_BULLETIN_BYTES)
            assert dialler.bulletin(0, "stop", b"")
            assert listener.bulletin(1, "evaluation", b"y")
            await until(lambda: len(ada.bulletins) == 2 and ben.bulletins)
            assert ada.bulletins == [(1, "evaluation", b"x" * MAX_BULLETIN_BYTES), (1, "stop", b"")]
            with pytest.raises(LocalProtocolError):
                dialler.bulletin(0, "evaluation", b"x" * (MAX_BULLETIN_BYTES + 1))
        assert not dialler.bulletin(0, "late", b"")

    asyncio.run(story())


def test_heartbeats_keep_an_idle_link_and_silence_ends_it() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        options = TransportOptions(heartbeat_s=0.4, backoff_max_s=0.2)
        listener = build(0, ada, [passive(1)], options=options)
        async with running(listener), Proxy(listener.port or 0) as proxy:
            dialler = build(1, ben, [dialled(0, proxy.port)], listen=None, options=options)
            async with running(dialler):
                await until(lambda: listener.is_up(1) and dialler.is_up(0))
                await asyncio.sleep(2)
                assert len(ada.events) == len(ben.events) == 1, "an idle link stays up"
                proxy.flowing.clear()
                await until(lambda: len(ada.events) > 1 and len(ben.events) > 1)
                assert ada.events[1] == ("down", 1, "nothing was heard for 1.2 s")
                proxy.cut()
                proxy.flowing.set()
                await until(lambda: listener.is_up(1) and dialler.is_up(0))

    asyncio.run(story())


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_a_chunk_that_takes_longer_than_the_silence_allowed_is_no_silence() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        options = TransportOptions(heartbeat_s=0.3, chunk_kbytes=1024)
        listener = build(0, ada, [passive(1)], options=options)
        async with running(listener), Proxy(listener.port or 0) as proxy:
            dialler = build(1, ben, [dialled(0, proxy.port)], listen=None, options=options)
            async with running(dialler):
                await until(lambda: listener.is_up(1) and dialler.is_up(0))
                proxy.pause_s = 0.06
                ben.send(0, bytes(512 * 1024))
                await until(lambda: ada.frames)
                assert len(ada.events) == len(ben.events) == 1

    asyncio.run(story())


def test_goodbye_is_said_on_every_link_and_nothing_stays_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (_, dialler):
            await dialler.close("the run is over")
            await until(lambda: len(ada.events) == 3)
            assert ada.events[1:] == [
                ("goodbye", 1, "the run is over"),
                ("down", 1, "it left: the run is over"),
            ]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())
    # The goodbye itself is told by whoever knows what it means.
    assert {line for line in caplog.messages if "link to" in line} == {"link to ada is up", "link to ben is up"}


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_socket_bytes_come_from_the_kernel_and_agree_at_both_ends() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (listener, dialler):
            ben.send(0, os.urandom(5_000_000))
            await until(lambda: ben.backlog(0) == 0)
            # Credit and receipts may still be on their way back.
            await until(lambda: dialler.counters(0).socket_bytes_received == listener.counters(1).socket_bytes_sent)
            sent, received = dialler.counters(0), listener.counters(1)
            assert sent.socket_bytes_sent is not None
            assert received.socket_bytes_sent is not None
            # A busy machine loses segments even on loopback: what was sent twice arrives once.
            assert sent.socket_bytes_sent - (sent.retransmitted_bytes or 0) == received.socket_bytes_received
            assert sent.socket_bytes_received == received.socket_bytes_sent - (received.retransmitted_bytes or 0)
            assert sent.packet_bytes_sent is not None
            assert sent.frame_bytes_sent == 5_000_000 < sent.protobuf_bytes_sent < sent.socket_bytes_sent
            assert sent.socket_bytes_sent - (sent.retransmitted_bytes or 0) < 1.01 * 5_000_000
            assert 0 < sent.packet_bytes_sent - sent.socket_bytes_sent < 0.05 * 5_000_000
        after = dialler.counters(0)
        assert after.socket_bytes_sent is not None
        assert after.socket_bytes_sent >= sent.socket_bytes_sent, "a closed connection still counts"

    asyncio.run(story())


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_a_small_frame_costs_little_more_than_itself() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (listener, _):
            await asyncio.sleep(0.1)
            begin = listener.counters(1)
            rounds = 200
            for number in range(rounds):
                ben.send(0, bytes(400))
                await until(lambda number=number: len(ada.frames) == number + 1)  # type: ignore[misc]
            await until(lambda: ben.backlog(0) == 0)
            end = listener.counters(1)
            for kind, limit in (("socket", 470), ("packet", 620)):
                total = sum(
                    getattr(end, f"{kind}_bytes_{way}") - getattr(begin, f"{kind}_bytes_{way}")
                    for way in ("sent", "received")
                )
                assert total / rounds < limit, kind

    asyncio.run(story())


def test_both_ends_may_dial_and_one_link_remains() -> None:
    async def story() -> None:
        ports = [_free_port(), _free_port()]
        ada, ben = Mind(), Mind()
        one = build(0, ada, [dialled(1, ports[1])], listen=f"127.0.0.1:{ports[0]}")
        other = build(1, ben, [dialled(0, ports[0])], listen=f"127.0.0.1:{ports[1]}")
        async with running(one, other):
            for number in range(50):
                ada.send(1, b"%d" % number)
                ben.send(0, b"%d" % number)
                await asyncio.sleep(0.01)
            await until(lambda: len(ada.frames) == len(ben.frames) == 50)
            ups = len(ada.events), len(ben.events)
            await asyncio.sleep(0.5)
            assert (len(ada.events), len(ben.events)) == ups, "the two links keep replacing each other"
            assert frames_of(ada, 1) == frames_of(ben, 0) == [b"%d" % number for number in range(50)]

    asyncio.run(story())


def test_the_end_that_waits_dials_where_the_other_cannot() -> None:
    """The address under which ada knows ben leads nowhere."""

    async def story() -> None:
        ports = [_free_port(), _free_port()]
        ada, ben = Mind(), Mind()
        quick = QUICK.model_copy(update={"dial_timeout_s": 1.0})
        one = build(0, ada, [dialled(1, _free_port())], listen=f"127.0.0.1:{ports[0]}", options=quick)
        waits = replace(dialled(0, ports[0]), dial=False, calls=f"127.0.0.1:{ports[1]}")
        other = build(1, ben, [waits], listen=f"127.0.0.1:{ports[1]}", options=quick)
        async with running(one, other):
            assert other.problems[0] == f"it is to dial this peer at 127.0.0.1:{ports[1]}, and has not so far"
            ada.send(1, b"from ada")
            await until(lambda: ben.frames)
            ben.send(0, b"from ben")
            await until(lambda: ada.frames)
            assert not one.problems
            assert not other.problems

    asyncio.run(story())


def test_where_both_ends_dial_over_links_that_break_each_frame_comes_once_and_nobody_is_blamed() -> None:
    """The way from ada to ben is there and gone by turns, and each change cuts both ways."""

    async def story() -> None:
        ports, nowhere = [_free_port(), _free_port()], _free_port()
        ada, ben = Mind(), Mind()
        quick = QUICK.model_copy(update={"dial_timeout_s": 1.0})
        async with Proxy(ports[0]) as to_ada, Proxy(ports[1]) as to_ben:
            one = build(0, ada, [dialled(1, to_ben.port)], listen=f"127.0.0.1:{ports[0]}", options=quick)
            waits = replace(dialled(0, to_ada.port), dial=False)
            other = build(1, ben, [waits], listen=f"127.0.0.1:{ports[1]}", options=quick)
            async with running(one, other):
                for turn in range(8):
                    to_ben.target = (ports[1], nowhere)[turn % 2]
                    for proxy in (to_ada, to_ben):
                        proxy.cut()
                    for number in range(30):
                        ada.send(1, b"%d.%d" % (turn, number))
                        ben.send(0, b"%d.%d" % (turn, number))
                        await asyncio.sleep(0.005)
                    await until(lambda turn=turn: len(ada.frames) == len(ben.frames) == 30 * (turn + 1))
                assert to_ada.connections > 3, "ben is to dial, too"
                assert to_ben.connections > 3
                assert frames_of(ada, 1) == frames_of(ben, 0)
                assert frames_of(ada, 1) == [b"%d.%d" % (turn, number) for turn in range(8) for number in range(30)]
                assert one.offences.count(1) == other.offences.count(0) == 0
                to_ben.target = ports[1]
                ups = len(ada.events), len(ben.events)
                await asyncio.sleep(1.0)
                assert (len(ada.events), len(ben.events)) == ups, "the two links keep replacing each other"

    asyncio.run(story())


def test_the_newest_process_of_a_peer_wins_and_the_older_one_is_told() -> None:
    async def story() -> None:
        ada, old, new = Mind(), Mind(), Mind()
        listener = build(0, ada, [passive(1)])
        async with running(listener):
            first = build(1, old, [dialled(0, listener.port)], listen=None)
            second = build(1, new, [dialled(0, listener.port)], listen=None)
            async with running(first):
                await until(lambda: listener.is_up(1) and first.is_up(0))
                async with running(second):
                    await until(lambda: second.is_up(0) and not first.is_up(0))
                    await until(lambda: 0 in first.refusals)
                    assert "a newer process of 'ben' took the place of this one" in first.refusals[0]
                    await asyncio.sleep(0.5)
                    assert second.is_up(0)
                    assert [event[0] for event in ada.events] == ["up", "down", "up"]

    asyncio.run(story())


MISMATCHES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"run": "other"}, ("'other'", "'tests'")),
    ({"algorithm": "quant-sgp"}, ("'quant-sgp'", "'sgp'", "[algorithm]")),
    ({"num_peers": 7}, ("7 peers", "we have 4")),
    ({"start": StartModel("9" * 64)}, ("model", "training.warm_start")),
    ({"meanings": meanings_of({"classes": ["dog", "fox"]})}, ("classes", "number 0 is '", "data.classes")),
    ({"graph_digest": "9" * 64}, ("graph", "[graph] and its file")),
    ({"run_digest": "9" * 64}, ("configuration", "sections outside [peer]")),
]


@pytest.mark.parametrize(("changes", "words"), MISMATCHES, ids=[next(iter(each[0])) for each in MISMATCHES])
def test_peers_that_do_not_belong_together_refuse_each_other_in_a_sentence(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        listener = build(0, ada, [passive(1)], hello=hello_of(0, meanings=meanings_of({"classes": ["cat", "dog"]})))
        async with running(listener):
            dialler = build(1, ben, [dialled(0, listener.port)], listen=None, hello=hello_of(1, **changes))
            async with running(dialler):
                await until(lambda: 0 in dialler.refusals and 1 in listener.refusals)
                for word in words:
                    assert word in dialler.refusals[0]
                    assert word in listener.refusals[1]
                assert ben.events == [("down", 0, dialler.refusals[0])]
                assert ada.events == [("down", 1, listener.refusals[1])]
                assert not listener.is_up(1)

    asyncio.run(story())


def test_another_release_of_torch_is_said_once_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        here, there = {"torch": "2.13.0", "numpy": "2.4.6"}, {"torch": "2.12.1", "numpy": "2.4.6"}
        listener = build(0, Mind(), [passive(1)], hello=hello_of(0, machine=here))
        async with running(listener):
            for _ in range(2):
                dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None, hello=hello_of(1, machine=there))
                async with running(dialler):
                    await until(lambda dialler=dialler: dialler.is_up(0) and listener.is_up(1))

    with caplog.at_level("WARNING"):
        asyncio.run(story())
    said = [line for line in caplog.messages if "computes with something else" in line]
    assert sum("ben " in line and "(torch is 2.12.1 there and 2.13.0 here)" in line for line in said) == 1
    assert sum("ada " in line and "(torch is 2.13.0 there and 2.12.1 here)" in line for line in said) == 2


def test_a_neighbour_that_does_not_speak_what_is_needed_by_now_is_refused() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        needed = [PROTOCOL_MAX]
        # Each release says itself what it speaks at least: here, this end is the newer one.
        listener = build(0, ada, [passive(1)], needed_protocol=lambda: needed[0])
        async with running(listener):
            dialler = build(1, ben, [dialled(0, listener.port)], listen=None)
            async with running(dialler):
                await until(lambda: dialler.is_up(0) and listener.is_up(1))
                assert listener.connection(1).protocol == PROTOCOL_MAX
                listener.end_older()
                assert listener.is_up(1)
                needed[0] = PROTOCOL_MAX + 1
                listener.end_older()
                assert not listener.is_up(1)
                await until(lambda: 0 in dialler.refusals)
                assert "install that one or a later one there" in listener.refusals[1]

    asyncio.run(story())


def test_a_refused_peer_is_let_in_once_it_is_mended() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        wrong = build(0, ada, [passive(1)], hello=hello_of(0, algorithm="scsp"))
        await wrong.start()
        dialler = build(1, ben, [dialled(0, wrong.port)], listen=None)
        async with running(dialler):
            await until(lambda: 0 in dialler.refusals)
            await wrong.close("to be mended")
            right = build(0, ada, [passive(1)], listen=f"127.0.0.1:{wrong.port}")
            async with running(right):
                await until(lambda: dialler.is_up(0))
                assert not dialler.refusals
                assert not dialler.problems

    asyncio.run(story())


def test_a_refusal_is_told_once_though_each_end_words_it_its_own_way(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        listener, dialler = build(0, ada, [passive(1)]), build(1, ben, [], listen=None)
        async with running(listener), running(dialler):
            neighbor = passive(1)
            for reason in ("ours differs", "ours differs", "theirs differs", "ours differs", "theirs differs"):
                listener._links.note_refusal(neighbor, reason)
            assert [record.getMessage() for record in caplog.records if "is possible" in record.getMessage()] == [
                f"no link to {neighbor.name} is possible: {side} differs" for side in ("ours", "theirs")
            ]

    asyncio.run(story())


def test_a_neighbour_that_lost_its_state_is_told_so() -> None:
    async def story() -> None:
        ada, ben = Mind(), Mind()
        async with pair(ada, ben) as (_, dialler):
            for _ in range(10):
                ada.send(1, b"frame")
            await until(lambda: ada.backlog(1) == 0)
            port = ada.transport.port if ada.transport else 0
            await dialler.close("and forgets everything")
            forgetful = Mind()
            again = build(1, forgetful, [dialled(0, port)], listen=None)
            async with running(again):
                await until(lambda: any(event[0] == "down" for event in forgetful.events))
                reason = next(event[2] for event in forgetful.events if event[0] == "down")
                assert "it lost its state" in reason

    asyncio.run(story())


# Addresses and reasons


def test_a_port_in_use_is_a_sentence() -> None:
    async def story() -> None:
        listener = build(0, Mind(), [passive(1)])
        async with running(listener):
            with pytest.raises(ConfigError, match=f"port {listener.port} is in use") as caught:
                await build(2, Mind(), [passive(1)], listen=f"127.0.0.1:{listener.port}").start()
            assert caught.value.key == "peer.listen"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("203.0.113.77:0", "this machine has no address 203.0.113.77"),
        ("no-such-host.invalid:7700", "is not known here"),
        ("127.0.0.1", "is not an address with a port"),
        ("127.0.0.1:99999", "is not an address with a port"),
        ("::1:7700", "is not an address with a port"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_a_sentence(listen: str, words: str) -> None:
    async def story() -> None:
        with pytest.raises(ConfigError, match=words):
            await build(0, Mind(), [passive(1)], listen=listen).start()

    asyncio.run(story())


def test_an_address_that_cannot_be_dialled_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"peers\.0\.advertise"):
        build(1, Mind(), [Neighbor(0, "ada", "nonsense", dial=True)])
    with pytest.raises(ConfigError):
        build(1, Mind(), [Neighbor(0, "ada", None, dial=True)])


def test_why_a_neighbour_cannot_be_reached_is_known() -> None:
    async def story() -> None:
        port = _free_port()
        dialler = build(1, Mind(), [dialled(0, port)], listen=None)
        async with running(dialler):
            await until(lambda: 0 in dialler.problems)
            assert dialler.problems[0] == f"nobody listens at 127.0.0.1:{port}, the address of ada"

    asyncio.run(story())


def test_an_address_that_nobody_has_is_told_apart_from_a_port_where_nobody_listens() -> None:
    lost = StreamLost(OSError("Failed to connect to remote host: getsockopt(SO_ERROR): No route to host"))
    said = why_unreachable(lost, name="ada", place="10.0.0.9:1", address="10.0.0.9:1", encrypted=True)
    assert said == "no device answers at 10.0.0.9:1, the address of ada, or a firewall there rejects it"


def test_a_neighbour_that_never_answers_is_given_up_and_dialled_again() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            options = TransportOptions(dial_timeout_s=0.3, backoff_max_s=0.1)
            port = mute.getsockname()[1]
            dialler = build(1, Mind(), [dialled(0, port)], listen=None, options=options)
            async with running(dialler):
                await until(lambda: 0 in dialler.problems)
                assert "did not answer within 0.3 s" in dialler.problems[0]

    asyncio.run(story())


def test_what_cannot_be_shown_at_an_address_is_not_blamed_on_the_address() -> None:
    """gRPC returns the same for both."""
    ours, theirs = credentials("ada"), credentials("ben")
    mixed = replace(ours, key=theirs.key)
    with pytest.raises(SecurityError, match="is free, but nothing can be served there with this certificate and key"):
        asyncio.run(build(0, Mind(), [passive(1)], security=mixed).start())


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("192.0.2.1:7700", "this machine has no address 192.0.2.1; set peer.listen to 0.0.0.0:7700"),
        ("nowhere.invalid:7700", "the host name 'nowhere.invalid' is not known here; correct peer.listen"),
    ],
)
def test_an_address_that_is_not_there_is_a_sentence(listen: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        asyncio.run(build(0, Mind(), [passive(1)], listen=listen).start())


@pytest.mark.parametrize(
    ("listener_security", "dialler_security", "words"),
    [
        ("own", None, "it may want TLS"),
        (None, "own", "does not speak TLS"),
        ("cleo", "own", "certificate made out to another name"),
    ],
    ids=["plain-to-tls", "tls-to-plain", "wrong-name"],
)
def test_security_that_does_not_match_is_a_sentence(
    listener_security: str | None, dialler_security: str | None, words: str
) -> None:
    async def story() -> None:
        of_listener = credentials("cleo") if listener_security == "cleo" else listener_security
        listener = build(0, Mind(), [passive(1)], security=of_listener)
        async with running(listener):
            dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None, security=dialler_security)
            async with running(dialler):
                await until(lambda: 0 in dialler.problems)
                assert words in dialler.problems[0]
                assert not listener.is_up(1)

    asyncio.run(story())


# Control


def test_everyone_may_ask_for_the_status_but_only_its_owner_stops_a_peer() -> None:
    async def story() -> None:
        operator = authority().credentials(authority().issue("olga", role=Role.OPERATOR))
        listener = build(0, Mind(), [passive(1)])
        async with running(listener):
            address = f"127.0.0.1:{listener.port}"
            for who in (operator, credentials("ada"), credentials("ben")):
                answer = await call_control(address, "status", {"n": 1}, name="ada", security=who)
                assert answer == STATUS | {"name": "ada"}
            for who in (operator, credentials("ada")):
                assert (await call_control(address, "stop", name="ada", security=who))["stopping"]
                assert await call_control(address, "snapshot", name="ada", security=who) == {"round": 7}
            with pytest.raises(SecurityError, match="stop needs an operator's certificate"):
                await call_control(address, "stop", name="ada", security=credentials("ben"))
            with pytest.raises(PeerUnreachable):
                await call_control(address, "status", name="ada", security=None, timeout_s=3)
            with pytest.raises(PeerUnreachable, match="another name"):
                await call_control(address, "status", name="ben", security=operator)
        with pytest.raises(PeerUnreachable, match="nobody listens"):
            await call_control(address, "status", name="ada", security=operator)

    asyncio.run(story())


def test_errors_of_control_calls_reach_the_operator_as_sentences() -> None:
    class Refusing(Mind):
        async def control(self, verb: str, arguments: dict[str, Any], caller: str) -> dict[str, Any]:
            raise DataError("there is nothing to save yet")

    async def story() -> None:
        listener = build(0, Refusing(), [passive(1)], security=None)
        async with running(listener):
            address = f"127.0.0.1:{listener.port}"
            with pytest.raises(RemoteError, match="there is nothing to save yet"):
                await call_control(address, "snapshot", name="ada", security=None)

    asyncio.run(story())


def test_an_operator_cannot_take_part_as_a_peer() -> None:
    async def story() -> None:
        impostor = authority().credentials(authority().issue("ben", role=Role.OPERATOR))
        listener = build(0, Mind(), [passive(1)])
        async with running(listener):
            dialler = build(1, Mind(), [dialled(0, listener.port)], listen=None, security=impostor)
            async with running(dialler):
                await until(lambda: 0 in dialler.refusals)
                assert "operator's certificate" in dialler.refusals[0]

    asyncio.run(story())


# Memory

ROOT = Path(__file__).resolve().parents[2]
BIG_BYTES = 300_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_300_mb_frame_passes_with_bounded_memory(tmp_path: Path) -> None:
    """Each end may need the frame itself and a quarter more: what is on its way, and growth of the buffer."""
    (tmp_path / "ca.pem").write_bytes(authority().certificate)
    for index in (0, 1):
        authority().issue(NAMES[index]).write(tmp_path / f"{index}.pem", tmp_path / f"{index}.key")
    receiver = _python(str(tmp_path), "receive")
    try:
        assert receiver.stdout is not None
        port, base = map(int, receiver.stdout.readline().split())
        sender = _python(str(tmp_path), "send", str(port))
        out, _ = sender.communicate(timeout=200)
        sender_base, sender_peak = map(int, out.split())
        assert receiver.stdin is not None
        out, _ = receiver.communicate("done\n", timeout=60)
        received, peak = map(int, out.split())
    finally:
        receiver.kill()
    assert received == BIG_BYTES
    print(f"receiver {base} to {peak}, sender {sender_base} to {sender_peak}")
    assert peak - base < 1.25 * BIG_BYTES
    assert sender_peak - sender_base < 1.25 * BIG_BYTES


def _python(*arguments: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(
        f"""
        import asyncio, pathlib, sys
        from peer.config.options import SecurityOptions
        from peer.net.security.credentials import load_credentials
        from tests.net.transport_peers import *

        def certificate(index):
            options = SecurityOptions(certificate=f"{{index}}.pem", key=f"{{index}}.key")
            return load_credentials(options, pathlib.Path(sys.argv[1]), NAMES[index])

        def memory(key):
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

        async def receive():
            ada = Mind()
            listener = build(0, ada, [passive(1)], security=certificate(0))
            async with running(listener):
                print(listener.port, memory("VmRSS"), flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                print(len(ada.frames[0][1]), memory("VmHWM"), flush=True)

        async def send(port):
            ben = Mind()
            dialler = build(1, ben, [dialled(0, port)], listen=None, security=certificate(1))
            async with running(dialler):
                base = memory("VmRSS")
                ben.send(0, b"x" * {BIG_BYTES})
                await until(lambda: ben.backlog(0) == 0, within_s=180)
                print(base, memory("VmHWM"), flush=True)

        asyncio.run(receive() if sys.argv[2] == "receive" else send(int(sys.argv[3])))
        """
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system knows no fork")
@pytest.mark.parametrize("when", ["right after the port was bound", "later"])
def test_a_fork_at_any_time_keeps_the_port_of_its_parent_from_nobody(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's loader may fork its workers while another thread begins to listen; they outlive a script that is
    killed, and who follows it wants the port. Other sockets are the script's."""
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        transport = build(0, Mind(), [], listen=f"127.0.0.1:{port}")

        def fork() -> None:
            if (child := os.fork()) == 0:
                transport.let_go_in_fork()
                os._exit([*tcp_info.listening()] != [os.fstat(other.fileno()).st_ino])
            assert os.waitpid(child, 0)[1] == 0, "the fork listens on"

        def bind_and_fork(*arguments: Any) -> int:
            bound = bind(*arguments)
            fork()
            return bound

        async def story() -> None:
            if when != "later":
                monkeypatch.setattr(transports, "bind", bind_and_fork)
            async with running(transport):
                fork()

        asyncio.run(story())
