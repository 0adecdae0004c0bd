"""Real daemons on loopback: one joins the run, one leaves it, one is lost, and the others end it; one joins that nobody
listed.

All in one process, so that the libraries are loaded once; each has its own rounds, journal, certificate and port.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.config.options import load
from peer.daemon.members import joining, rejoining
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.process import Daemon, open_peer
from peer.daemon.rounds import RoundLoop
from peer.errors import (
    ConfigError,
    DeclaredLost,
    HandshakeRefused,
    LocalProtocolError,
    SecurityError,
    SottoError,
    SponsorLost,
)
from peer.node.links import Links
from peer.node.participant import Participant
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.enrollment import add_unsigned, admit, propose, request, revoke
from peer.ops.local_cluster import free_ports
from peer.train.threads import use_one_thread

OPTIONS = (
    # So that nothing of what follows is a matter of who is faster.
    "peer.min_step_s=0.01",
    "graph.kind=exponential",
    "training.precision=float32",
    "training.batch_size=2",
    "evaluation.every_rounds=0",
    "transport.backoff_max_s=0.3",
    "transport.linger_s=5",
)


class Devices:
    """Kits, of which the last may join later, and the daemons that run from them."""

    def __init__(
        self,
        kits: Path,
        *,
        rounds: int,
        num_peers: int,
        join_later: int = 0,
        mode: str = "mtls",
        options: Sequence[str] = (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.ports = free_ports(num_peers + 2)
        """Of the peers that are listed, and of two more."""
        config = load(environment={}, overrides=[*OPTIONS, f"run.rounds={rounds}", f"security.mode={mode}", *options])
        hosts = [Host("127.0.0.1", port) for port in self.ports[:num_peers]]
        self.kits, self._wall_clock = kits, wall_clock
        self.files = write_cluster(kits, config, hosts, join_later=join_later)
        self.daemons: dict[int, Daemon] = {}
        self.tasks: dict[int, asyncio.Task[int]] = {}

    def run(self, scenario: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run a scenario with these devices. However it ends, no peer is left when the loop ends: a gRPC server that
        still runs then writes to memory that was freed, which ends the process in place of the test."""

        async def run() -> None:
            try:
                await scenario(self, *arguments)
            finally:
                for peer in [peer for peer, task in self.tasks.items() if not task.done()]:
                    await self.kill(peer)

        asyncio.run(run())

    def sign(self, name: str) -> int:
        """Make the kit of one more peer, as a device and whoever holds the CA do; return its number."""
        device = self.kits.parent / name
        request(device, name, f"127.0.0.1:{self.ports[len(self.files)]}", 7700)
        admitted = admit(self.kits, propose(self.kits, (device / "request.pem").read_bytes()))
        (device / "peer.key").rename(admitted.folder / "peer.key")
        self.files.append(admitted.folder / "peer.toml")
        return admitted.index

    def start(self, peer: int, *, rejoins: bool = False) -> None:
        """Start a peer; `rejoins`: it takes part again once it finds that it was declared lost, as `sotto run` does."""
        daemon = self._open(peer)
        self.tasks[peer] = asyncio.create_task(self._live(peer) if rejoins else daemon.main())

    def _open(self, peer: int) -> Daemon:
        file = self.files[peer]
        config = load(file, environment={})
        daemon = open_peer(config, file.parent, lambda: load(file, environment={}), wall_clock=self._wall_clock)
        self.daemons[peer] = daemon
        return daemon

    async def _live(self, peer: int) -> int:
        while True:
            try:
                return await self.daemons[peer].main()
            except (DeclaredLost, SponsorLost) as error:
                self.daemons.pop(peer).close()
                config = load(self.files[peer], environment={})
                folder = self.files[peer].parent
                if not await rejoining.prepare(error, config, folder, heeds_signals=False):
                    return 0
                self._open(peer)

    async def train(self, *peers: int, beyond: int) -> None:
        """Start peers, and wait until each is beyond a round."""
        for peer in peers:
            self.start(peer)
        await self.until(lambda: all(self.participant(peer).round > beyond for peer in peers))

    async def fails(self, peer: int, error: type[SottoError], match: str) -> Daemon:
        """Wait until a peer ends with an error; return what is left of it."""
        with pytest.raises(error, match=match):
            async with asyncio.timeout(60):
                await self.tasks.pop(peer)
        daemon = self.daemons.pop(peer)
        daemon.close()
        return daemon

    async def kill(self, peer: int) -> None:
        self.tasks[peer].cancel()
        await asyncio.wait([self.tasks[peer]])
        # A thread cannot be killed: closing waits for what it is doing, so that it writes nothing afterwards.
        self.daemons.pop(peer).close()

    async def stop(self, *peers: int) -> None:
        for peer in peers:
            await self.ask(peer, "stop")
        for peer in peers:
            assert await self.tasks[peer] == 0
        # Those that left of themselves, too.
        _, late = await asyncio.wait(self.tasks.values(), timeout=10)
        assert not late, f"{len(late)} peers still run"
        for daemon in self.daemons.values():
            daemon.close()

    async def ask(self, peer: int, verb: str, **arguments: Any) -> dict[str, Any]:
        return await self.daemons[peer].operator.control(verb, arguments)

    async def remove(self, peer: int, name: str) -> dict[str, Any]:
        """Do what `sotto remove` does on the device of a peer, where the operator's certificate is at hand."""
        return await control.remove(load(self.files[peer], environment={}), self.files[peer].parent, name)

    async def until(self, condition: Callable[[], bool], within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            for task in self.tasks.values():
                if task.done() and not task.cancelled():
                    assert task.result() == 0
            if time.monotonic() > deadline:
                states = "\n".join(f"{peer}: {each.operator.status()}" for peer, each in self.daemons.items())
                pytest.fail(f"not within {within_s:g} s: {inspect.getsource(condition).strip()}\n{states}")
            await asyncio.sleep(0.02)

    async def settled(self, figure: Callable[[], int]) -> int:
        """Return a figure once it has stayed the same for a second."""
        value, since = figure(), time.monotonic()
        while time.monotonic() < since + 1.0:
            await asyncio.sleep(0.02)
            if figure() != value:
                value, since = figure(), time.monotonic()
        return value

    def sees(self, peer: int, name: str) -> bool:
        """Whether a peer has a link to a neighbour of that name."""
        return self.is_there(peer) and bool(self.status(peer)["links"].get(name, {}).get("up"))

    def is_there(self, peer: int) -> bool:
        """Whether a peer has begun to talk to others."""
        with contextlib.suppress(LocalProtocolError, KeyError):
            return self.daemons[peer].neighbors.transport is not None
        return False

    def status(self, peer: int) -> dict[str, Any]:
        return self.daemons[peer].operator.status()

    def standing(self, peer: int, name: str) -> str:
        """What a peer takes another one for."""
        found: str = self.status(peer)["peers"][name]["state"]
        return found

    def participant(self, peer: int) -> Participant:
        loop = self.daemons[peer].loop
        assert isinstance(loop, RoundLoop)
        return loop.participant

    def links(self, peer: int) -> Links:
        loop = self.daemons[peer].loop
        assert isinstance(loop, RoundLoop)
        return loop.durable.links

    def linked(self, peer: int) -> set[int]:
        """Return whom a peer has or seeks a link to."""
        return set(self.daemons[peer].neighbors.transport.neighbors)

    def members(self, peer: int) -> list[str]:
        found: list[str] = self.status(peer)["members"]
        return found


@pytest.mark.slow
def test_a_device_joins_one_leaves_and_one_is_lost(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=150, num_peers=4, join_later=1).run(_join_leave_and_lose)


async def _join_leave_and_lose(devices: Devices) -> None:
    for peer in range(4):
        devices.start(peer)
    zero, joiner = devices.participant(0), devices.participant(3)
    assert [zero.membership.standing(peer) for peer in (1, 3)] == ["member", "not joined"]
    await devices.until(lambda: joiner.round > 0 and joiner.membership.is_member)
    with pytest.raises(SottoError, match="peer-3 is running"):
        await devices.ask(3, "remove", name="peer-3")
    # Whoever sponsors the newcomer may not leave before it is a member there, too.
    leaver = devices.participant(1)
    await devices.until(lambda: not leaver.membership.coming_changes and 3 in (leaver.membership.members or ()))
    answer = await devices.ask(1, "leave")
    assert answer["from"] > answer["round"]
    assert await devices.tasks[1] == 0
    assert (devices.files[1].parent / "state" / "model.safetensors").exists()
    await devices.until(lambda: devices.members(0) == ["peer-0", "peer-2", "peer-3"])
    assert [devices.standing(0, f"peer-{peer}") for peer in (1, 2, 3)] == ["left", "member", "member"]
    weight = sum(devices.participant(peer).algorithm.u for peer in (0, 2, 3))
    assert weight == pytest.approx(3.0, abs=1.0)  # They are not in the same round.
    await devices.kill(2)
    await devices.until(lambda: 2 in zero.session.waiting_for)
    with pytest.raises(SottoError, match="a loss needs the order of an operator"):
        await devices.ask(0, "remove", name="peer-2")
    answer = await devices.remove(0, "peer-2")
    await devices.until(lambda: zero.round > answer["from"] + 3)
    assert devices.members(0) == ["peer-0", "peer-3"]
    assert [devices.standing(0, f"peer-{peer}") for peer in (1, 2, 3)] == ["left", "lost", "member"]
    # What is in the journal leads the newcomer back to where it was.
    await devices.kill(3)
    devices.start(3)
    assert await devices.tasks[0] == await devices.tasks[3] == 0
    assert zero.round == devices.participant(3).round == 150
    for peer in (0, 1, 3):
        devices.daemons[peer].close()


@pytest.mark.slow
def test_a_device_that_nobody_listed_joins_and_is_known_by_name(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3).run(_join_unlisted)


async def _join_unlisted(devices: Devices) -> None:
    before = {file: file.read_bytes() for file in devices.kits.glob("peer-*/*")}
    garage, attic = devices.sign("garage"), devices.sign("attic")
    assert (garage, attic) == (3, 4)
    revoke(devices.kits, "attic")
    for file in devices.kits.glob("peer-[34]/revoked.pem"):
        file.unlink()  # Whoever has the device does not tell it.
    for peer in range(3):
        devices.start(peer)
    # A sponsor ends right after it announced, before anybody may have heard of it.
    devices.start(garage)
    await devices.until(lambda: any(devices.participant(peer).membership.coming_changes for peer in range(3)))
    sponsor = next(peer for peer in range(3) if devices.participant(peer).membership.coming_changes)
    await devices.kill(sponsor)
    devices.start(sponsor)
    newcomer = devices.participant(garage)
    await devices.until(lambda: newcomer.round > 0 and not newcomer.session.in_round)
    # Nothing changed in the folders of the others but what a running peer writes, and still they know it.
    assert all(file.read_bytes() == data for file, data in before.items() if file.exists())
    other = (sponsor + 1) % 3
    await devices.kill(other)
    devices.start(other)
    assert "garage" in devices.daemons[other].local.roster.names
    await devices.until(lambda: devices.sees(other, "garage"))
    everybody = ["peer-0", "peer-1", "peer-2", "garage"]
    await devices.until(lambda: all(devices.members(peer) == everybody for peer in range(4)))
    with pytest.raises(SottoError, match="garage is running"):
        await devices.ask(garage, "remove", name="garage")
    devices.start(attic)
    await devices.fails(attic, SecurityError, "most members refuse .*: the certificate of 'attic' was revoked")
    answer = await devices.ask(garage, "leave")
    assert answer["name"] == "garage"
    assert await devices.tasks[garage] == 0
    await devices.until(lambda: devices.members(0) == ["peer-0", "peer-1", "peer-2"])
    await devices.stop(0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True], ids=["knows-its-receipts", "lost-its-receipts"])
def test_nobody_looks_for_a_neighbour_of_an_earlier_graph_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """`forgets`: whether peer 2 does not know after its restart that peer 0 has all that it sent."""
    use_one_thread()
    options = ["graph.kind=ring", "state.checkpoint_every_rounds=0"]
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=options).run(_lose_an_edge, forgets, monkeypatch)


async def _lose_an_edge(devices: Devices, forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in range(3):
        devices.start(peer)
    if forgets:
        monkeypatch.setattr(devices.links(2), "take_new_receipts", dict)  # None comes into its journal.
    await devices.until(lambda: all(devices.participant(peer).round > 0 for peer in range(3)))
    assert devices.linked(0) == {1, 2}
    await devices.train(devices.sign("garage"), beyond=0)
    # Of four on a ring, 0 and 2 are no neighbours. Their link stays, since something may still have to go.
    await devices.until(lambda: not any(devices.participant(peer).membership.coming_changes for peer in range(4)))
    await devices.until(lambda: not devices.links(0).out[2].backlog and not devices.links(2).out[0].backlog)
    assert devices.linked(0) == {1, 2, 3}
    await devices.kill(2)
    devices.start(2)
    assert devices.links(2).out[0].backlog or not forgets
    await devices.until(lambda: devices.is_there(2) and devices.linked(0) == devices.linked(2) == {1, 3})
    begun = devices.participant(0).round
    await devices.until(lambda: all(devices.participant(peer).round > begun + 3 for peer in range(4)))
    await devices.stop(0, 1, 2, 3)


@pytest.mark.parametrize("dials", [True, False], ids=["dials", "is-dialled"])
def test_a_link_made_for_a_backlog_is_ended_by_the_end_that_dialled_once_all_is_confirmed(dials: bool) -> None:
    async def story() -> None:
        removed: list[int] = []
        transport = SimpleNamespace(
            connection=lambda peer: SimpleNamespace(dialled=dials),
            remove_neighbor=lambda peer, reason: removed.append(peer),
        )
        # Of six peers on a ring, 2 is a neighbour of 1 and 3 and owes one frame each to 0, 1 and 4.
        members = range(6)
        membership = SimpleNamespace(members=members, is_member=True, has_left=False, changes=(), hearers=lambda: set())
        durable = SimpleNamespace(
            links=Links(2, members),
            participant=SimpleNamespace(session=SimpleNamespace(lost=frozenset()), membership=membership),
        )
        roster = SimpleNamespace(index=2, expected=frozenset())
        setup = SimpleNamespace(num_peers=6, first_members=members)
        local = SimpleNamespace(number=2, roster=roster, setup=setup)
        neighbors = SimpleNamespace(all=(1, 3), transport=transport)
        links = MemberLinks(*(cast(Any, each) for each in (local, neighbors, durable, None, None)))
        for peer in (0, 1, 4):
            durable.links.push(peer, b"frame")
            links.link_up(peer)
            links.confirmed(peer)
        await asyncio.sleep(0)
        assert links.linked() == [0, 1, 3, 4]
        assert removed == [], "all of them lack something"
        for peer in (0, 1):
            durable.links.acknowledge(peer, 1)
            links.confirmed(peer)
        await asyncio.sleep(0)
        assert removed == ([0] if dials else [])
        assert links.linked() == [1, 3, 4]

    asyncio.run(story())


@pytest.mark.slow
def test_a_changed_list_is_followed_and_outlasts_a_restart(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3).run(_edit_the_lists)


async def _edit_the_lists(devices: Devices) -> None:
    for peer in range(3):
        devices.start(peer)
    zero = devices.participant(0)
    await devices.until(lambda: zero.round > 0)
    text = devices.files[0].read_text()
    devices.files[0].write_text(text.replace("rounds = 10000", "rounds = 90"))
    with pytest.raises(ConfigError, match=r"run\.rounds: was 10000 when this peer was started"):
        await devices.ask(0, "reload")
    added = '[[peers]]\nname = "shed"\nadvertise = "127.0.0.1:9"\n'
    devices.files[0].write_text(text + added)
    assert (await devices.ask(0, "reload"))["added"] == ["shed"]
    assert [each["name"] for each in devices.status(0)["newcomers"]] == ["shed"]
    # The device of peer-1 broke: its entry is taken out everywhere, and those after it move up in the file alone.
    await devices.kill(1)
    for peer in (0, 2):
        lines = devices.files[peer].read_text()
        entry = re.search(r'\[\[peers\]\]\nname = "peer-1"\nadvertise = "[^"]*"\n', lines)
        assert entry is not None
        lines = lines.replace(entry[0], "")
        devices.files[peer].write_text(lines.replace("index = 2", "index = 1"))
        answer = await devices.ask(peer, "reload")
        # What one file says is the word of one member.
        assert answer["removed"] == {}
        assert "run `sotto remove` where operator.pem" in answer["left_to_others"]["peer-1"]
    answer = await devices.remove(0, "peer-1")
    await devices.until(lambda: zero.round > answer["from"])
    assert devices.members(0) == ["peer-0", "peer-2"]
    await devices.kill(2)
    devices.start(2)
    assert devices.daemons[2].local.index == 2
    await devices.until(lambda: devices.sees(0, "peer-2") and devices.sees(2, "peer-0"))
    assert devices.members(2) == ["peer-0", "peer-2"]
    await devices.stop(0, 2)


@pytest.mark.parametrize("ticks", range(4))
def test_a_peer_is_cancelled_also_while_it_wakes(tmp_path: Path, ticks: int) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=5, num_peers=2, mode="insecure").run(_cancel_while_it_wakes, ticks)


async def _cancel_while_it_wakes(devices: Devices, ticks: int) -> None:
    devices.start(0)
    await devices.until(lambda: devices.participant(0).session.in_round)
    devices.daemons[0].runtime.wake()
    for _ in range(ticks):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await devices.kill(0)


@pytest.mark.parametrize("ticks", range(4))
def test_a_peer_ends_with_an_error_also_while_it_wakes(tmp_path: Path, ticks: int) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=5, num_peers=2, mode="insecure").run(_fail_while_it_wakes, ticks)


async def _fail_while_it_wakes(devices: Devices, ticks: int) -> None:
    devices.start(0)
    daemon = devices.daemons[0]
    await devices.until(lambda: devices.participant(0).session.in_round)
    daemon.neighbors.transport._tasks.fail(SecurityError("this peer may no longer take part"))
    for _ in range(ticks):
        await asyncio.sleep(0)
    daemon.runtime.wake()
    with pytest.raises(SecurityError, match="no longer take part"):
        async with asyncio.timeout(20):
            await devices.tasks[0]
    daemon.close()


def test_without_certificates_the_word_of_the_sponsor_has_to_do(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=2, mode="insecure").run(_join_unsigned)


async def _join_unsigned(devices: Devices) -> None:
    devices.files.append(add_unsigned(devices.kits, "garage", f"127.0.0.1:{devices.ports[2]}"))
    for peer in range(3):
        devices.start(peer)
    await devices.until(lambda: devices.sees(0, "garage") and devices.sees(1, "garage"))
    await devices.until(lambda: devices.members(1) == ["peer-0", "peer-1", "garage"])
    await devices.stop(0, 1, 2)


def test_a_device_that_comes_too_late_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_thread()
    monkeypatch.setattr(joining, "ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(joining, "DECLINED_S", 0.3)
    # Slow rounds: it is refused for as long as it bears while the run goes on, rather than finds that the run is over.
    Devices(tmp_path / "kits", rounds=5, num_peers=2, options=["peer.min_step_s=0.5"]).run(_come_too_late)


async def _come_too_late(devices: Devices) -> None:
    garage = devices.sign("garage")
    for peer in (0, 1, garage):
        devices.start(peer)
    with pytest.raises(HandshakeRefused, match="nobody lets it join: 'the run ends after round 4, before everybody"):
        await devices.tasks[garage]
    assert await devices.tasks[0] == await devices.tasks[1] == 0
    for daemon in devices.daemons.values():
        daemon.close()
