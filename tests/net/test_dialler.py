"""When a peer dials a neighbour, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.errors import PeerUnreachable
from peer.net.connection import Connection
from peer.net.dialler import Dialler
from peer.net.neighbor import Neighbor, RelayAddress

PATIENCE_S = 10.0
LONGEST_S = 30.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on whose clock waiting takes no time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or 0.0
        return super().select(0.0)


class FakeLinks:
    """The link to one neighbour, which the test brings up and takes down."""

    def __init__(self) -> None:
        self.is_up, self.changed = False, asyncio.Event()

    def holds(self, neighbor: Neighbor) -> bool:
        return True

    def connection(self, peer: int) -> object | None:
        return self if self.is_up else None

    async def wait_down(self, peer: int) -> None:
        while self.is_up:
            self.changed.clear()
            await self.changed.wait()

    def note_problem(self, neighbor: Neighbor, reason: str) -> None: ...

    def set(self, is_up: bool) -> None:
        self.is_up = is_up
        self.changed.set()


class Tried(Dialler):
    """Notes when it dials; nobody answers."""

    def __init__(self, links: FakeLinks) -> None:
        nothing: Any = SimpleNamespace()
        super().__init__(
            links=cast(Any, links),
            handshake=nothing,
            tunnels=nothing,
            channel_options=[],
            dial_timeout_s=PATIENCE_S,
            backoff_max_s=LONGEST_S,
            is_closing=lambda: False,
        )
        self.at: list[float] = []

    async def _dial(self, neighbor: Neighbor) -> Connection | None:
        self.at.append(asyncio.get_running_loop().time())
        raise PeerUnreachable("nobody is there")


def neighbor(*, dial: bool) -> Neighbor:
    return Neighbor(1, "ben", "192.0.2.1:7700", dial=dial, calls=None if dial else "192.0.2.2:7700")


def attempts(*, dial: bool, ups: Mapping[float, bool], for_s: float) -> list[float]:
    """Return when a neighbour is dialled within so many seconds; `ups`: time → whether a link comes up or goes down."""

    async def story() -> list[float]:
        links = FakeLinks()
        tried, loop = Tried(links), asyncio.get_running_loop()
        for at, is_up in ups.items():
            loop.call_at(at, links.set, is_up)
        task = loop.create_task(tried.keep_up(neighbor(dial=dial)))
        await asyncio.sleep(for_s)
        task.cancel()
        return tried.at

    return in_no_time(story())


def in_no_time(story: Coroutine[Any, Any, list[float]]) -> list[float]:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(story)
    finally:
        loop.close()


def test_the_end_that_dials_begins_at_once_and_pauses_ever_longer() -> None:
    at = attempts(dial=True, ups={}, for_s=600.0)
    assert at[:1] == [0.0]
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert 0.05 <= pauses[0] <= 0.1
    assert max(pauses) <= LONGEST_S
    assert min(pauses[-5:]) >= LONGEST_S / 2


def test_a_peer_that_is_back_waits_for_no_pause_of_its_neighbours() -> None:
    """A neighbour that dialled in vain for long may pause for half a minute. So the end that waits dials, too."""
    at = attempts(dial=False, ups={}, for_s=600.0)
    assert 1.0 <= at[0] <= 1.5
    assert len(at) > 15, "it goes on"


@pytest.mark.parametrize("up_at", [0.0, 0.5, 0.99])
def test_the_end_that_waits_dials_nobody_that_calls_in_time(up_at: float) -> None:
    assert attempts(dial=False, ups={up_at: True}, for_s=600.0) == []


def test_a_link_that_the_other_end_opened_ends_the_long_pauses_too() -> None:
    at = attempts(dial=True, ups={300.0: True, 400.0: False}, for_s=402.0)
    after = [moment for moment in at if moment >= 400.0]
    assert len(after) >= 3
    assert after[0] == 400.0


def test_each_time_that_the_link_goes_down_the_other_end_has_its_time() -> None:
    at = attempts(dial=False, ups={1.0: True, 100.0: False, 105.0: True, 200.0: False}, for_s=230.0)
    assert 200.0 + PATIENCE_S <= at[0] <= 200.0 + 1.5 * PATIENCE_S


def test_of_two_ends_that_cannot_be_dialled_the_one_that_waits_takes_the_relay_of_the_other() -> None:
    relay = RelayAddress("garage", "192.0.2.3:7700")
    assert Neighbor(1, "ben", None, dial=False, relay=relay).can_be_dialled
    assert not Neighbor(1, "ben", None, dial=False).can_be_dialled
