"""Three real peers behind cables that can be cut, watched with the operator's certificate.

One is killed and comes back; one is separated from the others while the operator still reaches all three.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from peer.config.options import load
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.ops.peer_processes import ForkServer, PeerProcess
from peer.watch.observer import open_observer
from tests.browser import Page, browser
from tests.net.transport_peers import Proxy
from tests.watch.serving import serving

pytestmark = pytest.mark.usefixtures("warm_python")

CUT_OFF = 1
"""The peer whose cables can be cut."""
RED = "rgb(179, 38, 30)"

Result = TypeVar("Result")


class Cables:
    """All connections between peer CUT_OFF and the others."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.inward = Proxy(ports[CUT_OFF])
        self.outward = {peer: Proxy(ports[peer]) for peer in range(len(ports)) if peer != CUT_OFF}
        for proxy in self.all:
            self._do(proxy.__aenter__)

    @property
    def all(self) -> list[Proxy]:
        return [self.inward, *self.outward.values()]

    def port(self, at: int, to: int) -> int:
        """Return under which port a peer finds another one."""
        if to == CUT_OFF and at != CUT_OFF:
            return self.inward.port
        return self.outward[to].port if at == CUT_OFF and to != CUT_OFF else self._ports[to]

    def set(self, *, whole: bool) -> None:
        """Cut or mend them."""

        async def change() -> None:
            for proxy, peer in zip(self.all, (CUT_OFF, *self.outward), strict=True):
                # Port 1 refuses connections.
                proxy.target = self._ports[peer] if whole else 1
                if not whole:
                    proxy.cut()

        self._do(change)

    def close(self) -> None:
        for proxy in self.all:
            self._do(proxy.__aexit__)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, action: Callable[[], Awaitable[Result]]) -> Result:
        async def act() -> Result:
            return await action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(60)


class Devices:
    """The peers' processes."""

    def __init__(self, folder: Path, kits: Path, cables: Cables, ports: list[int]) -> None:
        self._server = ForkServer()
        self._folder = folder
        self.processes: list[PeerProcess] = []
        for peer in range(len(ports)):
            shutil.copytree(kits / f"peer-{peer}", folder / f"peer-{peer}")
            file = folder / f"peer-{peer}" / "peer.toml"
            text = file.read_text()
            for other, port in enumerate(ports):
                seen = cables.port(peer, other)
                text = text.replace(f'advertise = "127.0.0.1:{port}"', f'advertise = "127.0.0.1:{seen}"')
            file.write_text(text)
            self.processes.append(self.start(peer))

    def start(self, peer: int) -> PeerProcess:
        folder = self._folder / f"peer-{peer}"
        return self._server.start(["run", "--config", str(folder / "peer.toml")], folder / "log.txt")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._server.close()


@contextmanager
def running(tmp_path: Path) -> Iterator[tuple[Path, Devices, Cables]]:
    ports = free_ports(3)
    options = (
        "run.name=kits",
        "run.rounds=100000",
        "peer.min_step_s=0.1",
        "evaluation.every_rounds=10",
        "training.batch_size=4",
        "transport.give_up_after_s=600",
        "transport.backoff_max_s=0.2",
    )
    kits = tmp_path / "kits"
    write_cluster(kits, load(environment={}, overrides=options), [Host("127.0.0.1", port) for port in ports])
    cables = Cables(ports)
    try:
        devices = Devices(tmp_path / "devices", kits, cables, ports)
        try:
            yield kits, devices, cables
        finally:
            devices.close()
    finally:
        cables.close()


@pytest.mark.slow
def test_a_killed_peer_turns_red_and_comes_back_and_a_partition_is_edges_that_are_down(tmp_path: Path) -> None:
    with (
        browser() as chromium,
        running(tmp_path) as (kits, devices, cables),
        serving(open_observer(kits)) as served,
    ):
        shown = Page(chromium, served.address)
        page = shown.page

        running_rows = "#peers-rows:has(tr:nth-child(3)):not(:has(tr.down))"
        page.wait_for_selector(running_rows)
        page.wait_for_selector("#drawing:has(.edge):not(:has(.edge.down, .edge.unknown))")
        assert page.locator("#drawing .edge").count() == 3
        before = page.locator("#round").inner_text()
        page.wait_for_selector(f"#round:not(:text-is('{before}'))")
        page.wait_for_selector("#figure svg.plot")
        assert page.locator("#name").inner_text() == "kits"

        devices.processes[2].kill()
        devices.processes[2].wait()
        page.wait_for_selector("#peers-rows tr[data-peer=peer-2].down")
        page.wait_for_selector("#drawing:has(.edge.down)")
        node = page.locator("#drawing .node.down")
        assert node.locator(".label").inner_html() == "peer-2"
        assert node.locator("circle").last.evaluate("e => getComputedStyle(e).fill") == RED
        assert "peer-2 cannot be reached" in page.locator("#event-list").inner_text()
        devices.processes[2] = devices.start(2)
        page.wait_for_selector(running_rows)
        page.wait_for_selector("#drawing:has(.edge):not(:has(.edge.down, .edge.unknown))")
        assert "peer-2 is back" in page.locator("#event-list").inner_text()

        cables.set(whole=False)
        page.wait_for_selector("#drawing:has(.edge.down ~ .edge.down)")
        assert page.locator("#peers-rows tr.down").count() == 0, "the operator reaches all of them"
        down = page.locator("#links-rows tr.down td:first-child").all_inner_texts()
        assert sorted(down) == ["peer-0 → peer-1", "peer-1 → peer-2"]
        # Whoever is cut off is waited for.
        page.wait_for_selector("#waiting:has-text('Waiting now: ')")
        cables.set(whole=True)
        page.wait_for_selector("#drawing:has(.edge):not(:has(.edge.down, .edge.unknown))")
        before = page.locator("#round").inner_text()
        page.wait_for_selector(f"#round:not(:text-is('{before}'))")
        assert shown.complaints == []
        shown.close()
