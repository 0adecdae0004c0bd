"""Peers that form the average of their models in one process: sockets are queues, and a kill may come at any event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.config.options import TransportOptions
from peer.daemon.final_average import MODEL_NAME, FinalAverage
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.notes.evaluations import Models
from peer.daemon.runtime import Runtime
from peer.daemon.traffic import Traffic
from peer.errors import RemoteProtocolError
from peer.net.transport import Transport
from peer.node.statements import Statements, Unsigned
from peer.run.summary import average

ROUNDS = 7
LAYOUT = Layout.of_shapes([(30, 10), (30,)], ["weight", "bias"])
Graph = Mapping[int, Collection[int]]

RING: Graph = {0: (1, 3), 1: (0, 2), 2: (1, 3), 3: (2, 0)}
COMPLETE: Graph = {each: tuple(other for other in range(4) if other != each) for each in range(4)}
LINE: Graph = {0: (1,), 1: (0, 2), 2: (1, 3), 3: (2,)}


def x_of(peer: int) -> FloatArray:
    return np.random.default_rng(peer).standard_normal(LAYOUT.size).astype(np.float32)


def vector(path: Path) -> FloatArray:
    tensors = load_file(path)
    return np.concatenate([tensors[name].numpy().ravel() for name in LAYOUT.names])


@dataclass
class Link:
    """The transport of one peer."""

    net: Net
    me: int
    refusals: dict[int, str] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    def is_up(self, peer: int) -> bool:
        return frozenset((self.me, peer)) in self.net.up

    def bulletin(self, peer: int, topic: str, data: bytes) -> bool:
        self.net.post(self.me, peer, topic, data)
        return self.is_up(peer)

    def send(self, peer: int, seq: int, frame: bytes) -> None:
        assert seq == 0
        self.net.post(self.me, peer, "", frame)

    def connection(self, peer: int) -> None:
        """Nothing waits to be sent."""


class Net:
    """Peers 0 to 3 over a graph, in folders below one."""

    def __init__(
        self,
        folder: Path,
        graph: Graph,
        *,
        weights: Mapping[int, float] | None = None,
        members: Collection[int] | None = None,
        give_up_after_s: float = 10.0,
        allowed: float = 1e3,
        older: Collection[int] = (),
        statements: Mapping[int, Statements] | None = None,
    ) -> None:
        """`weights`: u of each peer, in an algorithm with push-sum. `allowed`: how far a share may reach. `older`:
        peers of an earlier release."""
        self.folder, self.graph, self.weights, self.allowed = folder, graph, weights, allowed
        self.older = frozenset(older)
        self.members = tuple(members or graph)
        self.give_up_after_s, self.statements = give_up_after_s, statements or {}
        self.up: set[frozenset[int]] = set()
        self.peers: dict[int, tuple[FinalAverage, Neighbors, Runtime]] = {}
        self.tasks: dict[int, asyncio.Task[Path | None]] = {}
        self.events = 0
        self.on_event: Callable[[int], None] = lambda number: None
        self.is_lost: Callable[[int, int, str, bytes], bool] = lambda source, peer, topic, data: False
        """Whether a message of a peer to another one is lost, with the link."""
        self.blamed: list[tuple[int, int, str]] = []
        """(who blames, whom, why)."""

    def u(self, peer: int) -> float:
        return 1.0 if self.weights is None else self.weights[peer]

    def allowed_by(self, peer: int) -> float:
        """Return how far a peer lets shares reach."""
        return self.allowed

    def model(self, peer: int) -> Models:
        return Models(x_of(peer) / np.float32(self.u(peer)), x_of(peer), self.u(peer))

    def by_hand(self) -> FloatArray:
        return average([(self.model(peer).x, self.model(peer).u) for peer in self.members])

    def state(self, peer: int) -> Path:
        return self.folder / f"peer-{peer}"

    def open(self, peer: int, *, is_last_round_done: bool = True, formed: FinalAverage | None = None) -> FinalAverage:
        """Start a process of a peer, without its work; `formed` in the place of its part."""
        state, runtime = self.state(peer), Runtime()
        if not state.exists():
            state.mkdir()
            parts = np.split(self.model(peer).z, [LAYOUT.sizes[0]])
            tensors = {
                name: torch.from_numpy(part.copy()).view(shape)
                for name, part, shape in zip(LAYOUT.names, parts, LAYOUT.shapes, strict=True)
            }
            save_file(tensors | {"norm.running_mean": torch.full((3,), float(peer))}, state / MODEL_NAME)
        neighbors = Neighbors(Traffic(peer))
        neighbors.set_partners(self.graph[peer], self.graph[peer])
        neighbors.connect(cast(Transport, Link(self, peer)))
        formed = formed or FinalAverage(
            notes.Hearsay(peer, self.graph, self.statements.get(peer, Unsigned()), neighbors.is_up, runtime.now),
            rounds=ROUNDS,
            layout=LAYOUT,
            directory=state,
            is_last_round_done=is_last_round_done,
            why_not=None,
            most_weight=None if self.weights is None else len(self.graph) + 0.5,
            name=lambda each: f"peer-{each}",
            is_older=self.older.__contains__,
            neighbors=neighbors,
            runtime=runtime,
            options=TransportOptions(give_up_after_s=self.give_up_after_s, linger_s=0.3),
        )
        self.peers[peer] = formed, neighbors, runtime
        for other in self.graph[peer]:
            if other in self.peers:
                self.connect(peer, other)
        return formed

    def start(self, peer: int) -> None:
        """Start a process of a peer, and its work."""
        formed = self.open(peer)

        async def nothing() -> None:
            pass

        self.tasks[peer] = asyncio.get_running_loop().create_task(
            formed.form(self.members, self.model(peer), lambda owner, norm: self.allowed_by(peer), nothing)
        )

    def kill(self, peer: int) -> None:
        """End a process at once: its files stay as they are."""
        if (task := self.tasks.pop(peer, None)) is not None:
            task.cancel()
        del self.peers[peer]
        self.up = {pair for pair in self.up if peer not in pair}

    def connect(self, one: int, other: int) -> None:
        self.up.add(frozenset((one, other)))
        for me, peer in ((one, other), (other, one)):
            formed, neighbors, runtime = self.peers[me]
            neighbors.up(peer, runtime.now())
            for topic, greeting in ((notes.SHARE, formed.linked), (notes.AVERAGE, formed.linked_told)):
                for note in greeting(peer):
                    self.post(me, peer, topic, note)

    def post(self, source: int, peer: int, topic: str, data: bytes) -> None:
        if frozenset((source, peer)) not in self.up:
            return
        if self.is_lost(source, peer, topic, data):
            self.up.discard(frozenset((source, peer)))
            return
        target = self.peers[peer][0]
        asyncio.get_running_loop().call_soon(self._deliver, source, peer, target, topic, data)

    def _deliver(self, source: int, peer: int, target: FinalAverage, topic: str, data: bytes) -> None:
        if frozenset((source, peer)) not in self.up or self.peers[peer][0] is not target:
            return
        self.events += 1
        self.on_event(self.events)
        if peer not in self.peers or self.peers[peer][0] is not target:
            return
        judges = {notes.SHARE: target.heard, notes.AVERAGE: target.heard_told, "": target.frame_received}
        try:
            judges[topic](source, data)
        except RemoteProtocolError as error:
            self.blamed.append((peer, source, error.problem))
            self.up.discard(frozenset((source, peer)))
            asyncio.get_running_loop().call_later(0.01, self._again, source, peer)

    def _again(self, one: int, other: int) -> None:
        if {one, other} <= self.peers.keys() and frozenset((one, other)) not in self.up:
            self.connect(one, other)

    async def finish(self) -> dict[int, Path | BaseException | None]:
        """Return what comes of each peer, whichever of its processes."""
        found: dict[int, Path | BaseException | None] = {}
        while self.tasks.keys() - found.keys():
            for peer, task in list(self.tasks.items()):
                if task.done() and peer not in found:
                    found[peer] = task.exception() or task.result()
                    if isinstance(found[peer], Path):
                        for other in self.graph[peer]:
                            if other in self.peers and frozenset((peer, other)) in self.up:
                                self.peers[other][1].left[peer] = "completed"
            await asyncio.sleep(0.005)
        return found


def run(net: Net, starts: Iterable[int] = range(4)) -> dict[int, Path | BaseException | None]:
    async def all_of_them() -> dict[int, Path | BaseException | None]:
        for peer in starts:
            net.start(peer)
        return await net.finish()

    return asyncio.run(all_of_them())
